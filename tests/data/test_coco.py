import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from vacsr.data import PhotoSet
from vacsr.errors import UsageError

Draw, Load, Refused = Callable[..., Path], Callable[..., PhotoSet], Callable[..., str]
"""The fixtures `draw`, `photos_of` and `refused` of conftest.py."""


class Picture(NamedTuple):
    """One made-up photo of COCO."""

    cocoid: int
    folder: str
    split: str  # Karpathy's
    captions: list[tuple[int, str]]  # annotation id and text

    @property
    def filename(self) -> str:
        return f"COCO_{self.folder}_{self.cocoid:012d}.jpg"


def said(first: int, count: int) -> list[tuple[int, str]]:
    return [(first + 7 * index, f"A thing number {first + index}.") for index in range(count)]


PICTURES = (
    Picture(391895, "val2014", "test", said(100, 5)),
    Picture(522418, "val2014", "restval", said(200, 6)),
    Picture(9, "train2014", "train", said(300, 5)),
    Picture(184613, "val2014", "val", [(400, "Twice. "), (407, "Once."), (414, "Twice."), (421, "a"), (428, "b")]),
    Picture(25, "train2014", "train", said(500, 7)),
)


def with_split_file(root: Path, *, folder: str = "annotations", shift: int = 0) -> None:
    """Karpathy's file; sentids are the annotation ids moved by ``shift``."""
    images = [
        {
            "filepath": picture.folder,
            "filename": picture.filename,
            "split": picture.split,
            "cocoid": picture.cocoid,
            "sentences": [{"raw": text, "sentid": name + shift} for name, text in picture.captions],
        }
        for picture in PICTURES
    ]
    (root / folder).mkdir(exist_ok=True, parents=True)
    (root / folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))


def with_annotations(root: Path, *, year: str = "2014") -> None:
    """COCO's own files, annotations of all images mixed as COCO has them."""
    (root / "annotations").mkdir(exist_ok=True, parents=True)
    for part in ("train", "val"):
        pictures = [picture for picture in PICTURES if picture.folder == f"{part}2014"]
        images = [{"id": picture.cocoid, "file_name": picture.filename} for picture in pictures]
        notes = [
            {"image_id": picture.cocoid, "id": name, "caption": text}
            for index in range(7)
            for picture in pictures
            for name, text in picture.captions[index : index + 1]
        ]
        value = {"images": images, "annotations": notes}
        (root / "annotations" / f"captions_{part}{year}.json").write_text(json.dumps(value))


def with_photos(root: Path, draw: Draw, *, year: str = "2014") -> None:
    for number, picture in enumerate(PICTURES):
        draw(root / picture.folder.replace("2014", year) / picture.filename, (50 * number, 0, 0))


def reds(pairs: PhotoSet) -> list[int]:
    """Which pictures these are, by their colour."""
    return [round(pairs.photos.open(row).getpixel((0, 0))[0] / 50) for row in range(len(pairs.photos))]  # type: ignore[index]


@pytest.fixture
def root(tmp_path: Path, draw: Draw) -> Path:
    """Karpathy's file, COCO's own, and the photos."""
    with_split_file(tmp_path)
    with_annotations(tmp_path)
    with_photos(tmp_path, draw)
    return tmp_path


def test_karpathys_splits(root: Path, photos_of: Load, refused: Refused) -> None:
    train = photos_of(f"coco:{root}", split="train")
    assert (train.image_ids, reds(train)) == (("522418", "9", "25"), [1, 2, 4])
    assert photos_of(f"coco:{root}", split="dev").image_ids == ("184613",)
    test = photos_of(f"coco:{root}", split="test")
    assert (test.image_ids, test.split) == (("391895",), "test")
    assert test.caption_ids == ("100", "107", "114", "121", "128")
    assert test.captions[0] == "A thing number 100."
    everything = photos_of(f"coco:{root}")
    assert everything.image_ids == tuple(str(picture.cocoid) for picture in PICTURES)
    assert reds(everything) == [0, 1, 2, 3, 4]
    refused(f"coco:{root}", "'val'", "dev (1 images)", split="val")
    for option in ("0", "five", "-1", "2.5"):
        refused(f"coco:{root},captions={option}", option, error=UsageError)


def test_the_first_five_captions(root: Path, photos_of: Load) -> None:
    for option, counts in (("", [5, 5, 5]), (",captions=all", [6, 5, 7]), (",captions=2", [2, 2, 2])):
        train = photos_of(f"coco:{root}{option}", split="train")
        assert train.caption_image.bincount().tolist() == counts
        assert train.caption_ids[: counts[0]] == tuple(str(200 + 7 * index) for index in range(counts[0]))


