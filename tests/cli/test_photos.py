"""The command line on photos: hard inputs each have one clear outcome, and nothing is left half-written."""

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
from PIL import Image

from vacsr.data import load_pairs
from vacsr.data.noise import load_noise
from vacsr.scoring import PairScorer
from vacsr.search import open_index

Patch = pytest.MonkeyPatch
Command = Callable[..., Any]
"""The fixture `vacsr`: words in, exit code and output out."""


@pytest.fixture
def recipe(recipes: dict[str, Path]) -> Path:
    return recipes["photos"]


@pytest.fixture
def run(trained: Callable[[str], Path]) -> Path:
    return trained("photos")


def encoded(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def photo_bytes(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), "JPEG")


def bomb() -> bytes:
    """A PNG of a few bytes whose header promises 2.5 billion pixels."""
    parts = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(b"\0" * 500)
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


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


def test_odd_but_whole(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path) -> None:
    """Photos of any shape and mode, captions of any length and script."""
    for number, (image, kind, text) in enumerate(
        [
            (Image.new("RGB", (1, 1), "red"), "PNG", "x" * 10_000),
            (Image.new("RGB", (900, 1), "red"), "JPEG", "word " * 10_000),
            (Image.new("L", (5, 5), 9), "JPEG", "собака бежит\n犬が走る\nكلب يجري"),
            (Image.new("RGBA", (5, 5), (1, 2, 3, 0)).quantize(), "PNG", "🐕🐕\n—"),
        ]
    ):
        photos.put(f"train/{number:02d}", encoded(image, kind), text)
    out = tmp_path / "run"
    done = vacsr("train", recipe, "--out", out, *setting(data__pairs=photos.spec))
    assert done.code == 0, done.err
    scored = vacsr("score", out, "--image", photos.root / "train" / "01.jpg", "--text", "собака")
    assert np.isfinite(float(scored.out.splitlines()[1].split("\t")[2]))


def test_an_index_of_photos(vacsr: Command, run: Path, photos: Photos, tmp_path: Path, monkeypatch: Patch) -> None:
    """Kept up to date with its folder, searched by text and by image; a broken photo is left out when asked."""
    monkeypatch.chdir(tmp_path)

    def add(*words: str) -> Any:
        return vacsr("index", "add", "exact:i", "--run", run, "--pairs", *words, "--device", "cpu")

    photos.put("test/15", b"broken")
    assert add("photos").refused(4, "15.jpg cannot be read as a photo", "--skip")
    answer = add("photos:photos", "--skip")
    assert "warning: 1 left out: " in answer.err
    assert answer.err.count("15.jpg") == 1
    photos.put("new", photo_bytes(20))
    (photos.root / "test" / "15.jpg").unlink()
    (photos.root / "test" / "14.jpg").unlink()
    answer = add("photos", "--prune", "--batch", "1")
    assert "added 1, replaced 0, unchanged 14, removed 1" in answer.err
    index = open_index("exact:i")
    assert index.info().sources == (f"photos:{photos.root}",)
    every = sorted(path.relative_to(photos.root).as_posix() for path in photos.root.rglob("*.jpg"))
    assert sorted(name for name, _ in index.records()) == every
    assert index.metadata(["dev/12.jpg"])["dev/12.jpg"]["source"] == str(photos.root / "dev" / "12.jpg")
    ask = ("search", run, "--index", "exact:i", "--device", "cpu", "--json", "hits.json", "--image")
    assert vacsr(*ask, photos.root / "dev" / "12.jpg").code == 0
    best = json.loads(Path("hits.json").read_text(encoding="utf-8"))["hits"][0]
    assert (best["id"], best["metadata"]["captions"]) == ("dev/12.jpg", [])
    Path("broken.jpg").write_bytes(b"no photo")
    refused = vacsr(*ask, "broken.jpg")
    assert refused.refused(4, "broken.jpg cannot be read as a photo (no known image format) — copy it again")
    assert "skip" not in refused.err  # a query cannot be left out


