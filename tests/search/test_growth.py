"""An index outgrows its calibration: `vacsr index add` fits it again, or says what to type."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
DATA = "synthetic:images=200,held_out=60"
CPU = ("--device", "cpu")


@pytest.fixture
def add(vacsr: Command, model: Path, tmp_path: Path) -> Callable[..., Any]:
    """Adds a split to the index."""

    def command(split: str) -> Any:
        index = f"exact:{tmp_path / 'index'}"
        answer = vacsr("index", "add", index, "--run", model, "--pairs", DATA, "--split", split, *CPU)
        assert answer.code == 0, answer.err
        return answer

    return command


def test_a_calibration_grows_with_its_index(vacsr: Command, add: Any, model: Path, tmp_path: Path) -> None:
    index, stored = tmp_path / "index", tmp_path / "index" / "search.json"
    asked = ("--pairs", DATA, "--candidates", 30, "--precision", 0.5, "--seed", 3, "--index", f"exact:{index}", *CPU)
    add("test")
    assert vacsr("calibrate", model, *asked).code == 0
    before = stored.read_text()
    assert "fitted again" not in add("test").err, "nothing was added"
    assert stored.read_text() == before
    assert "up to 60 items, and the index holds 260, so they were fitted again" in add("train").err
    after = json.loads(stored.read_text())
    assert after["t2i"]["sizes"][-1]["size"] == 260
    assert vacsr("calibrate", model, *asked, "--out", tmp_path / "anew.json").code == 0
    assert after == json.loads((tmp_path / "anew.json").read_text()), "as if calibrated now"


@pytest.mark.parametrize("where", ["model", "index"])
def test_what_cannot_be_fitted_again_is_named(
    where: str, vacsr: Command, add: Any, model: Path, tmp_path: Path
) -> None:
    """A calibration of the model, or one whose vectors are missing."""
    index = tmp_path / "index"
    add("test")
    only = () if where == "model" else ("--index", f"exact:{index}")
    assert vacsr("calibrate", model, "--pairs", DATA, "--candidates", 30, *only, *CPU).code == 0
    (index / "search.safetensors").unlink(missing_ok=True)
    said = add("train").err
    assert "up to 60 items, and the index holds 260" in said
    command = shlex.split(next(line for line in said.splitlines() if "vacsr calibrate" in line).split("vacsr ")[1])
    assert vacsr(*command, *CPU).code == 0
    assert "calibrate" not in add("train").err


def test_a_calibration_to_a_known_truth_is_not_replaced_by_one_to_labels(
    vacsr: Command, add: Any, model: Path, tmp_path: Path
) -> None:
    add("test")
    assert vacsr("calibrate", model, "--pairs", DATA, "--candidates", 30, *CPU).code == 0
    stored = model / "search.json"
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "data": ""}))  # as the demo writes it
    said = add("train").err
    assert "up to 60 items, and the index holds 260" in said
    assert "vacsr calibrate" not in said


@pytest.mark.parametrize("broken", ["search.json", "search.safetensors"])
def test_items_are_stored_whatever_the_calibration(
    broken: str, vacsr: Command, add: Any, model: Path, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    add("test")
    asked = ("--pairs", DATA, "--candidates", 30, "--index", f"exact:{index}", *CPU)
    assert vacsr("calibrate", model, *asked).code == 0
    (index / broken).write_text("{")
    assert "warning: the calibration cannot follow the index" in add("train").err
    assert json.loads(vacsr("index", "info", f"exact:{index}", "--json").out)["vectors"] == 260
