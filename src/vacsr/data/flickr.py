"""Flickr8k (``flickr8k:ROOT``) in the three forms in which it is passed around.

1. ``captions.json`` (see :mod:`vacsr.data.captions`) with ``images.zip`` or ``images/``;
2. Karpathy's ``dataset_flickr8k.json``;
3. the authors' own ``Flickr8k.token.txt`` with the split lists ``Flickr_8k.{train,dev,test}Images.txt``, where these
   are: photos in none of the lists belong to no split and are not read.

An image's id is its file name, a caption's id ``name#index``: human judgements refer to these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vacsr.data.captions import CaptionTable, choose_split, number_captions, read_captions, take_images
from vacsr.data.karpathy import read_karpathy
from vacsr.data.photos import PhotoSet
from vacsr.data.problems import OnError, missing, photo_set
from vacsr.data.sources import find_photos
from vacsr.data.spec import Spec
from vacsr.errors import DataError

_PHOTOS = ("images.zip", "images", "Flicker8k_Dataset", "Flickr8k_Dataset", "Images", "Flickr8k_Dataset.zip")
_LISTS = {split: f"Flickr_8k.{split}Images.txt" for split in ("train", "dev", "test")}
_NO_PHOTO = "2258277193_586949ec62.jpg.1"  # captioned in the authors' file; no such photo was ever published


class _Read(NamedTuple):
    """A captions file as a table, and what the data set itself leaves out."""

    table: CaptionTable
    dropped: tuple[str, ...] = ()


def load_flickr8k(spec: Spec, on_error: OnError) -> PhotoSet:
    """``flickr8k:ROOT[,captions=FILE][,images=DIR_OR_ZIP][,split=S]``; splits are train, dev and test."""
    root = Path(spec.path).expanduser()
    read = _read(root, spec.options.get("captions"))
    split = spec.options.get("split")
    table = choose_split(read.table, split)
    given = spec.options.get("images")
    places = [Path(given).expanduser()] if given else [root / name for name in _PHOTOS]
    photos = find_photos(places, table.image_ids)
    if photos is None:
        raise missing(root, expected=f"the photos in {' or '.join(str(place) for place in places)}")
    return photo_set(table, photos, split=split, on_error=on_error, dropped=read.dropped)


def _read(root: Path, given: str | None) -> _Read:
    """The captions file that was named, or the first that is there."""
    if given is not None:
        return _read_file(Path(given).expanduser())
    names = ("captions.json", "dataset_flickr8k.json", "Flickr8k.token.txt", "Flickr8k_text/Flickr8k.token.txt")
    for name in names:
        if (root / name).is_file():
            return _read_file(root / name)
    raise missing(root, expected="captions.json, dataset_flickr8k.json or Flickr8k.token.txt")


def _read_file(path: Path) -> _Read:
    if path.name.endswith(".token.txt"):
        return _read_tokens(path)
    if path.name.startswith("dataset_"):
        return _Read(_read_split_file(path))
    return _Read(read_captions(path))


def _read_split_file(path: Path) -> CaptionTable:
    images = read_karpathy(path)
    rows = [row for row, image in enumerate(images) for _ in image.sentences]
    return CaptionTable(
        source=str(path),
        image_ids=tuple(image.filename for image in images),
        caption_ids=number_captions([images[row].filename for row in rows]),
        caption_image=tuple(rows),
        captions=tuple(sentence for image in images for sentence in image.sentences),
        splits=tuple(image.split for image in images),
    )


def _read_tokens(path: Path) -> _Read:
    """Lines ``name.jpg#index<tab>caption``, photos in the order of first appearance."""
    texts: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(_lines(path), start=1):
        mark, tab, text = line.partition("\t")
        name, _, index = mark.rpartition("#")
        if not tab or not name or not index.isdecimal():
            raise DataError(f"{path}, line {number} is {line[:60]!r}, expected name.jpg#0<tab>caption — copy it again")
        texts.setdefault(name, []).append((int(index), text))
    lost = texts.pop(_NO_PHOTO, None)
    images = list(texts)
    rows = [row for row, name in enumerate(images) for _ in texts[name]]
    table = CaptionTable(
        source=str(path),
        image_ids=tuple(images),
        caption_ids=tuple(f"{name}#{index}" for name in images for index, _ in sorted(texts[name])),
        caption_image=tuple(rows),
        captions=tuple(text for name in images for _, text in sorted(texts[name])),
    )
    dropped = () if lost is None else (f"{_NO_PHOTO}: {len(lost)} captions of a photo that was never published",)
    return _Read(_with_lists(table, path.parent), dropped)


def _with_lists(table: CaptionTable, folder: Path) -> CaptionTable:
    """The photos of the authors' split lists, in the order of the captions; without lists, all of them."""
    lists = {split: folder / name for split, name in _LISTS.items() if (folder / name).is_file()}
    if not lists:
        return table
    split_of = {name.strip(): split for split, path in lists.items() for name in _lines(path)}
    split_of.pop(_NO_PHOTO, None)
    known = set(table.image_ids)
    unknown = [name for name in split_of if name not in known]
    if unknown:
        message = f"{len(unknown):,} photos of the split lists in {folder} have no captions, first {unknown[0]!r}"
        raise DataError(f"{message} — take lists and captions from one release")
    listed = take_images(table, [row for row, name in enumerate(table.image_ids) if name in split_of])
    return replace(listed, splits=tuple(split_of[name] for name in listed.image_ids))


def _lines(path: Path) -> Sequence[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}) — copy it again as UTF-8") from error
