"""Post-hoc uncertainty in recipes and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vacsr.train.checkpoint import run_pairs
from vacsr.train.run import run_recipe


@pytest.fixture(scope="module")
def run(recipes: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that reports with post-hoc uncertainty."""
    out = tmp_path_factory.mktemp("posthoc") / "run"
    changes = {"method.name": "infonce", "evaluate.posthoc": "laplace", "data.noise.ratio": 0.2}
    run_recipe(recipes.recipe(changes), out, progress=False)
    return out


def result_of(path: Path) -> dict[str, Any]:
    """The test split's result."""
    (result,) = (r for r in json.loads(path.read_text(encoding="utf-8"))["results"] if r["split"] == "test")
    return result


def test_evaluate_uses_what_the_run_kept_and_can_fit_it_again(run: Path, vacsr: Any, tmp_path: Path) -> None:
    first, second, plain = (tmp_path / name for name in ("first.json", "second.json", "plain.json"))
    assert vacsr("evaluate", run, "--device", "cpu", "--json", first).code == 0
    fitted = run / "posthoc.safetensors"
    fitted.rename(tmp_path / "moved")
    assert vacsr("evaluate", run, "--device", "cpu", "--json", second).code == 0
    (tmp_path / "moved").rename(fitted)
    assert vacsr("evaluate", run, "--device", "cpu", "--posthoc", "none", "--json", plain).code == 0
    assert (
        result_of(first)["uncertainty"]
        == result_of(second)["uncertainty"]
        == result_of(run / "report.json")["uncertainty"]
    )
    assert result_of(first)["uncertainty"]["aurc_i2t"] > 0
    assert result_of(plain)["uncertainty"] is None
    assert result_of(plain)["rsum"] == result_of(first)["rsum"]


def test_a_model_folder_does_not_say_what_it_was_trained_on(run: Path, vacsr: Any) -> None:
    pairs = "synthetic:images=29,held_out=12,per_image=2"
    answer = vacsr("evaluate", run / "model", "--pairs", pairs, "--posthoc", "laplace", "--device", "cpu")
    assert answer.refused(2, "give the run folder")


@pytest.mark.parametrize("method", ["infonce", "ncr"])
def test_one_minus_the_cosine_needs_no_fit(method: str, recipes: Any, vacsr: Any, tmp_path: Path) -> None:
    changes = {"method.name": method, "evaluate.posthoc": "cosine", "train.epochs": 2}
    run_recipe(recipes.recipe(changes), tmp_path / "run", progress=False)
    assert not (tmp_path / "run/posthoc.safetensors").exists()
    result = result_of(tmp_path / "run/report.json")
    assert result["uncertainty"]["aurc_t2i"] > 0
    again, plain = tmp_path / "again.json", tmp_path / "plain.json"
    pairs = run_pairs(tmp_path / "run")
    options = ("--pairs", pairs, "--device", "cpu", "--json")
    assert vacsr("evaluate", tmp_path / "run/model", "--posthoc", "cosine", *options, again).code == 0
    assert result_of(again)["uncertainty"] == result["uncertainty"]
    assert vacsr("evaluate", tmp_path / "run", "--posthoc", "none", *options, plain).code == 0
    assert result_of(plain)["uncertainty"] is None