@pytest.mark.parametrize("terminal", [False, True])
def test_a_search_says_what_is_confident_first(
    vacsr: Command, run: Path, tmp_path: Path, monkeypatch: Patch, terminal: bool
) -> None:
    index, file, held_out = f"exact:{tmp_path / 'i'}", tmp_path / "c.json", "scenes:images=9,held_out=45,size=32,seed=9"
    assert vacsr("index", "add", index, "--run", run, "--pairs", f"{held_out},split=test").code == 0
    assert vacsr("calibrate", run, "--pairs", held_out, "--out", file).code == 0

    def search(*words: object) -> list[str]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
        ask = ("search", run, "--index", index, "--text", "a red boat", "--calibration", file, "-k", 5)
        answer = vacsr(*ask, *words)
        assert answer.code == 0, answer.err
        lines = answer.out.splitlines()
        assert terminal or all(line.startswith("# ") != ("\t" in line) for line in lines)
        return [line.removeprefix("# ") for line in lines]

    def use(cutoff: float | None, certified: int = 0) -> None:
        stored = json.loads(file.read_text(encoding="utf-8"))
        sizes = [{**row, "cutoff": cutoff} for row in stored["t2i"]["sizes"]]
        stored["t2i"] |= {"sizes": sizes, "certified": certified}
        file.write_text(json.dumps(stored), encoding="utf-8")

    use(None)
    grades = [float(line.split()[2]) for line in search()[-5:]]
    assert grades == sorted(grades, reverse=True)
    assert search()[0].startswith("no confident match")
    (said,) = search("--policy", "confident")
    assert said.startswith("no confident match")
    assert search("--min-grade", 1)[1:] == ["no hit has a grade of 1 or more"]
    use(grades[1] - 1e-3, certified=1000)
    said, guarantee, head, *hits = search()
    assert said.split() == [str(sum(grade >= grades[1] - 1e-3 for grade in grades)), "confident", "matches"]
    assert "at least 90% are right" in guarantee
    assert head.split() == ["rank", "id", "grade", "σ", "score", "cosine", "note"]
    sure = [line for line in hits if line.endswith("confident")]
    assert (len(sure), len(hits)) == (int(said.split()[0]), 5)
    assert search("--policy", "confident")[3:] == sure
    assert len(search("--min-grade", grades[0] + 1e-3)) == 3


@pytest.mark.parametrize("spec", ["photos:photos", "photos"])
def test_photos_alone_are_refused(
    vacsr: Command, recipe: Path, run: Path, photos: Photos, tmp_path: Path, monkeypatch: Patch, spec: str
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = ("--pairs", spec, "--split", "all", "--device", "cpu")
    for command in (
        ("train", recipe, "--out", "run", *setting(data__pairs=spec, data__train="all", data__on_error="skip")),
        ("evaluate", run, *whole),
        ("calibrate", run, *whole),
        ("audit", run, *whole, "--out", "audit"),
        ("embed", "--backbone", "clip:x", "--pairs", spec, "--out", "a.safetensors"),
        ("index", "add", "exact:i", "--run", run, "--pairs", spec, "--texts"),
    ):
        assert vacsr(*command).refused(2, "folder:photos")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


UNREADABLE = "cannot be read as a photo"
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "torn": ({"photo": photo_bytes(3)[:400]}, f"train/03.jpg {UNREADABLE}"),
    "bomb": ({"photo": bomb()}, f"train/03.jpg {UNREADABLE} (more than 178,956,970 pixels)"),
    "no caption": ({"text": " \n\n"}, "train/03.jpg: no caption"),
    "no file": ({}, "train/03.txt: no photo beside it"),
}
"""What is put in the place of a photo, and what is said of it."""


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, photos: Photos) -> str:
    change, words = BROKEN[request.param]
    photos.put("train/03", **change)
    if not change:
        (photos.root / "train" / "03.jpg").unlink()
    return words


def test_broken_photos_stop_the_run_or_are_skipped(
    vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, broken: str
) -> None:
    out, fields = tmp_path / "run", setting(data__pairs=photos.spec)
    assert vacsr("train", recipe, "--out", out, *fields).refused(4, broken, "data.on_error=skip")
    assert not out.exists()
    for cache in (4, 0):
        skip = setting(data__on_error="skip", data__cache_gb=cache)
        done = vacsr("train", recipe, "--out", out / str(cache), *fields, *skip)
        assert done.code == 0, done.err
        assert "left out" in done.err
        skipped = json.loads((out / str(cache) / "skipped.json").read_text(encoding="utf-8"))
        assert any(broken in line for lines in skipped.values() for line in lines), skipped
        assert (out / str(cache) / "report.json").is_file()


