from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "flickr8k"
SPLITS = {"1_a.jpg": "train", "2_b.jpg": "dev", "3_c.jpg": "test", "4_d.jpg": "train"}
CAPTIONS = {name: [f"{name} said {index} ." for index in range(5)] for name in SPLITS}


def photos_of(spec: str, **options: Any) -> PhotoSet:
    pairs = load_pairs(spec, **options)
    assert isinstance(pairs, PhotoSet)
    return pairs


def assert_refused(spec: str, *words: str, **options: Any) -> None:
    with pytest.raises(DataError) as caught:
        load_pairs(spec, **options)
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)


def with_captions_json(root: Path) -> None:
    entries = [{"image": name, "split": split, "captions": CAPTIONS[name]} for name, split in SPLITS.items()]
    (root / "captions.json").write_text(json.dumps(entries))


def with_split_file(root: Path) -> None:
    def sentences(row: int, name: str) -> list[dict[str, Any]]:
        texts = enumerate(CAPTIONS[name])
        return [{"tokens": text.split(), "raw": text, "imgid": row, "sentid": 5 * row + i} for i, text in texts]

    images = [
        {
            "sentids": list(range(5 * row, 5 * row + 5)), "imgid": row, "sentences": sentences(row, name),
            "split": "val" if split == "dev" else split, "filename": name,
        }
        for row, (name, split) in enumerate(SPLITS.items())
    ]  # fmt: skip
    (root / "dataset_flickr8k.json").write_text(json.dumps({"images": images, "dataset": "flickr8k"}))


