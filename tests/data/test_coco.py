from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError, UsageError


class Picture(NamedTuple):
    """One made-up photo of COCO."""

    cocoid: int
    folder: str
    split: str
    """Karpathy's."""
    captions: tuple[tuple[int, str], ...]
    """Annotation id and text."""

    @property
    def filename(self) -> str:
        return f"COCO_{self.folder}_{self.cocoid:012d}.jpg"


def said(first: int, count: int) -> tuple[tuple[int, str], ...]:
    return tuple((first + 7 * index, f"A thing number {first + index}.") for index in range(count))


PICTURES = (
    Picture(391895, "val2014", "test", said(100, 5)),
    Picture(522418, "val2014", "restval", said(200, 6)),
    Picture(9, "train2014", "train", said(300, 5)),
    Picture(184613, "val2014", "val", ((400, "Twice. "), (407, "Once."), (414, "Twice."), (421, "a"), (428, "b"))),
    Picture(25, "train2014", "train", said(500, 7)),
)


def with_split_file(root: Path, *, folder: str = "annotations", shift: int = 0) -> None:
    """Karpathy's file; sentids are the annotation ids moved by ``shift``."""
    images = [
        {
            "filepath": picture.folder, "filename": picture.filename, "imgid": row, "split": picture.split,
            "sentids": [name + shift for name, _ in picture.captions], "cocoid": picture.cocoid,
            "sentences": [
                {"tokens": text.lower().split(), "raw": text, "imgid": row, "sentid": name + shift}
                for name, text in picture.captions
            ],
        }
        for row, picture in enumerate(PICTURES)
    ]  # fmt: skip
    (root / folder).mkdir(exist_ok=True, parents=True)
    (root / folder / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))


def with_annotations(root: Path, *, year: str = "2014", parts: tuple[str, ...] = ("train", "val")) -> None:
    """COCO's own files, annotations of all images mixed as COCO has them."""
    (root / "annotations").mkdir(exist_ok=True, parents=True)
    for part in parts:
        pictures = [picture for picture in PICTURES if picture.folder == f"{part}2014"]
        images = [
            {"id": picture.cocoid, "file_name": picture.filename, "height": 6, "width": 8} for picture in pictures
        ]
        most = max(len(picture.captions) for picture in pictures)
        notes = [
            {"image_id": picture.cocoid, "id": picture.captions[index][0], "caption": picture.captions[index][1]}
            for index in range(most)
            for picture in pictures
            if index < len(picture.captions)
        ]
        value = {"info": {}, "licenses": [], "images": images, "annotations": notes}
        (root / "annotations" / f"captions_{part}{year}.json").write_text(json.dumps(value))


def with_photos(root: Path, draw: Callable[..., Path], *, year: str = "2014") -> None:
    for number, picture in enumerate(PICTURES):
        draw(root / picture.folder.replace("2014", year) / picture.filename, (50 * number, 0, 0))


def photos_of(spec: str, **options: Any) -> PhotoSet:
    pairs = load_pairs(spec, **options)
    assert isinstance(pairs, PhotoSet)
    return pairs


def reds(pairs: PhotoSet) -> list[int]:
    """Which pictures these are, by their colour."""
    return [round(pairs.photos.open(row).getpixel((0, 0))[0] / 50) for row in range(len(pairs.photos))]  # type: ignore[index]


def assert_refused(spec: str, *words: str, **options: Any) -> None:
    with pytest.raises(DataError) as caught:
        load_pairs(spec, **options)
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)


@pytest.fixture
def root(tmp_path: Path, draw: Callable[..., Path]) -> Path:
    """Karpathy's file, COCO's own, and the photos."""
    with_split_file(tmp_path)
    with_annotations(tmp_path)
    with_photos(tmp_path, draw)
    return tmp_path


def test_karpathys_splits(root: Path) -> None:
    train = photos_of(f"coco:{root}", split="train")
    assert train.image_ids == ("522418", "9", "25")
    assert reds(train) == [1, 2, 4]
    assert photos_of(f"coco:{root}", split="dev").image_ids == ("184613",)
    test = photos_of(f"coco:{root}", split="test")
    assert test.image_ids == ("391895",)
    assert test.caption_ids == ("100", "107", "114", "121", "128")
    assert test.captions[0] == "A thing number 100."
    everything = photos_of(f"coco:{root}")
    assert everything.image_ids == tuple(str(picture.cocoid) for picture in PICTURES)
    assert reds(everything) == [0, 1, 2, 3, 4]
    assert_refused(f"coco:{root}", "'val'", "dev (1 images)", split="val")


@pytest.mark.parametrize(
    ("option", "counts"), [("", [5, 5, 5]), (",captions=all", [6, 5, 7]), (",captions=2", [2, 2, 2])]
)
def test_the_first_five_captions(root: Path, option: str, counts: list[int]) -> None:
    train = photos_of(f"coco:{root}{option}", split="train")
    assert train.caption_image.bincount().tolist() == counts
    assert train.caption_ids[: counts[0]] == tuple(str(200 + 7 * index) for index in range(counts[0]))


@pytest.mark.parametrize("option", ["0", "five", "-1", "2.5"])
def test_a_number_of_captions_that_is_none(root: Path, option: str) -> None:
    with pytest.raises(UsageError, match=option):
        load_pairs(f"coco:{root},captions={option}")


