"""Photos with classes, by name: ``load_classes("coop:DATA,set=oxford_pets")``, and draws of a few of each class."""

from vacsr.data.fewshot import coop, custom  # noqa: F401, each registers its formats
from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos, base_and_new, check_template
from vacsr.data.fewshot.shots import Shots, draw_shots, load_shots, save_shots, take_shots
from vacsr.data.formats import CLASS_FORMATS, parse_spec
from vacsr.data.scenes import classes  # noqa: F401, registers its format

__all__ = [
    "CLASS_FORMATS", "FewshotSource", "LabelledPhotos", "Shots", "base_and_new", "check_template", "draw_shots",
    "load_classes", "load_shots", "save_shots", "take_shots",
]  # fmt: skip


def load_classes(spec: str, *, whole: bool = False) -> FewshotSource:
    """The photos with classes that a SPEC names.

    ``coop:ROOT,set=NAME`` is one of the data sets of the few-shot papers, laid out as CoOp asks; ``folder:DIR`` has a
    folder per class, ``csv:FILE`` a row per photo, and ``scenes:`` is drawn. With ``whole``, all photos of a folder or
    table without splits are the test.
    """
    parsed = parse_spec(spec, formats=CLASS_FORMATS)
    source: FewshotSource = parsed.format.load(parsed, whole)
    return source
