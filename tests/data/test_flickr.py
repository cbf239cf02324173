import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vacsr.data import PhotoSet

Draw, Load, Refused = Callable[..., Path], Callable[..., PhotoSet], Callable[..., str]
"""The fixtures `draw`, `photos_of` and `refused` of conftest.py."""
SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "flickr8k"
SPLITS = {"1_a.jpg": "train", "2_b.jpg": "dev", "3_c.jpg": "test", "4_d.jpg": "train"}
CAPTIONS = {name: [f"{name} said {index} ." for index in range(5)] for name in SPLITS}
UNPUBLISHED = "2258277193_586949ec62.jpg.1"


def with_captions_json(root: Path) -> None:
    entries = [{"image": name, "split": split, "captions": CAPTIONS[name]} for name, split in SPLITS.items()]
    (root / "captions.json").write_text(json.dumps(entries))


def with_split_file(root: Path) -> None:
    images = [
        {
            "filename": name,
            "split": "val" if split == "dev" else split,
            "sentences": [{"raw": text, "sentid": 5 * row + index} for index, text in enumerate(CAPTIONS[name])],
        }
        for row, (name, split) in enumerate(SPLITS.items())
    ]
    (root / "dataset_flickr8k.json").write_text(json.dumps({"images": images, "dataset": "flickr8k"}))


def with_token_file(root: Path, *, lists: bool = True) -> None:
    root.mkdir(exist_ok=True)
    lines = [f"{name}#{index}\t{text}" for name, texts in CAPTIONS.items() for index, text in enumerate(texts)]
    lines += [f"{UNPUBLISHED}#{index}\tPeople waiting ." for index in range(5)]
    (root / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    for split in ("train", "dev", "test") if lists else ():
        names = [name for name, part in SPLITS.items() if part == split]
        (root / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{name}\n" for name in names))


@pytest.fixture
def images(tmp_path: Path, draw: Draw) -> Path:
    """The photos in ``images``."""
    for number, name in enumerate(SPLITS):
        draw(tmp_path / "images" / name, (60 * number, 0, 0))
    return tmp_path / "images"


FORMS = {"json": with_captions_json, "karpathy": with_split_file, "tokens": with_token_file}


@pytest.mark.parametrize("place", ["images.zip", "Flicker8k_Dataset"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pairs(tmp_path: Path, images: Path, photos_of: Load, form: str, place: str) -> None:
    FORMS[form](tmp_path)
    if place.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / place, "w") as archive:
            for path in images.iterdir():
                archive.write(path, f"inner/{path.name}")
        images.rename(tmp_path / "elsewhere")
    else:
        images.rename(tmp_path / place)
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


def test_the_authors_own_files(tmp_path: Path, images: Path, photos_of: Load, refused: Refused) -> None:
    """A photo that was never published is left out; one in no list is in no split; without lists there are none."""
    spec, train = f"flickr8k:{tmp_path}", tmp_path / "Flickr_8k.trainImages.txt"
    with_token_file(tmp_path)
    assert photos_of(spec).image_ids == tuple(SPLITS)
    train.write_text(f"4_d.jpg\n{UNPUBLISHED}\n")
    assert photos_of(spec).image_ids == ("2_b.jpg", "3_c.jpg", "4_d.jpg")
    assert photos_of(spec, split="train").image_ids == ("4_d.jpg",)
    train.write_text("9_z.jpg\n")
    refused(spec, "1 photos", "'9_z.jpg'")
    (tmp_path / "Flickr8k.token.txt").write_text("1_a.jpg#999999999\tsecond\n1_a.jpg#0\tfirst # 1\n")
    for path in tmp_path.glob("Flickr_8k.*"):
        path.unlink()
    pairs = photos_of(spec)
    assert (pairs.captions, pairs.caption_ids) == (("first # 1", "second"), ("1_a.jpg#0", "1_a.jpg#999999999"))
    (tmp_path / "Flickr8k.token.txt").unlink()
    with_token_file(tmp_path / "Flickr8k_text", lists=False)
    assert photos_of(spec).image_ids == tuple(SPLITS)
    refused(spec, "has no splits", split="train")


def test_files_that_are_missing(tmp_path: Path, images: Path, photos_of: Load, refused: Refused) -> None:
    refused(f"flickr8k:{tmp_path / 'absent'}", "is not a folder", "captions.json", "Flickr8k.token.txt")
    refused(f"flickr8k:{tmp_path}", "holds images/", "dataset_flickr8k.json")
    with_captions_json(tmp_path)
    (images / "4_d.jpg").unlink()
    refused(f"flickr8k:{tmp_path}", "1 photo or caption", "4_d.jpg: no such file")
    with pytest.warns(UserWarning, match="1 left out"):
        assert len(photos_of(f"flickr8k:{tmp_path}", on_error="skip").image_ids) == 3
    images.rename(tmp_path / "elsewhere")
    refused(f"flickr8k:{tmp_path}", "expected the photos in", "images.zip", "Flicker8k_Dataset")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("Flickr8k.token.txt", "1_a.jpg#0 no tab\n", ("line 1", "1_a.jpg#0 no tab")),
        ("Flickr8k.token.txt", "1_a.jpg#1000000000\tx\n", ("line 1", "1_a.jpg#1000000000")),
        ("dataset_flickr8k.json", "[]", ("with lists images",)),
        ("dataset_flickr8k.json", '{"images": [{"filename": "a"}]}', ("not one of Karpathy's", "split")),
        ("dataset_flickr8k.json", '{"images": [{"filename": "a", "split": "eval"}]}', ("'eval'",)),
    ],
)
def test_files_that_are_broken(tmp_path: Path, refused: Refused, name: str, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(text)
    refused(f"flickr8k:{tmp_path}", name, *words)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/flickr8k beside the checkout")
@pytest.mark.parametrize(("split", "images"), [("train", 6_000), ("dev", 1_000), ("test", 500)])
def test_the_real_photos(photos_of: Load, split: str, images: int) -> None:
    pairs = photos_of(f"flickr8k:{SHARED}", split=split)
    assert (len(pairs.photos), len(pairs), pairs.skipped) == (images, 5 * images, ())
    assert pairs.caption_ids[6] == f"{pairs.image_ids[1]}#1"
    photo = pairs.photos.open(0)
    assert (photo.mode, photo.size) == ("RGB", (224, 224))
