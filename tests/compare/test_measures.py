"""What a table measures besides training: loss tolerance of trained cells, and the cost of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vacsr.compare import compare, read_table
from vacsr.compare.tolerance import method_tolerance
from vacsr.data import load_pairs
from vacsr.errors import UsageError
from vacsr.evaluate.exact import scene_truth
from vacsr.report.formats import to_markdown
from vacsr.scoring import PairScorer

SCENES = "scenes:images=24,held_out=12"


def write(path: Path, table: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    return path


def method(name: str, **fields: Any) -> dict[str, Any]:
    return {"method": {"name": name, **fields}}


@pytest.mark.slow
def test_tolerance_of_trained_cells(tmp_path: Path) -> None:
    table = {
        "title": "Tolerance",
        "measures": ["tolerance"],
        "base": {
            "data": {"pairs": SCENES},
            "backbone": {"spec": "tiny:", "head": {"kind": "linear", "dim": 8}},
            "train": {"epochs": 1, "batch_size": 24, "device": "cpu"},
            "evaluate": {"splits": ["test"]},
        },
        "rows": [
            {"name": "fixed", "set": method("sigmoid", scale=1.0, bias=0.0, learnable=False)},
            {"name": "infonce", "set": method("infonce")},
            {"name": "vse", "set": method("vse")},
        ],
        "columns": [{"key": "test.tolerance.mean", "best": "none", "digits": 3}, {"key": "test.tolerance.scale"}],
    }
    plan, out = read_table(write(tmp_path / "table.yaml", table)), tmp_path / "out"
    result = compare(plan, out)
    test = load_pairs(SCENES, split="test")
    truth = scene_truth(SCENES, test)
    assert truth is not None
    score = PairScorer.from_pretrained(out / "clean/fixed/seed-0", device="cpu").score_set(test).score
    chance = torch.sigmoid(score.double())
    plain = []
    for image in range(len(test.image_ids)):
        own = [j for j in range(len(test.caption_ids)) if int(test.caption_image[j]) == image]
        missed = [j for j in range(len(test.caption_ids)) if bool(truth.relevant[image, j]) and j not in own]
        plain.append(
            sum(1 - float(chance[image, j]) for j in own) / len(own) - sum(float(chance[image, j]) for j in missed)
        )
    found = result.summary("clean", "fixed", "test.tolerance.mean")
    assert found is not None
    assert found.mean == pytest.approx(sum(plain) / len(plain), rel=1e-6)
    scale = result.summary("clean", "infonce", "test.tolerance.scale")
    assert scale is not None
    assert scale.mean == pytest.approx(14.3, rel=0.05)
    assert "| vse | 1 | – | – |" in to_markdown(result), "a hinge has no such r"
    (out / "clean/fixed/seed-0/tolerance.json").unlink()
    before = (out / "clean/fixed/seed-0/model/model.safetensors").stat().st_mtime_ns
    compare(plan, out)
    assert (out / "clean/fixed/seed-0/tolerance.json").is_file(), "measured again, without training again"
    assert (out / "clean/fixed/seed-0/model/model.safetensors").stat().st_mtime_ns == before


def test_the_adapters_tolerance_is_that_of_its_logit() -> None:
    from vacsr.config.io import method_config
    from vacsr.methods import build_method

    labelled = torch.eye(3, dtype=torch.bool)
    missed = torch.tensor([[False, True, False], [False] * 3, [False] * 3])
    logit = torch.tensor([[0.0, 2.0, -1.0], [0.0, 1.0, 0.0], [0.0, 0.0, -3.0]])
    found = method_tolerance(
        build_method(method_config("vacsr"), dim=4), logit, labelled=labelled, false_negative=missed
    )
    assert found is not None
    p = torch.sigmoid(logit.double())
    torch.testing.assert_close(found.r, torch.stack([1 - p[0, 0] - p[0, 1], 1 - p[1, 1], 1 - p[2, 2]]))


def test_the_cost_of_a_step(tmp_path: Path) -> None:
    """Two methods on cached features; each in a process of its own."""
    table = {
        "title": "Cost",
        "task": "efficiency",
        "steps": 2,
        "base": {
            "data": {"pairs": "synthetic:images=20"},
            "backbone": {"head": {"dim": 8}},
            "train": {"batch_size": 16, "device": "cpu"},
        },
        "rows": [{"name": "sigmoid", "set": method("sigmoid")}],
        "columns": [{"key": "step.parameters", "digits": 6}, {"key": "step.training.ms"}],
    }
    plan, out = read_table(write(tmp_path / "table.yaml", table)), tmp_path / "out"
    with pytest.raises(UsageError, match="--jobs 2: steps timed side by side slow each other"):
        compare(plan, out, jobs=2)
    result = compare(plan, out)
    report = json.loads((out / "clean/sigmoid/seed-0/report.json").read_text(encoding="utf-8"))["results"][0]
    assert report["steps"] == 2
    assert report["training"]["ms"] > 0
    assert report["training"]["images_per_s"] == pytest.approx(16e3 / report["training"]["ms"])
    before = (out / "clean/sigmoid/seed-0/report.json").stat().st_mtime_ns
    assert compare(plan, out).summary("clean", "sigmoid", "step.training.ms") == result.summary(
        "clean", "sigmoid", "step.training.ms"
    )
    assert (out / "clean/sigmoid/seed-0/report.json").stat().st_mtime_ns == before
