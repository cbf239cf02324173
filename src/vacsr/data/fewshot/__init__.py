"""Photos with classes, by name: ``load_classes("coop:DATA,set=oxford_pets")``, and draws of a few of each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from vacsr.data.fewshot.folders import load_class_folder
from vacsr.data.fewshot.halves import BaseNew, base_and_new
from vacsr.data.fewshot.indices import load_shots, save_shots
from vacsr.data.fewshot.labelled import FewshotSource, LabelledPhotos, check_source
from vacsr.data.fewshot.layouts import COOP_SETS, SHIFT_SETS, load_coop
from vacsr.data.fewshot.shots import ShotPhotos, Shots, draw_shots, take_shots
from vacsr.data.fewshot.specs import ClassSpec, parse_class_spec
from vacsr.data.fewshot.tables import load_class_table
from vacsr.data.fewshot.templates import TEMPLATES

__all__ = [
    "COOP_SETS",
    "SHIFT_SETS",
    "TEMPLATES",
    "BaseNew",
    "ClassSpec",
    "FewshotSource",
    "LabelledPhotos",
    "ShotPhotos",
    "Shots",
    "base_and_new",
    "draw_shots",
    "load_classes",
    "load_shots",
    "parse_class_spec",
    "save_shots",
    "take_shots",
]


def load_classes(spec: str, *, whole: bool = False) -> FewshotSource:
    """The photos with classes that a SPEC names.

    ``coop:ROOT,set=NAME`` is one of the data sets of the few-shot papers, laid out as CoOp asks; ``folder:DIR`` has a
    folder per class, ``csv:FILE`` a row per photo, and ``scenes:`` is drawn. Each is told of in the module that loads
    it. Photos are opened when they are used; :meth:`LabelledPhotos.check_files` looks for them all. ``whole`` is for
    data that is only tested: a folder or table without splits is then not shared out, all its photos are the test.
    """
    parsed = parse_class_spec(spec)
    loaders: Mapping[str, Callable[[ClassSpec], FewshotSource]] = {
        "coop": load_coop,
        "folder": partial(load_class_folder, whole=whole),
        "csv": partial(load_class_table, whole=whole),
        "scenes": _load_scenes,
    }
    return check_source(loaders[parsed.scheme](parsed))


def _load_scenes(spec: ClassSpec) -> FewshotSource:
    from vacsr.data.scenes.classes import scene_classes

    return scene_classes(spec)
