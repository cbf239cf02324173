"""COCO captions (``coco:ROOT``): Karpathy's splits where his file exists, otherwise COCO's own train and validation.

::

    ROOT/annotations/dataset_coco.json          Karpathy's splits (or ROOT/dataset_coco.json)
    ROOT/annotations/captions_train2014.json    COCO's own files; with Karpathy's they check the caption ids
    ROOT/annotations/captions_val2014.json      (or the two of 2017)
    ROOT/train2014/  ROOT/val2014/              photos; or ROOT/images/train2014/ …, or train2014.zip …

An image's id is its COCO id, a caption's id its annotation id: ECCV Caption and CxC judge by these. A part of COCO may
instead be ``captions.json`` (see :mod:`vacsr.data.tables`) with ``images.zip`` or ``images/``; image ids are its own.
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vacsr.data.archives import StoredPhoto, StoredPhotos, find_photos, missing
from vacsr.data.captions import photo_set, table_of
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.pairs import check_split
from vacsr.data.photos import PhotoSet
from vacsr.data.tables import read_captions
from vacsr.errors import DataError, UsageError
from vacsr.files import read_json

_SPLITS = {"train": "train", "restval": "train", "val": "dev", "test": "test"}  # Karpathy's names and ours
_EXPECTED = (
    "annotations/dataset_coco.json (Karpathy's splits), or annotations/captions_train2014.json and "
    "captions_val2014.json (or those of 2017), or captions.json"
)


class CaptionedImage(NamedTuple):
    image_id: int | None  # COCO's, None elsewhere
    folder: str  # train2014 and so on, "" elsewhere
    filename: str
    split: str
    captions: tuple[tuple[int, str], ...]  # annotation id and text


@register("coco", path="ROOT", options=("split", "captions"), path_options=("annotations", "images"))
def load_coco(spec: Spec, on_error: OnError) -> PhotoSet:
    """``coco:ROOT[,split=S][,captions=5][,annotations=FILE][,images=DIR]``.

    Splits by Karpathy: train (his train and restval, 113,287 photos), dev and test (5,000 each). With COCO's own files:
    train and dev. ``captions``: some photos have six or seven, and the first five are used, as PCME++ and the ECCV
    Caption test list do; another number, or "all". ``annotations``: one file instead of those in ``annotations/``;
    ``images``: the folder that holds the photos, or their folders or zips.
    """
    root, split = spec.location, spec.option("split")
    number = spec.option("captions") or "5"
    if number != "all" and not (number.isdecimal() and 0 < len(number.lstrip("0")) < 10):
        raise UsageError(f"coco: captions={number[:20]}, expected a number per photo, or all — write captions=5")
    if spec.path_option("annotations") is None and (root / "captions.json").is_file():
        return _part(root, spec.path_option("images"), split=split, on_error=on_error)
    source, images = _read(root, spec.path_option("annotations"), split=split)
    captions = [image.captions[: None if number == "all" else int(number)] for image in images]
    table = table_of(
        source,
        [str(image.image_id) for image in images],
        [[text for _, text in some] for some in captions],
        caption_ids=[[str(name) for name, _ in some] for some in captions],
        splits=[image.split for image in images],
    )
    photos = _photos(images, root=root, folder=spec.path_option("images"))
    return photo_set(table, photos, split=split, on_error=on_error)


def _part(root: Path, images: Path | None, *, split: str | None, on_error: OnError) -> PhotoSet:
    """Some of COCO's photos, with all the captions that ``captions.json`` lists."""
    table = read_captions(root / "captions.json")
    candidates = [images] if images else [root / "images.zip", root / "images"]
    return photo_set(table, find_photos(candidates, table.image_ids, root=root), split=split, on_error=on_error)


