"""COCO captions (``coco:ROOT``): Karpathy's splits where his file is there, otherwise COCO's own train and validation.

::

    ROOT/annotations/dataset_coco.json          Karpathy's splits (or ROOT/dataset_coco.json)
    ROOT/annotations/captions_train2014.json    COCO's own files; with Karpathy's they check the caption ids
    ROOT/annotations/captions_val2014.json      (or the two of 2017)
    ROOT/train2014/  ROOT/val2014/              photos; or ROOT/images/train2014/ …, or train2014.zip …

An image's id is its COCO id, a caption's id its annotation id: ECCV Caption and CxC judge by these.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vacsr.data.captions import CaptionTable, choose_split
from vacsr.data.checks import check_split, check_unique
from vacsr.data.karpathy import KarpathyImage, read_json, read_karpathy
from vacsr.data.photos import PhotoSet
from vacsr.data.problems import OnError, missing, photo_set
from vacsr.data.sources import JoinedPhotos, StoredPhotos, find_photos
from vacsr.data.spec import Spec
from vacsr.errors import DataError, UsageError

_YEARS = ("2014", "2017")
_EXPECTED = (
    "annotations/dataset_coco.json (Karpathy's splits), or annotations/captions_train2014.json and "
    "captions_val2014.json (or those of 2017)"
)


class _CocoImage(NamedTuple):
    """One photo with its captions."""

    image_id: int
    folder: str
    """``train2014`` and so on."""
    filename: str
    split: str
    captions: tuple[tuple[int, str], ...]
    """Annotation id and text."""


def load_coco(spec: Spec, on_error: OnError) -> PhotoSet:
    """``coco:ROOT[,split=S][,captions=5][,annotations=FILE][,images=DIR]``.

    Splits by Karpathy: train (his train and restval, 113,287 photos), dev and test (5,000 each). With COCO's own files:
    train and dev. ``captions``: some photos have six or seven, and the first five are kept, as PCME++ and the ECCV
    Caption test list do; another number, or "all". ``annotations``: one file instead of those in ``annotations/``;
    ``images``: the folder that holds the photos, or their folders or zips.
    """
    root = Path(spec.path).expanduser()
    keep = _kept_captions(spec.options.get("captions", "5"))
    split = spec.options.get("split")
    source, images = _read(root, spec.options.get("annotations"), split=split)
    table = choose_split(_table(source, images, keep=keep), split)
    chosen = {str(image.image_id): image for image in images}
    photos = _photos([chosen[name] for name in table.image_ids], root=root, given=spec.options.get("images"))
    return photo_set(table, photos, split=split, on_error=on_error)


def _kept_captions(option: str) -> int | None:
    if option == "all":
        return None
    if not option.isdecimal() or int(option) < 1:
        raise UsageError(f"coco: captions={option}, expected a number of captions per photo or all — write captions=5")
    return int(option)


def _read(root: Path, given: str | None, *, split: str | None) -> tuple[str, list[_CocoImage]]:
    """The named file, Karpathy's, or COCO's own: where from, and its images, of other splits perhaps too."""
    if given is not None:
        file = Path(given).expanduser()
        karpathys = file.name.startswith("dataset_")
        return given, _read_split_file(file, root, split=split) if karpathys else _read_annotations(file)
    for file in (root / "annotations" / "dataset_coco.json", root / "dataset_coco.json"):
        if file.is_file():
            return str(file), _read_split_file(file, root, split=split)
    for year in _YEARS:
        files = _annotation_files(root, [f"train{year}", f"val{year}"])
        if files:
            return str(files[0].parent), [image for file in files for image in _read_annotations(file)]
    raise missing(root, expected=_EXPECTED)


def _annotation_files(root: Path, folders: Sequence[str]) -> list[Path]:
    """COCO's own files for these photo folders, as far as they are there."""
    places = [(root / "annotations" / name, root / name) for name in (f"captions_{folder}.json" for folder in folders)]
    return [next(place for place in pair if place.is_file()) for pair in places if any(map(Path.is_file, pair))]


def _table(source: str, images: Sequence[_CocoImage], *, keep: int | None) -> CaptionTable:
    kept = [image.captions[:keep] for image in images]
    ids = tuple(str(image.image_id) for image in images)
    caption_ids = tuple(str(name) for captions in kept for name, _ in captions)
    check_unique(ids, kind="image")
    check_unique(caption_ids, kind="caption")
    return CaptionTable(
        source=source,
        image_ids=ids,
        caption_ids=caption_ids,
        caption_image=tuple(row for row, captions in enumerate(kept) for _ in captions),
        captions=tuple(text for captions in kept for _, text in captions),
        splits=tuple(image.split for image in images),
    )


