"""Your own photos, one folder per class: ``folder:DIR``."""

from __future__ import annotations

from pathlib import Path

from vacsr.data.fewshot.entries import Entry, build_source
from vacsr.data.fewshot.labelled import FewshotSource
from vacsr.data.fewshot.listing import photos_in, subfolders
from vacsr.data.fewshot.shares import SPLIT_NAMES, arrange, shares_of
from vacsr.data.fewshot.specs import ClassSpec
from vacsr.data.fewshot.templates import PLAIN, check_template
from vacsr.data.problems import missing
from vacsr.errors import DataError


def load_class_folder(spec: ClassSpec) -> FewshotSource:
    """``folder:DIR[,template=…]``: the name of a folder is its class, in sorted order; folders in it are read too.

    Where all folders of ``DIR`` are named train, val (or dev, valid) and test, classes are one level down; labels are
    over the classes of all of them. Otherwise photos are shared out, see :mod:`vacsr.data.fewshot.shares`; the options
    ``val``, ``test`` and ``seed`` say how.
    """
    root = Path(spec.path).expanduser()
    first = subfolders(root) if root.is_dir() else []
    if not first:
        raise missing(root, expected="a folder per class (cat/, dog/), or train/ and test/ that hold these")
    split = all(name in SPLIT_NAMES for name in first)
    parts = {name: SPLIT_NAMES[name] for name in first} if split else {"": "train"}
    if len(set(parts.values())) < len(parts):
        raise DataError(f"{root} holds {', '.join(first)}, two names for the same split — keep one of them")
    folders = {name: subfolders(root / name) for name in parts}
    classes = sorted({one for found in folders.values() for one in found})
    label = {name: number for number, name in enumerate(classes)}
    found = {
        parts[part]: [
            Entry(path, label[name], name)
            for name in names
            for path in photos_in(root, f"{part}/{name}" if part else name)
        ]
        for part, names in folders.items()
    }
    splits = arrange(found, shares_of(spec), place=str(root))._replace(classes=tuple(classes))
    template = check_template(spec.options.get("template", PLAIN))
    return build_source(root, splits, name=root.resolve().name, template=template)
