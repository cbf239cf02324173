"""Flickr8k (``flickr8k:ROOT``) in the three forms in which it is passed around.

1. ``captions.json`` (see :mod:`vacsr.data.tables`) with ``images.zip`` or ``images/``;
2. Karpathy's ``dataset_flickr8k.json``;
3. the authors' own ``Flickr8k.token.txt`` with the split lists ``Flickr_8k.{train,dev,test}Images.txt``, where these
   exist: photos in none of the lists belong to no split and are not read.

An image's id is its file name, a caption's id ``name#index``: human judgements refer to these.
"""

from dataclasses import replace
from pathlib import Path

from vacsr.data.archives import find_photos, missing
from vacsr.data.captions import CaptionTable, photo_set, table_of
from vacsr.data.coco import read_karpathy
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.photos import PhotoSet
from vacsr.data.tables import read_captions
from vacsr.errors import DataError
from vacsr.files import read_lines

_CAPTIONS = ("captions.json", "dataset_flickr8k.json", "Flickr8k.token.txt", "Flickr8k_text/Flickr8k.token.txt")
_PHOTOS = ("images.zip", "images", "Flicker8k_Dataset", "Flickr8k_Dataset", "Images", "Flickr8k_Dataset.zip")
_LISTS = {split: f"Flickr_8k.{split}Images.txt" for split in ("train", "dev", "test")}
_NO_PHOTO = "2258277193_586949ec62.jpg.1"  # captioned in the authors' file, but never published: left out


@register("flickr8k", path="ROOT", options=("split",), path_options=("captions", "images"))
def load_flickr8k(spec: Spec, on_error: OnError) -> PhotoSet:
    """``flickr8k:ROOT[,captions=FILE][,images=DIR_OR_ZIP][,split=S]``; splits are train, dev and test."""
    root, split, images = spec.location, spec.option("split"), spec.path_option("images")
    file = spec.path_option("captions") or next((root / name for name in _CAPTIONS if (root / name).is_file()), None)
    if file is None:
        raise missing(root, expected=", ".join(_CAPTIONS[:3]))
    table = _read(file)
    candidates = [images] if images else [root / name for name in _PHOTOS]
    return photo_set(table, find_photos(candidates, table.image_ids, root=root), split=split, on_error=on_error)


def _read(path: Path) -> CaptionTable:
    if path.name.endswith(".token.txt"):
        return _read_tokens(path)
    if not path.name.startswith("dataset_"):
        return read_captions(path)
    images = read_karpathy(path)
    captions = [[text for _, text in image.captions] for image in images]
    names, splits = [image.filename for image in images], [image.split for image in images]
    return table_of(path, names, captions, splits=splits)


def _read_tokens(path: Path) -> CaptionTable:
    """Lines ``name.jpg#index<tab>caption``, photos in the order of first appearance."""
    texts: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        token, tab, text = line.partition("\t")
        name, _, index = token.rpartition("#")
        if not tab or not name or not index.isdecimal() or len(index) > 9:
            raise DataError(f"{path}, line {number} is {line[:60]!r}, expected name.jpg#0<tab>caption — copy it again")
        texts.setdefault(name, []).append((int(index), text))
    texts.pop(_NO_PHOTO, None)
    captions = [sorted(some) for some in texts.values()]
    table = table_of(
        path,
        list(texts),
        [[text for _, text in some] for some in captions],
        caption_ids=[[f"{name}#{index}" for index, _ in some] for name, some in zip(texts, captions, strict=True)],
    )
    return _with_lists(table, path.parent)


def _with_lists(table: CaptionTable, folder: Path) -> CaptionTable:
    """The photos of the authors' split lists, in the order of the captions; without lists, all of them."""
    lists = {split: folder / name for split, name in _LISTS.items() if (folder / name).is_file()}
    if not lists:
        return table
    split_of = {name.strip(): split for split, path in lists.items() for name in read_lines(path)}
    split_of.pop(_NO_PHOTO, None)
    known = set(table.image_ids)
    unknown = [name for name in split_of if name not in known]
    if unknown:
        message = f"{len(unknown):,} photos of the split lists in {folder} have no captions, first {unknown[0]!r}"
        raise DataError(f"{message} — take lists and captions from one release")
    listed = table.subset([row for row, name in enumerate(table.image_ids) if name in split_of])
    return replace(listed, splits=tuple(split_of[name] for name in listed.image_ids))