def test_a_broken_test_photo_is_skipped_later(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path) -> None:
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
def test_a_split_without_a_photo(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path, split: str) -> None:
    """It would vanish from the report, and `evaluate` would report everything in its place."""
    out, fields = tmp_path / "run", setting(data__pairs=photos.spec, data__on_error="skip")
    assert vacsr("train", recipe, "--out", out, *fields).code == 0
    for photo in (photos.root / split).glob("*.jpg"):
        photo.write_bytes(b"")
    words = "none of the 2 photos can be read"
    refused = vacsr("train", recipe, "--out", tmp_path / "again", *fields)
    assert refused.refused(4, words)
    assert "data.dev_share" not in refused.err
    assert not (tmp_path / "again").exists()
    answer = vacsr("evaluate", out)
    assert answer.refused(4, words) if split == "test" else answer.code == 0


def test_an_absent_split_is_done_without(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path) -> None:
    for path in (photos.root / "test").iterdir():
        path.unlink()
    out, fields = tmp_path / "run", setting(data__pairs=photos.spec, data__on_error="skip")
    done = vacsr("train", recipe, "--out", out, *fields)
    assert done.code == 0, done.err
    assert [line.split(" | ")[1] for line in done.out.splitlines()[2:]] == ["dev"]
    answer = vacsr("evaluate", out)
    assert answer.code == 0, answer.err
    assert "the data have no split 'test': taking all 14 images" in answer.err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("backbone.spec=features:", 2, "are photos — set backbone.spec"),
        ("data.pairs=synthetic:images=20,held_out=5", 2, "are cached features — set backbone.spec=features:"),
        ("data.pairs=folder:nowhere", 4, "nowhere is not a folder"),
        ("data.train=validation", 4, "no split 'validation'"),
        ("data.noise.file=nowhere.npy", 4, "no such file: nowhere.npy"),
        ("train.batch_size=100", 4, "do not fill a step"),
    ],
)
def test_a_recipe_that_cannot_run(
    vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: Patch, change: str, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert vacsr("train", recipe, "--out", tmp_path / "run", "--set", change).refused(code, words)
    assert list(tmp_path.iterdir()) == []


def test_score_refuses(vacsr: Command, run: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    for name, content in (("whole.jpg", photo_bytes(1)), ("torn.jpg", photo_bytes(1)[:300]), ("bomb.png", bomb())):
        Path(name).write_bytes(content)
    for image, text, code, words in (
        ("nowhere.jpg", "a dog", 4, "nowhere.jpg"),
        ("FOLDER", "a dog", 4, "FOLDER"),
        ("torn.jpg", "a dog", 4, "torn.jpg"),
        ("bomb.png", "a dog", 4, "make it smaller"),
        ("whole.jpg", " \t ", 2, "not blank"),
    ):
        assert vacsr("score", run, "--image", image, "--text", "fine", "--text", text).refused(code, words)


def test_noise_is_stored_and_can_be_reused(vacsr: Command, recipe: Path, photos: Photos, tmp_path: Path) -> None:
    """Drawn by seed, from the file of another run, or as others publish it: the image row of each caption."""
    fields, out = setting(data__pairs=photos.spec), tmp_path / "drawn"
    seeded = setting(data__noise__ratio=0.5, data__noise__seed=3)
    assert vacsr("train", recipe, "--out", out, *fields, *seeded).code == 0
    noise = load_noise(out / "noise.safetensors")  # it checks the hash
    assert (noise.ratio, noise.seed) == (0.5, 3)
    assert torch.equal(noise.original, load_pairs(photos.spec, split="train").caption_image)
    assert 0 < noise.changed_share <= 0.5
    np.save(tmp_path / "noise.npy", noise.assignment.numpy())
    for file in (out / "noise.safetensors", tmp_path / "noise.npy"):
        again = tmp_path / file.suffix
        assert vacsr("train", recipe, "--out", again, *fields, *setting(data__noise__file=file)).code == 0
        assert load_noise(again / "noise.safetensors").assignment.equal(noise.assignment)
        same = [(folder / "model" / "model.safetensors").read_bytes() for folder in (out, again)]
        assert same[0] == same[1]
    np.save(tmp_path / "noise.npy", noise.assignment.numpy()[:-1])
    refused = vacsr("train", recipe, "--out", tmp_path / "other", *fields, *setting(data__noise__file=file))
    assert refused.refused(4, "is for 23 captions, the pairs have 24")
    assert not (tmp_path / "other").exists()
