"""What a table measures besides training: loss tolerance of trained cells, and the cost of a step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vacsr.compare import compare, read_table
from vacsr.compare.cells import run_tolerance
from vacsr.compare.formats import to_markdown
from vacsr.config import BackboneConfig, HeadConfig, Recipe
from vacsr.config.io import method_config, recipe_from
from vacsr.data import load_pairs
from vacsr.errors import UsageError
from vacsr.evaluate.agreement import judged_split
from vacsr.evaluate.tolerance import loss_tolerance
from vacsr.evaluate.truth import scene_truth
from vacsr.model import MatchingModel
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
    expected = loss_tolerance(score, truth.labelled, truth.false_negative, kind="logistic", scale=1.0)
    found = result.summary("clean", "fixed", "test.tolerance.mean")
    assert found is not None
    assert found.mean == pytest.approx(float(expected.r.mean()), rel=1e-6)
    scale = result.summary("clean", "infonce", "test.tolerance.scale")
    assert scale is not None
    assert scale.mean == pytest.approx(14.3, rel=0.05)
    assert "| vse | 1 | – | – |" in to_markdown(result), "a hinge has no such r"
    (out / "clean/fixed/seed-0/tolerance.json").unlink()
    before = (out / "clean/fixed/seed-0/model/model.safetensors").stat().st_mtime_ns
    compare(plan, out)
    assert (out / "clean/fixed/seed-0/tolerance.json").is_file(), "measured again, without training again"
    assert (out / "clean/fixed/seed-0/model/model.safetensors").stat().st_mtime_ns == before


PAIRS = "synthetic:images=12,held_out=6,per_image=2"
RATINGS = {(2, 0): (4, 3, 2), (2, 1): (3, 3, 2), (4, 0): (4, 4, 4), (3, 3): (4, 4, 4), (0, 1): (4, 4, 4)}
"""By image and by the image whose first caption was judged: a mean of 3, below, above, of the image itself,
and of an image in the judged-dev half."""


def judged_model(folder: Path, fields: dict[str, Any]) -> tuple[Recipe, dict[tuple[int, int], bool]]:
    """A saved model, a recipe with expert grades of its test images, and the false negatives by image and caption."""
    test = load_pairs(PAIRS, split="test")
    config = BackboneConfig(head=HeadConfig(dim=4))
    model = MatchingModel.build(
        method_config(fields), config, image_dim=test.images.shape[1], text_dim=test.texts.shape[1], seed=1
    )
    model.save_pretrained(folder / "model")
    lines = ["image\tcaption_image\tcaption_index\trating_1\trating_2\trating_3"]
    missed = {}
    for (image, other), ratings in RATINGS.items():
        name, (caption, number) = test.image_ids[image], test.caption_ids[2 * other].rsplit("#", 1)
        lines.append("\t".join([name, caption, number, *map(str, ratings)]))
        fits = image != other and sum(ratings) >= 9
        missed[image, 2 * other] = fits and judged_split(name) == "judged-test"
    (folder / "experts.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe = {"data": {"pairs": PAIRS}, "method": fields, "train": {"device": "cpu"}}
    return recipe_from({**recipe, "evaluate": {"splits": ["test"], "judgments": [str(folder / "experts.tsv")]}}), missed


@pytest.mark.parametrize(
    "fields", [{"name": "sigmoid", "scale": 3.0, "bias": -1.0}, {"name": "infonce"}, {"name": "vacsr"}]
)
def test_tolerance_is_that_of_the_loss_on_judged_test_images(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Its scale and bias, and as false negatives what experts grade 3 or more, of the judged-test half only."""
    recipe, missed = judged_model(tmp_path, fields)
    assert list(missed.values()) == [True, False, True, False, False]
    result = run_tolerance(tmp_path, recipe)["test"]
    assert result["false_negatives"] == sum(missed.values())
    score = PairScorer.from_pretrained(tmp_path, device="cpu").score_set(load_pairs(PAIRS, split="test")).score.double()
    false = torch.zeros(score.shape, dtype=torch.bool)
    for (image, caption), fits in missed.items():
        false[image, caption] = fits
    labelled = torch.arange(len(score))[:, None] == torch.arange(score.shape[1]) // 2
    kind = "softmax" if fields["name"] == "infonce" else "logistic"
    scale = {"sigmoid": 3.0, "vacsr": 1.0}.get(fields["name"], result["scale"])
    expected = loss_tolerance(score, labelled, false, kind=kind, scale=scale, bias=fields.get("bias", 0.0))
    assert result["scale"] == pytest.approx(scale)
    assert result["mean"] == pytest.approx(float(expected.r.mean()), rel=1e-5)


@pytest.mark.slow
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
