"""Encoders that are known by their vectors alone, ``features:FILE``: every command works as with the model itself."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.data import load_pairs
from vacsr.data.features import write_features
from vacsr.errors import ProvenanceMismatch, UsageError
from vacsr.provenance import Provenance
from vacsr.scoring import PairScorer
from vacsr.search import Searcher, embedding_provenance, open_index

Command = Callable[..., Any]
DATA = "synthetic:images=200,held_out=60"
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def vectors(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The vectors that the model makes of the held-out images and captions, with other lengths."""
    return write(tmp_path_factory.mktemp("v") / "vectors.safetensors", trained, backbone="someone's encoder")


def write(path: Path, model: Path, **provenance: str) -> str:
    parts = [load_pairs(DATA, split=split) for split in ("dev", "test")]
    scores = [PairScorer.from_pretrained(model, device="cpu").score_set(part) for part in parts]
    names = [f"{part.split}-{name}" for part in parts for name in part.image_ids]
    owner = torch.cat([part.caption_image + number * len(parts[0].image_ids) for number, part in enumerate(parts)])
    write_features(
        path, image=3 * torch.cat([part.images.mean for part in scores]),
        text=torch.cat([part.texts.mean for part in scores]), caption_image=owner, provenance=Provenance(**provenance),
    )  # fmt: skip
    rows: list[dict[str, Any]] = [{"image": name, "split": name.split("-")[0], "captions": []} for name in names]
    for row in owner.tolist():
        rows[row]["captions"].append(f"caption {len(rows[row]['captions'])} of {names[row]}")
    captions = path.with_suffix(".json")
    captions.write_text(json.dumps(rows))
    return f"features:{path},captions={captions}"


def test_vectors_are_calibrated_as_the_model_that_made_them(
    vacsr: Command, model: Path, vectors: str, tmp_path: Path
) -> None:
    own, same = tmp_path / "own.json", tmp_path / "same.json"
    common = ("--candidates", 30, "--precision", 0.5, "--check", "test", *CPU)
    assert vacsr("calibrate", model, "--pairs", DATA, "--out", own, *common).code == 0
    answer = vacsr("calibrate", vectors, "--out", same, *common)
    assert answer.code == 0, answer.err
    assert answer.out.count("Checked on split test:") == 2
    left, right = (json.loads(path.read_text())["t2i"] for path in (own, same))
    assert left["certified"] == right["certified"] > 0
    for one, other in zip(left["sizes"], right["sizes"], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    assert vacsr("calibrate", vectors, "--out", same, "--check", "dev", *CPU).refused(4, "share 60 images")
    assert vacsr("calibrate", vectors, *CPU).refused(2, "--out search.json")


def test_vectors_search_and_are_measured(vacsr: Command, model: Path, vectors: str, tmp_path: Path) -> None:
    index, file = f"exact:{tmp_path / 'index'}", tmp_path / "search.json"
    answer = vacsr("index", "add", index, "--run", vectors, "--pairs", vectors, "--split", "test", *CPU)
    assert answer.code == 0, answer.err
    assert "someone's encoder is used without training" in answer.err
    assert vacsr("calibrate", vectors, "--out", file, "--candidates", 30, *CPU).code == 0
    asked = load_pairs(vectors, split="test")
    with closing(open_index(index)) as opened:
        searcher = Searcher.from_pretrained(vectors, opened, calibration=file, device="cpu")
        results = searcher.search_texts(asked.texts, k=3)
    right = [one.hits[0].id == asked.image_ids[row] for one, row in zip(results, asked.caption_image, strict=True)]
    assert sum(right) / len(right) > 0.2
    assert all(hit.grade is not None and hit.score == pytest.approx(hit.cosine) for hit in results[0].hits)
    words = ("search", vectors, "--index", index, "--text", "a dog", *CPU)
    assert vacsr(*words).refused(2, "unknown encoders", "search_texts(features)")
    own, same = (
        vacsr("evaluate", run, "--pairs", pairs, "--split", "test", "--json", tmp_path / name, *CPU)
        for run, pairs, name in ((model, DATA, "own"), (vectors, vectors, "same"))
    )
    assert (own.code, same.code) == (0, 0), same.err
    one, other = (json.loads((tmp_path / name).read_text())["results"][0] for name in ("own", "same"))
    assert one["t2i"] == other["t2i"]


def test_other_encoders_are_not_taken_for_these(model: Path, vectors: str, tmp_path: Path) -> None:
    other = PairScorer.from_pretrained(write(tmp_path / "other.safetensors", model, backbone="another"), device="cpu")
    one, again = (PairScorer.from_pretrained(vectors, device="cpu") for _ in range(2))
    assert embedding_provenance(one.model) == embedding_provenance(again.model) != embedding_provenance(other.model)
    with pytest.raises(ProvenanceMismatch, match="another"):
        other.score_set(load_pairs(vectors, split="dev"))


def test_vectors_of_two_spaces_are_refused(tmp_path: Path) -> None:
    write_features(tmp_path / "two.safetensors", image=torch.eye(4), text=torch.ones(4, 2, 3))
    with pytest.raises(UsageError, match=r"4 and 3 dimensions: not one space.*vacsr train"):
        PairScorer.from_pretrained(f"features:{tmp_path / 'two.safetensors'}", device="cpu")
