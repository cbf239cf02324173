"""The 15 data sets of the few-shot papers, in the files and folders that CoOp's data instructions ask for.

Most have ``split_zhou_*.json``: ``{"train": [[path, label, class name], …], "val": …, "test": …}``, names already as
prompts want them (EuroSAT's are rewritten there, SUN397's words turned round).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vacsr.data.fewshot.aircraft import IMAGE_LISTS, VARIANTS, read_aircraft
from vacsr.data.fewshot.entries import Splits, as_entries, build_source
from vacsr.data.fewshot.imagenet import CLASSNAMES, read_imagenet, read_numbered, read_shifted
from vacsr.data.fewshot.labelled import FewshotSource
from vacsr.data.fewshot.specs import ClassSpec, nearest
from vacsr.data.fewshot.templates import TEMPLATES, check_template
from vacsr.data.karpathy import read_json
from vacsr.errors import DataError, UsageError


class Layout(NamedTuple):
    """Where a data set lies under the root."""

    folder: str
    photos: str
    """The folder in it that paths of photos start from, "" for itself."""
    needs: tuple[str, ...]
    """What must be in the folder; names of folders end in a slash."""
    read: Callable[[Path], Splits]


def read_split(folder: Path, *, file: str) -> Splits:
    """One of the ``split_zhou_*.json`` files."""
    place = folder / file
    value = read_json(place, keys=("train", "val", "test"))
    parts = [as_entries(value[part], place=f"{place}, {part}") for part in ("train", "val", "test")]
    return Splits(parts[0], parts[1] or None, parts[2])


def _zhou(folder: str, photos: str, name: str, *, needs: tuple[str, ...] = ()) -> Layout:
    file = f"split_zhou_{name}.json"
    return Layout(folder, photos, (*(needs or (f"{photos}/",)), file), partial(read_split, file=file))


def _shifted(folder: str, photos: str, *, read: Callable[..., Splits] = read_shifted) -> Layout:
    return Layout(folder, photos, (f"{photos}/", CLASSNAMES), partial(read, photos=photos))


LAYOUTS: Mapping[str, Layout] = {
    "imagenet": Layout("imagenet", "images", ("images/train/", "images/val/", CLASSNAMES), read_imagenet),
    "caltech101": _zhou("caltech-101", "101_ObjectCategories", "Caltech101"),
    "oxford_pets": _zhou("oxford_pets", "images", "OxfordPets"),
    "stanford_cars": _zhou("stanford_cars", "", "StanfordCars", needs=("cars_train/", "cars_test/")),
    "oxford_flowers": _zhou("oxford_flowers", "jpg", "OxfordFlowers"),
    "food101": _zhou("food-101", "images", "Food101"),
    "fgvc_aircraft": Layout("fgvc_aircraft", "images", ("images/", VARIANTS, *IMAGE_LISTS.values()), read_aircraft),
    "sun397": _zhou("sun397", "SUN397", "SUN397"),
    "dtd": _zhou("dtd", "images", "DescribableTextures"),
    "eurosat": _zhou("eurosat", "2750", "EuroSAT"),
    "ucf101": _zhou("ucf101", "UCF-101-midframes", "UCF101"),
    "imagenetv2": _shifted("imagenetv2", "imagenetv2-matched-frequency-format-val", read=read_numbered),
    "imagenet_sketch": _shifted("imagenet-sketch", "images"),
    "imagenet_a": _shifted("imagenet-adversarial", "imagenet-a"),
    "imagenet_r": _shifted("imagenet-rendition", "imagenet-r"),
}
SHIFT_SETS = ("imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r")
"""For tests only: ImageNet's classes seen otherwise."""
COOP_SETS = tuple(name for name in LAYOUTS if name not in SHIFT_SETS)
"""The 11 that are trained on."""


def load_coop(spec: ClassSpec) -> FewshotSource:
    """``coop:ROOT,set=NAME[,template=…]``: a data set under the folder that holds them all."""
    name = spec.options.get("set")
    if name is None or name not in LAYOUTS:
        given = "names no data set" if name is None else f"has no data set {name!r}{nearest(name, LAYOUTS)}"
        raise UsageError(f"{spec} {given} — write coop:{spec.path},set=NAME with one of: {', '.join(LAYOUTS)}")
    root, layout = Path(spec.path).expanduser(), LAYOUTS[name]
    folder = root / layout.folder
    if not all(_there(folder, need) for need in layout.needs):
        raise _incomplete(name, root, layout)
    template = check_template(spec.options.get("template", TEMPLATES[name]))
    return build_source(folder / layout.photos, layout.read(folder), name=name, template=template)


def _there(folder: Path, need: str) -> bool:
    return (folder / need).is_dir() if need.endswith("/") else (folder / need).is_file()


def _incomplete(name: str, root: Path, layout: Layout) -> DataError:
    """Which files are expected where, which are there, and what to type next."""
    folder = root / layout.folder
    listed = [f"  {'found' if _there(folder, need) else 'MISSING':7} {folder}/{need}" for need in layout.needs]
    act = "put what is missing there (CoOp's DATASETS.md says where it comes from), or correct the path"
    if root.name == layout.folder and any(_there(root, need) for need in layout.needs):
        act = f"ROOT is the folder above: write coop:{root.parent},set={name}"
    return DataError(f"{root} does not hold the data set {name}; expected\n" + "\n".join(listed) + f"\n — {act}")
