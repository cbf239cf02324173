"""`vacsr calibrate`: what it prints and stores, and data that it refuses since the model has seen them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vacsr.data import load_pairs
from vacsr.errors import DataError
from vacsr.scoring import PairScorer
from vacsr.search import model_digest
from vacsr.search.calibrate_run import load_calibration, seen_images

Command = Callable[..., Any]
FEATURES = "synthetic:images=200,held_out=60"
AGAIN = "synthetic:held_out=60,images=200"
"""The same data."""
CPU = ("--device", "cpu")
SMALL = ("--candidates", 30, *CPU)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run" / "model")
    configure(tmp_path / "run", "train: train", "train: {select: best}")
    return tmp_path / "run"


def configure(run: Path, data: str, *more: str) -> None:
    (run / "config.yaml").write_text("\n".join([f'data: {{pairs: "{FEATURES}", {data}}}', *more]))


def test_what_was_fitted_is_printed_with_what_it_is_worth(vacsr: Command, model: Path) -> None:
    answer = vacsr("calibrate", model, "--pairs", FEATURES, *SMALL, "--check", "test", "--precision", 0.5)
    assert answer.code == 0, answer.err
    assert "90% of the answer sets" in answer.out
    assert "at least 50% are right, with 90% confidence" in answer.out
    stored = json.loads((model / "search.json").read_text())
    assert stored["t2i"]["certified"] > 0
    assert f"certified for up to {stored['t2i']['certified']} items" in answer.out
    largest = stored["t2i"]["sizes"][-1]
    assert f"| 60 | {largest['cutoff']:.2f} | {largest['answered']:.1%} | {largest['precision']:.1%} |" in answer.out
    assert answer.out.count("Checked on split test:") == 2
    assert str(model / "search.json") in answer.err
    assert "may have been trained on these pairs" in answer.err


def test_a_stored_calibration_is_for_its_model_alone(vacsr: Command, model: Path) -> None:
    digest = model_digest(PairScorer.from_pretrained(model, device="cpu").model)
    assert load_calibration(model, model=digest) is None
    assert vacsr("calibrate", model, "--pairs", FEATURES, *SMALL).code == 0
    stored = load_calibration(model, model=digest)
    assert stored is not None
    assert json.loads((model / "search.json").read_text()) == stored.model_dump(mode="json")
    with pytest.raises(DataError, match="other weights"):
        load_calibration(model, model="another")
    for text in ("{", "[]", '{"model": 1}', "[" * 10**5):
        (model / "search.json").write_text(text)
        with pytest.raises(DataError, match="vacsr calibrate"):
            load_calibration(model, model=digest)


def test_options_that_are_refused(vacsr: Command, model: Path) -> None:
    fit_to = ("calibrate", model, "--pairs", FEATURES, *CPU)
    assert vacsr(*fit_to, "--precision", 2).refused(2, "--precision")
    assert vacsr("calibrate", "clip:no/model", *CPU).refused(2, "--pairs SPEC")
    assert vacsr("calibrate", "clip:no/model", "--pairs", FEATURES, *CPU).refused(2, "--index", "--out")
    assert vacsr("calibrate", model, *CPU).refused(2, "--pairs")
    assert vacsr(*fit_to, "--check", "dev").refused(2, "--check test")
    assert vacsr(*fit_to, "--check", "all").refused(2, "--check test")
    assert vacsr(*fit_to, "--split", "all", "--check", "test").refused(4, "share 60 images", "--check test")


@pytest.mark.parametrize("split", ["train", "all"])
def test_splits_that_were_trained_on_are_refused(vacsr: Command, run: Path, split: str) -> None:
    for folder in (run, run / "model"):
        assert vacsr("calibrate", folder, "--split", split, *CPU).refused(2, "--split dev")
    assert vacsr("calibrate", run, "--check", split, *CPU).refused(2, "--check test")
    assert not (run / "model" / "search.json").exists()
    configure(run, "train: all")
    for other in ("dev", "test"):
        assert vacsr("calibrate", run, "--split", other, *CPU).refused(2, "was trained on", "--pairs SPEC")


def test_images_that_were_trained_on_are_known_however_the_data_are_spelled(vacsr: Command, run: Path) -> None:
    fit_to = ("calibrate", run, "--pairs", AGAIN, *CPU)
    assert vacsr(*fit_to, "--split", "train").refused(4, "200 of 200 images")
    assert vacsr(*fit_to, "--check", "train").refused(4, "200 of 200 images")
    configure(run, "train: all")
    assert vacsr(*fit_to, "--split", "test").refused(4, "60 of 60 images")


@pytest.mark.parametrize(("select", "noted"), [("best", "dev"), ("last", "")])
def test_the_split_that_chose_the_epoch_is_noted(vacsr: Command, run: Path, select: str, noted: str) -> None:
    configure(run, "train: train", f"train: {{select: {select}}}")
    answer = vacsr("calibrate", run, *SMALL)
    assert answer.code == 0, answer.err
    assert ("chose the epoch on dev" in answer.err) is bool(noted)
    assert "nothing checks" not in answer.err
    assert json.loads((run / "model" / "search.json").read_text())["selected_on"] == noted


def test_a_failed_check_stores_nothing(vacsr: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DataError("a photo cannot be read — repair it")

    (model / "search.json").write_text("as it was")
    monkeypatch.setattr("vacsr.search.calibrate_run.check_calibration", fail)
    assert vacsr("calibrate", model, "--pairs", FEATURES, *SMALL, "--check", "test").code == 4
    assert (model / "search.json").read_text() == "as it was"


def test_an_image_is_known_by_its_name_and_a_caption() -> None:
    known = load_pairs("synthetic:images=20,held_out=6", split="train")
    again = load_pairs("synthetic:held_out=6,images=20", split="all")
    assert seen_images(again, known) == list(known.image_ids)
    assert seen_images(load_pairs("synthetic:images=20,held_out=6", split="dev"), known) == []
    assert known.captions is not None
    words = tuple(f"{text} elsewhere" for text in known.captions)
    assert seen_images(replace(known, captions=words), known) == []
    assert seen_images(replace(known, captions=(*words[:-1], known.captions[-1])), known) == [known.image_ids[-1]]
    assert seen_images(replace(known, captions=None), known) == list(known.image_ids)
