"""The command line on photos: hard inputs each have one clear outcome, and nothing is left half-written."""

from __future__ import annotations

import io
import json
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from vacsr.data import PhotoSet, load_pairs
from vacsr.data.noise import load_noise
from vacsr.embed import _split_names
from vacsr.errors import DataError
from vacsr.scoring import PairScorer

RECIPE: dict[str, Any] = {
    "data": {"pairs": "scenes:images=12,held_out=4,per_image=2,size=32"},
    "backbone": {"spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32", "head": {"dim": 8}},
    "train": {"epochs": 1, "batch_size": 4, "device": "cpu", "towers": {"freeze_image": 0}},
}


Command = Callable[..., Any]
"""The fixture `vacsr` of conftest.py: words in, exit code and output out."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "photos.yaml"
    path.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    """A trained run folder."""
    from vacsr.config.io import read_yaml, recipe_from
    from vacsr.train import run_recipe

    run_recipe(recipe_from(read_yaml(recipe)), recipe.parent / "run", progress=False)
    return recipe.parent / "run"


def photo_bytes(seed: int, format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format)
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG of a few hundred bytes whose header promises 2.5 billion pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 500)) + chunk(b"IEND", b"")
    )


class Photos:
    """Twelve photos in train, two each in dev and test, which a test may break."""

    def __init__(self, root: Path) -> None:
        self.root, self.spec = root, f"folder:{root}"
        for number in range(16):
            split = "train" if number < 12 else "dev" if number < 14 else "test"
            self.put(f"{split}/{number:02d}", photo_bytes(number), f"thing {number}\nanother way {number}")

    def put(self, name: str, photo: bytes | None = None, text: str | None = None) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        if photo is not None:
            (self.root / f"{name}.jpg").write_bytes(photo)
        if text is not None:
            (self.root / f"{name}.txt").write_text(text, encoding="utf-8")


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    return Photos(tmp_path / "photos")


def setting(**fields: object) -> list[str]:
    return [part for name, value in fields.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]


# ------------------------------------------------------------------------------------------------------ what works


def test_train_evaluate_and_score(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = vacsr("train", recipe, "--out", out, *setting(data__pairs=photos.spec))
    assert done.code == 0, done.err
    assert [line.split(" | ")[1] for line in done.out.splitlines()[2:]] == ["dev", "test"]
    assert not (out / "skipped.json").exists()
    again = vacsr("evaluate", out, "--json", tmp_path / "test.json")
    assert again.code == 0, again.err
    assert again.out.splitlines()[2] == done.out.splitlines()[3]
    everything = vacsr("evaluate", out, "--pairs", photos.spec, "--split", "train")
    assert everything.out.splitlines()[2].startswith("| flickr | train |")
    photo = photos.root / "test" / "15.jpg"
    answer = vacsr("score", out, "--image", photo, "--text", "thing 15", "--text", "tab\tand\nbreak")
    assert answer.code == 0, answer.err
    head, *lines = [line.split("\t") for line in answer.out.splitlines()]
    assert head == ["image", "text", "score", "grade", "uncertainty"]
    assert [line[:2] for line in lines] == [[str(photo), "thing 15"], [str(photo), "tab and break"]]
    scorer = PairScorer.from_pretrained(out, device="cpu")
    expected = scorer.score_pairs([photo], ["thing 15"])
    assert float(lines[0][2]) == pytest.approx(float(expected.score), abs=1e-4)
    named = vacsr("score", out, "--pairs", photos.spec, "--image", "test/15.jpg", "--text", "test/15.jpg#0")
    assert named.code == 0, named.err
    assert named.out.splitlines()[1].split("\t")[2] == lines[0][2]


def test_evaluate_on_a_folder(vacsr: Command, run: Path, photos: Photos, tmp_path: Path) -> None:
    answer = vacsr("evaluate", run, "--pairs", photos.spec, "--json", tmp_path / "out.json")
    assert answer.code == 0, answer.err
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"][0]["split"] == "test"


def test_evaluate_refuses_a_broken_photo(vacsr: Command, run: Path, photos: Photos, tmp_path: Path) -> None:
    photos.put("test/15", photo_bytes(15)[:300])
    answer = vacsr("evaluate", run, "--pairs", photos.spec, "--json", tmp_path / "out.json")
    assert answer.refused(4, "test/15.jpg cannot be read as a photo")
    assert not (tmp_path / "out.json").exists()


WORKS: dict[str, Callable[[Photos], None]] = {
    "one pixel": lambda photos: photos.put("train/00", _encoded(Image.new("RGB", (1, 1), "red"), "PNG")),
    "a thin photo": lambda photos: photos.put("train/00", _encoded(Image.new("RGB", (900, 1), "red"), "JPEG")),
    "grey, and palette with transparency": lambda photos: (
        photos.put("train/00", _encoded(Image.new("L", (5, 5), 9), "JPEG")),
        photos.put("dev/12", _encoded(Image.new("RGBA", (5, 5), (1, 2, 3, 0)).quantize(), "PNG")),
    )[0],
    "a caption of 10,000 letters": lambda photos: photos.put("train/00", text="x" * 10_000),
    "a caption of 10,000 words": lambda photos: photos.put("train/00", text="word " * 10_000),
    "other scripts": lambda photos: (
        photos.put("train/00", text="собака бежит\n犬が走る\nكلب يجري"),
        photos.put("test/14", text="🐕🐕\n—"),
    )[0],
}


def _encoded(image: Image.Image, format: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


@pytest.mark.parametrize("case", WORKS)
def test_odd_but_whole(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, case: str) -> None:
    WORKS[case](photos)
    done = vacsr("train", recipe, "--out", tmp_path / "run", *setting(data__pairs=photos.spec))
    assert done.code == 0, done.err
    (photo, words) = photos.root / "train" / "00.jpg", (photos.root / "train" / "00.txt").read_text(encoding="utf-8")
    scored = vacsr("score", tmp_path / "run", "--image", photo, "--text", words.split("\n")[0])
    assert scored.code == 0, scored.err
    assert np.isfinite(float(scored.out.splitlines()[1].split("\t")[2]))


# ---------------------------------------------------------------------------------------------------- what is refused


def torn(photos: Photos) -> str:
    photos.put("train/03", photo_bytes(3)[:400])
    return "train/03.jpg cannot be read as a photo"


def a_bomb(photos: Photos) -> str:
    photos.put("train/03", bomb())
    return "train/03.jpg cannot be read as a photo (its header says 50,000 × 50,000 pixels"


def no_photo(photos: Photos) -> str:
    photos.put("dev/13", b"<html>not found</html>")
    return "dev/13.jpg cannot be read as a photo (no known image format)"


def empty(photos: Photos) -> str:
    photos.put("train/03", b"")
    return "train/03.jpg cannot be read as a photo (empty file)"


def no_caption(photos: Photos) -> str:
    photos.put("train/03", text=" \n\n")
    return "train/03.jpg: no caption"


def no_file(photos: Photos) -> str:
    (photos.root / "train" / "03.jpg").unlink()
    return "train/03.txt: no photo beside it"


BROKEN = [torn, a_bomb, no_photo, empty, no_caption, no_file]


@pytest.mark.parametrize("breakage", BROKEN)
def test_broken_photos_stop_the_run_before_it_begins(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, breakage: Callable[[Photos], str]
) -> None:
    words = breakage(photos)
    done = vacsr("train", recipe, "--out", tmp_path / "run", *setting(data__pairs=photos.spec))
    assert done.refused(4, words, "data.on_error=skip")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("breakage", "cache"), [*((breakage, 4) for breakage in BROKEN), (torn, 0), (a_bomb, 0)])
def test_broken_photos_are_left_out_and_named(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, breakage: Callable[[Photos], str], cache: int
) -> None:
    words = breakage(photos)
    out = tmp_path / "run"
    fields = setting(data__pairs=photos.spec, data__on_error="skip", data__cache_gb=cache)
    done = vacsr("train", recipe, "--out", out, *fields)
    assert done.code == 0, done.err
    assert "left out" in done.err
    skipped = json.loads((out / "skipped.json").read_text(encoding="utf-8"))
    named = [line for lines in skipped.values() for line in lines]
    assert any(words in line for line in named), named
    assert (out / "report.json").is_file()


def test_a_broken_photo_of_the_report_can_be_left_out_afterwards(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path
) -> None:
    """Test photos are decoded for the report, after training; nothing has to be trained again."""
    photos.put("test/15", photo_bytes(15)[:300])
    out, fields = tmp_path / "run", setting(data__pairs=photos.spec)
    assert vacsr("train", recipe, "--out", out, *fields).refused(4, "test/15.jpg cannot be read as a photo")
    assert not (out / "report.json").exists()
    before = (out / "model" / "model.safetensors").read_bytes()
    rows = (out / "metrics.jsonl").read_text(encoding="utf-8")
    done = vacsr("train", recipe, "--out", out, *fields, "--resume", *setting(data__on_error="skip"))
    assert done.code == 0, done.err
    assert (out / "model" / "model.safetensors").read_bytes() == before
    assert (out / "metrics.jsonl").read_text(encoding="utf-8") == rows
    assert "test/15.jpg" in (out / "skipped.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("split", ["dev", "test"])
def test_a_split_without_a_readable_photo_is_no_absent_split(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, split: str
) -> None:
    """It would vanish from the report, and `evaluate` would report everything in its place."""
    out, fields = tmp_path / "run", setting(data__pairs=photos.spec, data__on_error="skip")
    assert vacsr("train", recipe, "--out", out, *fields).code == 0
    for photo in (photos.root / split).glob("*.jpg"):
        photo.write_bytes(b"")
    words = f"none of the 2 photos can be read, first {split}/"
    refused = vacsr("train", recipe, "--out", tmp_path / "again", *fields)
    assert refused.refused(4, words)
    assert "data.dev_share" not in refused.err
    assert not (tmp_path / "again").exists()
    answer = vacsr("evaluate", out)
    assert answer.refused(4, words) if split == "test" else answer.code == 0


def test_an_absent_split_of_photos_is_done_without(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path
) -> None:
    for path in (photos.root / "test").iterdir():
        path.unlink()
    out, fields = tmp_path / "run", setting(data__pairs=photos.spec, data__on_error="skip")
    done = vacsr("train", recipe, "--out", out, *fields)
    assert done.code == 0, done.err
    assert [line.split(" | ")[1] for line in done.out.splitlines()[2:]] == ["dev"]
    answer = vacsr("evaluate", out)
    assert answer.code == 0, answer.err
    assert "the data have no split 'test': reporting all 14 images" in answer.err


def test_embed_names_a_split_that_has_no_photo_left(photos: Photos) -> None:
    rows = [f"{path.relative_to(photos.root)},a thing,{path.parent.name}" for path in photos.root.rglob("*.jpg")]
    (photos.root / "t.csv").write_text("\n".join(["image,caption,split", *rows]), encoding="utf-8")
    for photo in (photos.root / "test").glob("*.jpg"):
        photo.unlink()
    spec = f"csv:{photos.root / 't.csv'}"
    with pytest.warns(UserWarning, match="2 left out"):
        data = load_pairs(spec, on_error="skip")
    assert isinstance(data, PhotoSet)
    with pytest.warns(UserWarning, match="nothing of the split 'test' is embedded: .*none of 2 photos can be used"):
        names = _split_names(spec, data, split=None, on_error="skip")
    assert names == {image: image.partition("/")[0] for image in data.image_ids}
    with pytest.raises(DataError, match="2 photos or captions cannot be used"):
        _split_names(spec, data, split=None, on_error="fail")


def test_a_photo_that_breaks_while_training(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed photos are met in the middle of an epoch: the photo is named, and what was saved stays."""
    from vacsr.train.trainer import Trainer

    original = Trainer._end_epoch

    def breaking(self: Trainer, *args: Any) -> None:
        original(self, *args)
        photos.put("train/03", photo_bytes(3)[:300])

    monkeypatch.setattr(Trainer, "_end_epoch", breaking)
    out = tmp_path / "run"
    fields = setting(data__pairs=photos.spec, data__cache_gb=0, train__epochs=3)
    done = vacsr("train", recipe, "--out", out, *fields)
    assert done.code == 4
    assert "Traceback" not in done.err
    assert "train/03.jpg cannot be read as a photo" in done.err
    assert (out / "checkpoint" / "state.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("backbone.spec=open_clip:vit", 2, "unknown backbone 'open_clip:vit' — write features:"),
        ("backbone.spec=tiny:wdith=8", 2, "did you mean 'width'?"),
        ("backbone.spec=features:", 2, "are photos — set backbone.spec to clip:…, towers:… or tiny:"),
        ("data.pairs=synthetic:images=20,held_out=5", 2, "are cached features — set backbone.spec=features:"),
        ("data.pairs=folder:nowhere", 4, "nowhere is no folder"),
        ("data.pairs=coco:nowhere", 4, "nowhere is no folder; expected annotations/dataset_coco.json"),
        ("data.pairs=csv:nowhere.csv", 4, "nowhere.csv"),
        ("data.train=validation", 4, "no split 'validation'"),
        ("backbone.spec=clip:./nowhere", 4, "no such folder: ./nowhere"),
        ("backbone.context=90", 2, "backbone.context is 90, the text tower takes 3 to 32"),
        ("data.noise.file=nowhere.npy", 4, "no such noise file: nowhere.npy"),
        ("train.batch_size=100", 4, "do not fill one batch of 100"),
    ],
)
def test_a_recipe_that_cannot_run(
    vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert vacsr("train", recipe, "--out", tmp_path / "run", "--set", change).refused(code, words)
    assert list(tmp_path.iterdir()) == []


def test_a_table_without_captions(vacsr: Command, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("image,text\na.jpg,hello\n", encoding="utf-8")
    done = vacsr("train", recipe, "--out", tmp_path / "run", *setting(data__pairs=f"csv:{tmp_path / 'a.csv'}"))
    assert done.refused(4, "a.csv has image, text, expected the columns image and caption — add or rename them")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["train", "embed"])
def test_without_transformers(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    clip = f"clip:{tmp_path}"
    argv: dict[str, list[object]] = {
        "train": [recipe, "--out", tmp_path / "run", *setting(data__pairs=photos.spec, backbone__spec=clip)],
        "embed": ["--backbone", clip, "--pairs", photos.spec, "--out", tmp_path / "f.safetensors"],
    }
    assert vacsr(command, *argv[command]).refused(3, "pip install 'vacsr[clip]'")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("image", "text", "code", "words"),
    [
        ("nowhere.jpg", "a dog", 4, "nowhere.jpg is not there — check the path"),
        ("FOLDER", "a dog", 4, "FOLDER is a folder, not a photo"),
        ("torn.jpg", "a dog", 4, "torn.jpg cannot be read as a photo"),
        ("bomb.png", "a dog", 4, "its header says 50,000 × 50,000 pixels"),
        ("whole.jpg", "", 2, "the model reads words — pass a list of texts that are not blank"),
        ("whole.jpg", " \t ", 2, "not blank"),
    ],
)
def test_score_refuses(
    vacsr: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    image: str, text: str, code: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "whole.jpg").write_bytes(photo_bytes(1))
    (tmp_path / "torn.jpg").write_bytes(photo_bytes(1)[:300])
    (tmp_path / "bomb.png").write_bytes(bomb())
    assert vacsr("score", run, "--image", image, "--text", "fine", "--text", text).refused(code, words)


def test_models_and_data_of_other_kinds(vacsr: Command, run: Path, photos: Photos, tmp_path: Path) -> None:
    features = "synthetic:images=20,held_out=5"
    assert vacsr("evaluate", run, "--pairs", features).refused(
        4, "the model reads photos, these data are cached features"
    )
    asked = ["--image", "train-0000", "--text", "train-0000#0"]
    assert vacsr("score", run, "--pairs", features, *asked).refused(4, "the model reads photos")
    flat = tmp_path / "flat.yaml"
    flat.write_text(yaml.safe_dump({**RECIPE, "data": {"pairs": features}, "backbone": {"head": {"dim": 4}}}))
    assert vacsr("train", flat, "--out", tmp_path / "flat").code == 0
    words = "the model reads cached features, these data are photos — embed them first"
    assert vacsr("evaluate", tmp_path / "flat", "--pairs", photos.spec).refused(4, words)
    asked = ["--image", "test/15.jpg", "--text", "thing 15"]
    assert vacsr("score", tmp_path / "flat", "--pairs", photos.spec, *asked).refused(4, words)


# ------------------------------------------------------------------------------------------------------------- noise


def test_noise_lies_beside_the_run(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fields = setting(data__pairs=photos.spec, data__noise__ratio=0.5, data__noise__seed=3)
    assert vacsr("train", recipe, "--out", out, *fields).code == 0
    clean = load_pairs(photos.spec, split="train").caption_image
    noise = load_noise(out / "noise.safetensors")  # it checks the hash
    assert (noise.ratio, noise.seed) == (0.5, 3)
    assert torch.equal(noise.original, clean)
    assert 0 < noise.changed_share <= 0.5
    harmed = bytearray((out / "noise.safetensors").read_bytes())
    harmed[-8:] = (99).to_bytes(8, "little")
    (tmp_path / "harmed.safetensors").write_bytes(bytes(harmed))
    again = ["--out", tmp_path / "again", *setting(data__pairs=photos.spec)]
    refused = vacsr("train", recipe, *again, *setting(data__noise__file=tmp_path / "harmed.safetensors"))
    assert refused.refused(4, "harmed.safetensors")
    done = vacsr("train", recipe, *again, *setting(data__noise__file=out / "noise.safetensors"))
    assert done.code == 0, done.err
    same = [(folder / "model" / "model.safetensors").read_bytes() for folder in (out, tmp_path / "again")]
    assert same[0] == same[1], "the same noise by seed and by file"


def test_noise_that_others_published(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path) -> None:
    """A .npy of image rows, as NCR writes it, is what the run trains on and keeps."""
    clean = load_pairs(photos.spec, split="train").caption_image.numpy()
    listed = clean.copy()
    listed[[0, 5, 9]] = clean[[5, 9, 0]]
    np.save(tmp_path / "noise.npy", listed)
    out, fields = tmp_path / "run", setting(data__pairs=photos.spec, data__noise__file=tmp_path / "noise.npy")
    done = vacsr("train", recipe, "--out", out, *fields)
    assert done.code == 0, done.err
    noise = load_noise(out / "noise.safetensors")
    assert noise.assignment.tolist() == listed.tolist()
    assert (noise.protocol, noise.seed) == ("file", None)
    np.save(tmp_path / "noise.npy", listed[:-1])
    other = vacsr("train", recipe, "--out", tmp_path / "other", *fields)
    assert other.refused(4, "is for 23 captions, the pairs have 24")
    assert not (tmp_path / "other").exists()


def test_evaluate_knows_the_truth_of_scenes(vacsr: Command, run: Path, tmp_path: Path) -> None:
    trained = json.loads((run / "report.json").read_text(encoding="utf-8"))["results"]
    figures = {
        "map_at_r",
        "map_at_r_i2t",
        "map_at_r_t2i",
        "tau_b",
        "auroc_false_negative_score",
        "auroc_false_negative",
    }
    for split, expected in zip(("dev", "test"), trained, strict=True):
        assert vacsr("evaluate", run, "--split", split, "--json", tmp_path / "out.json").code == 0
        (found,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
        assert found["exact"].keys() == figures
        assert 0 < found["exact"]["map_at_r"] <= 100
        assert found == expected
