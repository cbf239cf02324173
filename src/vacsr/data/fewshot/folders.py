"""Your own photos, one folder per class: ``folder:DIR``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vacsr.data.fewshot.entries import Entry, build_source
from vacsr.data.fewshot.labelled import FewshotSource
from vacsr.data.fewshot.listing import photos_in, subfolders
from vacsr.data.fewshot.shares import arrange, shares_of, split_named
from vacsr.data.fewshot.specs import ClassSpec
from vacsr.data.fewshot.templates import PLAIN, check_template
from vacsr.data.problems import missing
from vacsr.errors import DataError


def load_class_folder(spec: ClassSpec, *, whole: bool = False) -> FewshotSource:
    """``folder:DIR[,template=…]``: the name of a folder is its class, in sorted order; folders in it are read too.

    Where all folders of ``DIR`` are named train, val (or dev, valid, validation) and test, in letters of any size,
    classes are one level down; labels are over the classes of all of them. Otherwise photos are shared out, see
    :mod:`vacsr.data.fewshot.shares`; the options ``val``, ``test`` and ``seed`` say how. With ``whole`` they all test.
    """
    root = Path(spec.path).expanduser()
    first = subfolders(root) if root.is_dir() else []
    if not first:
        raise missing(root, expected="a folder per class (cat/, dog/), or train/ and test/ that hold these")
    parts = _split_folders(root, first) or {"": "train"}
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
    splits = arrange(found, shares_of(spec), place=str(root), whole=whole)._replace(classes=tuple(classes))
    template = check_template(spec.options.get("template", PLAIN))
    return build_source(root, splits, name=root.resolve().name, template=template)


def _split_folders(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Which split each folder is; none where they are classes. A mixture would make a class of a split."""
    parts = {name: part for name in names if (part := split_named(name)) is not None}
    odd = [name for name in names if name not in parts]
    if odd and {"train", "test"} & set(parts.values()):
        message = f"{root} holds {', '.join(parts)}, and {odd[0]}/ beside, which is no split"
        raise DataError(f"{message} — move it away, or put all class folders into one folder train/")
    if len(set(parts.values())) < len(parts):
        raise DataError(f"{root} holds {', '.join(parts)}, two names for the same split — keep one of them")
    return {} if odd else parts