def with_token_file(root: Path, *, lists: bool = True) -> None:
    lines = [f"{name}#{index}\t{text}" for name, texts in CAPTIONS.items() for index, text in enumerate(texts)]
    lines += [f"2258277193_586949ec62.jpg.1#{index}\tPeople waiting ." for index in range(5)]
    (root / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    for split in ("train", "dev", "test") if lists else ():
        names = [name for name, part in SPLITS.items() if part == split]
        (root / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{name}\n" for name in names))


def with_photos(folder: Path, draw: Callable[..., Path]) -> None:
    for number, name in enumerate(SPLITS):
        draw(folder / name, (60 * number, 0, 0))


def packed(root: Path, folder: Path, name: str) -> None:
    with zipfile.ZipFile(root / name, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, f"{folder.name}/{path.name}")
            path.unlink()
    folder.rmdir()


FORMS = {"json": with_captions_json, "karpathy": with_split_file, "tokens": with_token_file}
PLACES = ("images", "images.zip", "Flicker8k_Dataset", "Flickr8k_Dataset.zip")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pairs(tmp_path: Path, draw: Callable[..., Path], form: str, place: str) -> None:
    FORMS[form](tmp_path)
    folder = tmp_path / ("Flicker8k_Dataset" if place.endswith(".zip") else place)
    with_photos(folder, draw)
    if place.endswith(".zip"):
        packed(tmp_path, folder, place)
    everything = photos_of(f"flickr8k:{tmp_path}")
    assert everything.image_ids == tuple(SPLITS)
    assert everything.captions == tuple(text for texts in CAPTIONS.values() for text in texts)
    assert everything.caption_ids == tuple(f"{name}#{index}" for name in SPLITS for index in range(5))
    assert everything.caption_image.tolist() == [row for row in range(4) for _ in range(5)]
    train = photos_of(f"flickr8k:{tmp_path}", split="train")
    assert train.image_ids == ("1_a.jpg", "4_d.jpg")
    assert abs(train.photos.open(1).getpixel((0, 0))[0] - 180) < 6  # type: ignore[index]
    assert photos_of(f"flickr8k:{tmp_path}", split="dev").image_ids == ("2_b.jpg",)
    assert photos_of(f"flickr8k:{tmp_path},split=test").image_ids == ("3_c.jpg",)


def test_the_photo_that_was_never_published(tmp_path: Path, draw: Callable[..., Path]) -> None:
    with_token_file(tmp_path)
    with_photos(tmp_path / "images", draw)
    skipped = photos_of(f"flickr8k:{tmp_path}").skipped
    assert skipped == ("2258277193_586949ec62.jpg.1: 5 captions of a photo that was never published",)
    lists = tmp_path / "Flickr_8k.trainImages.txt"
    lists.write_text(lists.read_text() + "2258277193_586949ec62.jpg.1\n")
    assert photos_of(f"flickr8k:{tmp_path}", split="train").image_ids == ("1_a.jpg", "4_d.jpg")


def test_the_authors_files_without_lists_or_in_a_folder(tmp_path: Path, draw: Callable[..., Path]) -> None:
    (tmp_path / "Flickr8k_text").mkdir()
    with_token_file(tmp_path / "Flickr8k_text", lists=False)
    with_photos(tmp_path / "Flicker8k_Dataset", draw)
    assert photos_of(f"flickr8k:{tmp_path}").image_ids == tuple(SPLITS)
    assert_refused(f"flickr8k:{tmp_path}", "has no splits", split="train")


def test_photos_in_no_list_are_in_no_split(tmp_path: Path, draw: Callable[..., Path]) -> None:
    with_token_file(tmp_path)
    (tmp_path / "Flickr_8k.trainImages.txt").write_text("4_d.jpg\n")
    with_photos(tmp_path / "images", draw)
    assert photos_of(f"flickr8k:{tmp_path}").image_ids == ("2_b.jpg", "3_c.jpg", "4_d.jpg")
    (tmp_path / "Flickr_8k.trainImages.txt").write_text("9_z.jpg\n")
    assert_refused(f"flickr8k:{tmp_path}", "1 photos", "'9_z.jpg'")


def test_captions_in_any_order_keep_their_index(tmp_path: Path, draw: Callable[..., Path]) -> None:
    (tmp_path / "Flickr8k.token.txt").write_text("1_a.jpg#1\tsecond\n1_a.jpg#0\tfirst # 1\n")
    with_photos(tmp_path / "images", draw)
    pairs = photos_of(f"flickr8k:{tmp_path}")
    assert pairs.captions == ("first # 1", "second")
    assert pairs.caption_ids == ("1_a.jpg#0", "1_a.jpg#1")


def test_places_that_are_named(tmp_path: Path, draw: Callable[..., Path]) -> None:
    (tmp_path / "words").mkdir()
    with_captions_json(tmp_path / "words")
    with_photos(tmp_path / "elsewhere", draw)
    spec = f"flickr8k:{tmp_path},images={tmp_path / 'elsewhere'}"
    assert photos_of(spec, captions=tmp_path / "words" / "captions.json").image_ids == tuple(SPLITS)


def test_files_that_are_missing(tmp_path: Path, draw: Callable[..., Path]) -> None:
    assert_refused(f"flickr8k:{tmp_path / 'absent'}", "is no folder", "captions.json", "Flickr8k.token.txt")
    (tmp_path / "notes.md").write_text("")
    assert_refused(f"flickr8k:{tmp_path}", "holds notes.md", "dataset_flickr8k.json")
    with_captions_json(tmp_path)
    assert_refused(f"flickr8k:{tmp_path}", "expected the photos in", "images.zip", "Flicker8k_Dataset")
    with_photos(tmp_path / "images", draw)
    (tmp_path / "images" / "4_d.jpg").unlink()
    assert_refused(f"flickr8k:{tmp_path}", "1 photos or captions", "4_d.jpg: no such file")
    with pytest.warns(UserWarning, match="1 left out"):
        assert len(photos_of(f"flickr8k:{tmp_path}", on_error="skip").image_ids) == 3


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("Flickr8k.token.txt", "1_a.jpg#0 no tab\n", ("line 1", "1_a.jpg#0 no tab")),
        ("Flickr8k.token.txt", "1_a.jpg#x\tcaption\n", ("line 1",)),
        ("dataset_flickr8k.json", "{", ("cannot be read",)),
        ("dataset_flickr8k.json", "[]", ("does not hold lists images",)),
        ("dataset_flickr8k.json", '{"images": [{"filename": "a"}]}', ("not one of Karpathy's", "split")),
        ("dataset_flickr8k.json", '{"images": [{"filename": "a", "split": "eval"}]}', ("'eval'",)),
        ("dataset_flickr8k.json", '{"images": [1]}', ("not one of Karpathy's",)),
    ],
)
def test_files_that_are_broken(tmp_path: Path, name: str, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(text)
    assert_refused(f"flickr8k:{tmp_path}", name, *words)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/flickr8k beside the checkout")
@pytest.mark.parametrize(("split", "images"), [("train", 6_000), ("dev", 1_000), ("test", 500)])
def test_the_real_photos(split: str, images: int) -> None:
    pairs = photos_of(f"flickr8k:{SHARED}", split=split)
    assert (len(pairs.photos), len(pairs)) == (images, 5 * images)
    assert pairs.skipped == ()
    assert pairs.caption_ids[6] == f"{pairs.image_ids[1]}#1"
    photo = pairs.photos.open(0)
    assert (photo.mode, photo.size) == ("RGB", (224, 224))