def test_annotation_ids_are_found_by_the_words(root: Path, photos_of: Load, refused: Refused) -> None:
    """Without COCO's own files for the split, sentids are kept, and that is said."""
    with_split_file(root, shift=100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dev = photos_of(f"coco:{root}", split="dev")
    assert dev.captions == ("Twice. ", "Once.", "Twice.", "a", "b")
    assert dev.caption_ids == ("400", "407", "414", "421", "428")
    (root / "annotations" / "captions_train2014.json").unlink()
    with pytest.warns(UserWarning, match="sentids of this file, not checked"):
        assert photos_of(f"coco:{root}", split="train").caption_ids[0] == "100200"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert photos_of(f"coco:{root}", split="test").caption_ids[0] == "100"  # needs the other file only
    path = root / "annotations" / "captions_val2014.json"
    whole = path.read_text()
    path.write_text(whole.replace("Once.", "Thrice."))
    refused(f"coco:{root}", "184613", "'Once.'", split="dev")
    path.write_text(whole.replace('"id": 107', '"id": 100'))
    refused(f"coco:{root}", "caption id '100'", "2 times", split="test")
    path.unlink()
    with pytest.warns(UserWarning, match=r"put captions_val2014\.json into annotations"):
        assert photos_of(f"coco:{root}", split="test").caption_ids[0] == "100100"


@pytest.mark.parametrize("year", ["2014", "2017"])
def test_cocos_own_files_alone(tmp_path: Path, draw: Draw, photos_of: Load, refused: Refused, year: str) -> None:
    with_annotations(tmp_path, year=year)
    with_photos(tmp_path / "images", draw, year=year)
    train, dev = (photos_of(f"coco:{tmp_path}", split=split) for split in ("train", "dev"))
    assert (train.image_ids, dev.image_ids) == (("9", "25"), ("391895", "522418", "184613"))
    assert (reds(train), reds(dev)) == ([2, 4], [0, 1, 3])
    assert train.caption_ids == ("300", "307", "314", "321", "328", "500", "507", "514", "521", "528")
    assert reds(photos_of(f"coco:{tmp_path}")) == [2, 4, 0, 1, 3]
    refused(f"coco:{tmp_path}", "'test'", "dev (3 images)", split="test")


def test_files_and_folders_that_are_named(
    root: Path, tmp_path: Path, draw: Draw, photos_of: Load, refused: Refused
) -> None:
    flat, notes = tmp_path / "flat", root / "annotations"
    for number, picture in enumerate(PICTURES):
        draw(flat / picture.filename, (50 * number, 0, 0))
    pairs = photos_of(f"coco:{root},annotations={notes / 'captions_val2014.json'},images={flat}")
    assert (pairs.image_ids, reds(pairs)) == (("391895", "522418", "184613"), [0, 1, 3])
    assert pairs.photos.name(0).startswith(str(flat))
    path = (notes / "dataset_coco.json").rename(tmp_path / "dataset_mine.json")
    assert photos_of(f"coco:{root},annotations={path}", split="test").image_ids == ("391895",)
    refused(f"coco:{root},annotations={root}/dataset_lost.json", "dataset_lost.json", "check the path")
    (notes / "mine.json").write_text("{}")
    refused(f"coco:{root},annotations={notes}/mine.json", "mine.json", "captions_train2014.json")


def test_photos_in_zips(tmp_path: Path, draw: Draw, photos_of: Load) -> None:
    """One folder, one zip: what a download leaves half unpacked."""
    with_split_file(tmp_path, folder=".")
    with_annotations(tmp_path)
    with_photos(tmp_path, draw)
    with zipfile.ZipFile(tmp_path / "val2014.zip", "w") as archive:
        for path in (tmp_path / "val2014").iterdir():
            archive.write(path, f"val2014/{path.name}")
    (tmp_path / "val2014").rename(tmp_path / "elsewhere")
    pairs = photos_of(f"coco:{tmp_path}")
    assert (reds(pairs), reds(pairs.subset([4, 3]))) == ([0, 1, 2, 3, 4], [4, 3])


def test_a_part_of_coco(tmp_path: Path, draw: Draw, photos_of: Load, refused: Refused) -> None:
    """A list of photos with COCO's annotation ids, beside a zip."""
    entry = {"image": "0009.png", "split": "test", "captions": ["a dog", "a cat"], "caption_ids": [101, 108]}
    (tmp_path / "captions.json").write_text(json.dumps([entry]))
    refused(f"coco:{tmp_path}", "images.zip")
    draw(tmp_path / "images/0009.png")
    pairs = photos_of(f"coco:{tmp_path}", split="test")
    assert (pairs.image_ids, pairs.caption_ids, pairs.captions) == (("0009.png",), ("101", "108"), ("a dog", "a cat"))


def test_only_the_photos_of_the_split_are_needed(root: Path, photos_of: Load, refused: Refused) -> None:
    for path in (root / "train2014").iterdir():
        path.unlink()
    assert reds(photos_of(f"coco:{root}", split="test")) == [0]
    refused(f"coco:{root}", "2 photos or captions", "000009.jpg: no such file", split="train")
    (root / "train2014").rmdir()
    refused(f"coco:{root}", "expected the photos in", "train2014.zip", "images", split="train")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("notes.md", "", ("annotations/dataset_coco.json", "captions_train2014.json", "2017")),
        ("dataset_coco.json", '{"images": 3}', ("with lists images",)),
        ("captions_val2014.json", '{"images": []}', ("with lists images and annotations",)),
        ("captions_val2014.json", '{"images": [], "annotations": [{"image_id": 1, "id": 1}]}', ("KeyError(1)",)),
    ],
)
def test_files_that_are_missing_or_broken(
    tmp_path: Path, refused: Refused, name: str, text: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / name).write_text(text)
    refused(f"coco:{tmp_path}", *words)