def read_karpathy(path: Path) -> list[CaptionedImage]:
    """Every photo of one of Karpathy's split files (``dataset_coco.json``, ``dataset_flickr8k.json``), in its order."""

    def image(entry: Mapping[str, Any]) -> CaptionedImage:
        return CaptionedImage(
            image_id=int(entry["cocoid"]) if "cocoid" in entry else None,
            folder=str(entry.get("filepath", "")),
            filename=str(entry["filename"]),
            split=_SPLITS[entry["split"]],
            captions=tuple((int(sentence["sentid"]), str(sentence["raw"])) for sentence in entry["sentences"]),
        )

    try:
        return [image(entry) for entry in read_json(path, lists=("images",))["images"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is not one of Karpathy's split files ({error!r}) — copy it again") from error


def _read(root: Path, file: Path | None, *, split: str | None) -> tuple[str, list[CaptionedImage]]:
    """The named file, Karpathy's, or COCO's own: the source, and its images of the split."""
    if file is None:
        karpathy = [root / "annotations" / "dataset_coco.json", root / "dataset_coco.json"]
        file = next((path for path in karpathy if path.is_file()), None)
    if file is not None and file.name.startswith("dataset_"):
        images = _of_split(read_karpathy(file), split, source=str(file))
        return str(file), _with_annotation_ids(images, root, path=file)
    files = [file] if file is not None else []
    for year in ("2014", "2017"):
        files = files or _annotation_files(root, [f"train{year}", f"val{year}"])
    if not files:
        raise missing(root, expected=_EXPECTED)
    source = str(file or files[0].parent)
    return source, _of_split([image for each in files for image in _read_annotations(each)], split, source=source)


def _of_split(images: Sequence[CaptionedImage], split: str | None, *, source: str) -> list[CaptionedImage]:
    if split is not None and split != "all":
        check_split(split, Counter(image.split for image in images), source=source)
    return [image for image in images if split in (None, "all", image.split)]


def _annotation_files(root: Path, folders: Sequence[str]) -> list[Path]:
    """COCO's own files for these photo folders, as far as they exist."""
    names = [f"captions_{folder}.json" for folder in folders]
    candidates = [next((path for path in (root / "annotations" / n, root / n) if path.is_file()), None) for n in names]
    return [path for path in candidates if path is not None]


def _read_annotations(path: Path) -> list[CaptionedImage]:
    """COCO's own file: its name says split and photo folder, ``captions_val2014.json``."""
    folder = path.stem.removeprefix("captions_")
    split = {"train": "train", "val": "dev", "test": "test"}.get(folder.rstrip("0123456789"))
    if split is None or folder == path.stem:
        raise DataError(f"{path} does not say its split — name it as COCO does: captions_train2014.json")
    value = read_json(path, lists=("images", "annotations"))
    try:
        captions: dict[int, list[tuple[int, str]]] = {int(image["id"]): [] for image in value["images"]}
        for note in value["annotations"]:
            captions[int(note["image_id"])].append((int(note["id"]), str(note["caption"])))
        return [
            CaptionedImage(int(image["id"]), folder, str(image["file_name"]), split, tuple(captions[int(image["id"])]))
            for image in value["images"]
        ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{path} is not a COCO captions file ({error!r}) — give it as COCO published it") from error


def _with_annotation_ids(images: list[CaptionedImage], root: Path, *, path: Path) -> list[CaptionedImage]:
    """The sentences of Karpathy's file under COCO's annotation ids: each under that of the same words, in order."""
    folders = sorted({image.folder for image in images})
    files = _annotation_files(root, folders)
    if len(files) < len(folders):
        message = f"{path}: caption ids are the sentids of this file, not checked against COCO's annotation ids"
        needed = " and ".join(f"captions_{folder}.json" for folder in folders)
        advice = f"which ECCV Caption and CxC need — put {needed} into annotations/"
        warnings.warn(f"{message}, {advice}", stacklevel=2)
        return images
    unused: dict[tuple[int | None, str], list[int]] = {}
    for image in (image for file in files for image in _read_annotations(file)):
        for name, text in image.captions:
            unused.setdefault((image.image_id, " ".join(text.split())), []).append(name)

    def annotation_id(image: CaptionedImage, sentence: str) -> int:
        names = unused.get((image.image_id, " ".join(sentence.split())))
        if not names:
            message = f"{path}: image {image.image_id} has the sentence {sentence!r}, COCO's captions files do not"
            raise DataError(f"{message} — give the files of 2014 as published, or move them away to use sentids")
        return names.pop(0)

    return [
        image._replace(captions=tuple((annotation_id(image, text), text) for _, text in image.captions))
        for image in images
    ]


def _photos(images: Sequence[CaptionedImage], *, root: Path, folder: Path | None) -> StoredPhotos:
    """The photos, each from its COCO folder or from a zip of it; a ``folder`` that is given may also hold them."""
    items: dict[tuple[str, str], StoredPhoto] = {}
    for name in sorted({image.folder for image in images}):
        files = [image.filename for image in images if image.folder == name]
        bases = [folder] if folder else [root, root / "images"]
        candidates = [base / kind for kind in (name, f"{name}.zip") for base in bases] + (bases if folder else [])
        photos = find_photos(candidates, files, root=root)
        items.update(zip(((name, file) for file in files), photos.items, strict=True))
    return StoredPhotos(tuple(items[image.folder, image.filename] for image in images))
