"""A folder of photos without captions on the command line: indexed, kept up to date, searched; refused elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import load_pairs
from vacsr.errors import DataError
from vacsr.scoring import PairScorer
from vacsr.search import open_index

Command = Callable[..., Any]
"""The fixture `vacsr` of conftest.py."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small towers, a step old."""
    pairs = load_pairs("scenes:images=6,held_out=2,per_image=2,size=32", split="train")
    tiny = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
    folder = tmp_path_factory.mktemp("model")
    fit("sigmoid", pairs, TrainConfig(epochs=1, batch_size=2, device="cpu"), backbone=tiny).model.save_pretrained(
        folder
    )
    return folder


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(path)


@pytest.fixture
def album(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nine photos in the working folder's `album`."""
    monkeypatch.chdir(tmp_path)
    for number in range(9):
        draw(tmp_path / "album" / ("" if number < 5 else "trip") / f"{number}.png", number)
    return tmp_path / "album"


@pytest.fixture
def add(vacsr: Command, model: Path) -> Command:
    def command(spec: str, *words: str, index: str = "exact:i") -> Any:
        return vacsr("index", "add", index, "--run", model, "--pairs", spec, "--device", "cpu", *words)

    return command


def test_an_index_follows_its_folder(add: Command, album: Path) -> None:
    assert "added 9, replaced 0, left 0" in add("photos:album").err
    draw(album / "new.png", 20)
    draw(album / "3.png", 21)
    os.utime(album / "3.png", ns=(1, 1))
    (album / "trip" / "7.png").unlink()
    answer = add("album", "--prune", "--batch", "1")
    assert "added 1, replaced 1, left 7 that were there, removed 1 that are gone" in answer.err
    index = open_index("exact:i")
    assert index.info().sources == (f"photos:{album}",)
    kept = {f"{n}.png" for n in range(5)} | {"trip/5.png", "trip/6.png", "trip/8.png", "new.png"}
    assert {name for name, _ in index.records()} == kept
    assert index.metadata(["trip/5.png"])["trip/5.png"]["source"] == str(album / "trip" / "5.png")
    for path in list(album.glob("*.png")):
        path.unlink()
    assert add("album", "--prune").refused(2, "are not there any more", "--yes")


def test_a_stop_costs_a_batch(add: Command, album: Path) -> None:
    (album / "trip" / "6.png").write_bytes(b"broken")
    assert add("album", "--batch", "2").refused(4, "6.png cannot be read as a photo", "--skip")
    assert len(open_index("exact:i")) in (2, 4, 6)
    before = len(open_index("exact:i"))
    answer = add("album", "--batch", "2", "--skip")
    assert f"added {8 - before}, replaced 0, left {before}" in answer.err
    assert "1 left out: trip/6.png" in answer.err


def test_captions_may_come_later(add: Command, album: Path) -> None:
    """The same photos under `folder:` are the same items."""
    assert "added 9" in add("album").err
    for photo in album.rglob("*.png"):
        photo.with_suffix(".txt").write_text("words", encoding="utf-8")
    assert "added 0, replaced 0, left 9" in add("folder:album").err


def test_two_folders_with_the_same_names(add: Command, album: Path) -> None:
    draw(album.parent / "other" / "3.png", 30)
    assert add("album").code == 0
    assert add("other").refused(4, "'3.png' is in the index from", "name the one above both")
    both = add(".", index="exact:both")
    assert "added 10," in both.err


def test_searches_find_them(vacsr: Command, add: Command, album: Path, model: Path) -> None:
    add("album")
    ask = ("search", model, "--index", "exact:i", "--device", "cpu", "-k", "3", "--json", "found.json")
    assert vacsr(*ask, "--text", "a red boat").code == 0
    hits = json.loads(Path("found.json").read_text(encoding="utf-8"))["hits"]
    scorer = PairScorer.from_pretrained(model, device="cpu")
    every = sorted(path.relative_to(album).as_posix() for path in album.rglob("*.png"))
    score = scorer.score_all([album / name for name in every], ["a red boat"]).score[:, 0]
    assert [hit["id"] for hit in hits] == [every[row] for row in score.argsort(descending=True)[:3].tolist()]
    assert hits[0]["metadata"]["captions"] == []
    assert vacsr(*ask, "--image", album / "trip" / "8.png").code == 0
    assert json.loads(Path("found.json").read_text(encoding="utf-8"))["hits"][0]["id"] == "trip/8.png"


def test_a_broken_query_is_not_told_to_skip(vacsr: Command, add: Command, album: Path, model: Path) -> None:
    add("album")
    Path("broken.jpg").write_bytes(b"no photo")
    answer = vacsr("search", model, "--index", "exact:i", "--device", "cpu", "--image", "broken.jpg")
    assert answer.refused(4, "broken.jpg cannot be read as a photo (no known image format) — copy it again")
    assert "skip" not in answer.err
    with pytest.raises(DataError, match=r"copy it again$"):
        PairScorer.from_pretrained(model, device="cpu").embed_images(["broken.jpg"])


@pytest.mark.parametrize("spec", ["photos:album", "album"])
def test_commands_that_need_captions_refuse_them(
    vacsr: Command, add: Command, album: Path, model: Path, spec: str
) -> None:
    Path("r.yaml").write_text(
        yaml.safe_dump({"data": {"pairs": spec, "train": "all", "dev": "", "on_error": "skip"}}), encoding="utf-8"
    )
    hint = "folder:album"
    assert vacsr("train", "r.yaml", "--out", "run").refused(2, hint)
    assert vacsr("evaluate", model, "--pairs", spec, "--split", "all", "--device", "cpu").refused(2, hint)
    assert vacsr("calibrate", model, "--pairs", spec, "--split", "all", "--device", "cpu").refused(2, hint)
    assert vacsr("audit", model, "--pairs", spec, "--split", "all", "--out", "audit", "--device", "cpu").refused(
        2, hint
    )
    assert vacsr("embed", "--backbone", "clip:x", "--pairs", spec, "--out", "a.safetensors").refused(2, hint)
    assert add(spec, "--texts").refused(2, hint)
    assert sorted(path.name for path in Path().iterdir()) == ["album", "r.yaml"]