def test_annotation_ids_are_found_by_the_words(root: Path) -> None:
    with_split_file(root, shift=100_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dev = photos_of(f"coco:{root}", split="dev")
    assert dev.captions == ("Twice. ", "Once.", "Twice.", "a", "b")
    assert dev.caption_ids == ("400", "407", "414", "421", "428")


def test_without_cocos_own_files_sentids_are_kept_and_that_is_said(root: Path) -> None:
    with_split_file(root, shift=100_000)
    (root / "annotations" / "captions_train2014.json").unlink()
    with pytest.warns(UserWarning, match="sentids of this file, not checked"):
        assert photos_of(f"coco:{root}", split="train").caption_ids[0] == "100200"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert photos_of(f"coco:{root}", split="test").caption_ids[0] == "100"  # needs the other file only
    (root / "annotations" / "captions_val2014.json").unlink()
    with pytest.warns(UserWarning, match=r"put captions_val2014\.json into annotations"):
        assert photos_of(f"coco:{root}", split="test").caption_ids[0] == "100100"


def test_files_of_different_releases(root: Path) -> None:
    path = root / "annotations" / "captions_val2014.json"
    path.write_text(path.read_text().replace("Once.", "Thrice."))
    assert_refused(f"coco:{root}", "184613", "'Once.'")


@pytest.mark.parametrize("year", ["2014", "2017"])
def test_cocos_own_files_alone(tmp_path: Path, draw: Callable[..., Path], year: str) -> None:
    with_annotations(tmp_path, year=year)
    with_photos(tmp_path / "images", draw, year=year)
    train, dev = (photos_of(f"coco:{tmp_path}", split=split) for split in ("train", "dev"))
    assert (train.image_ids, dev.image_ids) == (("9", "25"), ("391895", "522418", "184613"))
    assert (reds(train), reds(dev)) == ([2, 4], [0, 1, 3])
    assert train.caption_ids == ("300", "307", "314", "321", "328", "500", "507", "514", "521", "528")
    assert reds(photos_of(f"coco:{tmp_path}")) == [2, 4, 0, 1, 3]
    assert_refused(f"coco:{tmp_path}", "'test'", "dev (3 images)", split="test")


def test_one_file_and_a_folder_that_are_named(root: Path, draw: Callable[..., Path], tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    for number, picture in enumerate(PICTURES):
        draw(flat / picture.filename, (50 * number, 0, 0))
    path = root / "annotations" / "captions_val2014.json"
    pairs = photos_of(f"coco:{root},annotations={path},images={flat}")
    assert pairs.image_ids == ("391895", "522418", "184613")
    assert pairs.photos.name(0).startswith(str(flat))
    assert reds(pairs) == [0, 1, 3]


def test_a_split_file_that_is_named(root: Path, tmp_path: Path) -> None:
    path = (root / "annotations" / "dataset_coco.json").rename(tmp_path / "dataset_mine.json")
    assert photos_of(f"coco:{root},annotations={path}", split="test").image_ids == ("391895",)
    assert_refused(f"coco:{root},annotations={root}/dataset_lost.json", "dataset_lost.json", "cannot be read")


def test_photos_in_zips(tmp_path: Path, draw: Callable[..., Path]) -> None:
    """One folder, one zip: what a download leaves half unpacked."""
    with_split_file(tmp_path, folder=".")
    with_annotations(tmp_path)
    with_photos(tmp_path, draw)
    with zipfile.ZipFile(tmp_path / "val2014.zip", "w") as archive:
        for path in (tmp_path / "val2014").iterdir():
            archive.write(path, f"val2014/{path.name}")
            path.unlink()
    (tmp_path / "val2014").rmdir()
    pairs = photos_of(f"coco:{tmp_path}")
    assert reds(pairs) == [0, 1, 2, 3, 4]
    assert reds(pairs.subset([4, 3])) == [4, 3]


def test_only_the_photos_of_the_split_are_needed(root: Path) -> None:
    for path in (root / "train2014").iterdir():
        path.unlink()
    assert reds(photos_of(f"coco:{root}", split="test")) == [0]
    assert_refused(f"coco:{root}", "2 photos or captions", "000009.jpg: no such file", split="train")
    (root / "train2014").rmdir()
    assert_refused(f"coco:{root}", "expected the photos in", "train2014.zip", "images", split="train")


def test_files_that_are_missing(tmp_path: Path) -> None:
    words = ("annotations/dataset_coco.json", "captions_train2014.json", "2017")
    assert_refused(f"coco:{tmp_path}", "holds nothing", *words)
    assert_refused(f"coco:{tmp_path / 'absent'}", "is no folder", *words)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("dataset_coco.json", '{"images": [{"filename": "a", "split": "val", "sentences": []}]}', ("no cocoid for a",)),
        ("dataset_coco.json", '{"images": 3}', ("does not hold lists images",)),
        ("captions_val2014.json", '{"images": []}', ("does not hold lists images and annotations",)),
        (
            "captions_val2014.json",
            '{"images": [], "annotations": [{"image_id": 1, "id": 1, "caption": "a"}]}',
            ("not a COCO captions file", "KeyError: 1"),
        ),
        ("captions_val2014.json", "no json", ("cannot be read",)),
    ],
)
def test_files_that_are_broken(tmp_path: Path, name: str, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / name).write_text(text)
    assert_refused(f"coco:{tmp_path}", name, *words)


def test_a_file_that_does_not_say_its_split(root: Path) -> None:
    path = root / "annotations" / "mine.json"
    path.write_text("{}")
    assert_refused(f"coco:{root},annotations={path}", "mine.json", "captions_train2014.json")


def test_an_annotation_id_that_comes_twice(root: Path) -> None:
    path = root / "annotations" / "captions_val2014.json"
    path.write_text(path.read_text().replace('"id": 107', '"id": 100'))
    assert_refused(f"coco:{root}", "caption id '100'", "2 times")