def _read_annotations(path: Path) -> list[_CocoImage]:
    """COCO's own file: its name says split and photo folder, ``captions_val2014.json``."""
    folder = path.stem.removeprefix("captions_")
    split = {"train": "train", "val": "dev", "test": "test"}.get(folder.rstrip("0123456789"))
    if split is None or folder == path.stem:
        raise DataError(f"{path} does not say its split — name it as COCO does: captions_train2014.json")
    value = read_json(path, keys=("images", "annotations"))
    try:
        captions: dict[int, list[tuple[int, str]]] = {int(image["id"]): [] for image in value["images"]}
        for note in value["annotations"]:
            captions[int(note["image_id"])].append((int(note["id"]), str(note["caption"])))
        return [
            _CocoImage(int(image["id"]), folder, str(image["file_name"]), split, tuple(captions[int(image["id"])]))
            for image in value["images"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        message = f"{path} is not a COCO captions file ({type(error).__name__}: {error})"
        raise DataError(f"{message} — give it as COCO published it") from error


def _read_split_file(path: Path, root: Path, *, split: str | None) -> list[_CocoImage]:
    """The split's photos in Karpathy's file, their sentences under COCO's annotation ids."""
    everything = read_karpathy(path)
    lost = next((image.filename for image in everything if image.cocoid is None), None)
    if lost is not None:
        raise DataError(f"{path} has no cocoid for {lost} — give Karpathy's file for COCO")
    images = [image for image in everything if split in (None, "all", image.split)]
    if not images:
        check_split(str(split), Counter(image.split for image in everything), source=str(path))
    folders = sorted({image.folder for image in images})
    files = _annotation_files(root, folders)
    if len(files) < len(folders):
        message = f"{path}: caption ids are the sentids of this file, not checked against COCO's annotation ids"
        needed = " and ".join(f"captions_{folder}.json" for folder in folders)
        advice = f"by which ECCV Caption and CxC judge — put {needed} into annotations/"
        warnings.warn(f"{message}, {advice}", stacklevel=2)
        return [_karpathy_image(image, image.sentids) for image in images]
    known = {image.image_id: image.captions for file in files for image in _read_annotations(file)}
    return [_karpathy_image(image, _annotation_ids(image, known, path=path)) for image in images]


def _karpathy_image(image: KarpathyImage, ids: Sequence[int]) -> _CocoImage:
    captions = tuple(zip(ids, image.sentences, strict=True))
    return _CocoImage(image.cocoid or 0, image.folder, image.filename, image.split, captions)


def _annotation_ids(image: KarpathyImage, known: Mapping[int, Sequence[tuple[int, str]]], *, path: Path) -> list[int]:
    """The annotation id of each sentence, found by its words; equal sentences take theirs in order."""
    ids: dict[str, list[int]] = {}
    for name, text in known.get(image.cocoid or 0, ()):
        ids.setdefault(" ".join(text.split()), []).append(name)
    found = []
    for sentence in image.sentences:
        left = ids.get(" ".join(sentence.split()))
        if not left:
            message = f"{path}: image {image.cocoid} has the sentence {sentence!r}, COCO's captions files do not"
            raise DataError(f"{message} — give the files of 2014 as published, or move them away to use sentids")
        found.append(left.pop(0))
    return found


def _photos(images: Sequence[_CocoImage], *, root: Path, given: str | None) -> StoredPhotos:
    """The photos, each from its COCO folder or from a zip of it; a folder that was given may also hold them itself."""
    folders = sorted({image.folder for image in images})
    parts, rows = [], {}
    for number, folder in enumerate(folders):
        names = [image.filename for image in images if image.folder == folder]
        bases = [Path(given).expanduser()] if given else [root, root / "images"]
        places = [base / name for name in (folder, f"{folder}.zip") for base in bases] + (bases if given else [])
        part = find_photos(places, names)
        if part is None:
            raise missing(root, expected=f"the photos in {' or '.join(str(place) for place in places)}")
        parts.append(part)
        rows.update({(folder, name): (number, row) for row, name in enumerate(names)})
    if len(parts) == 1:
        return parts[0]
    return JoinedPhotos(tuple(parts), tuple(rows[image.folder, image.filename] for image in images))
