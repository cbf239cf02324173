"""A recipe from data to report."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vacsr.train.recipe
from vacsr.config import DataConfig
from vacsr.data import load_pairs
from vacsr.data.features import write_features
from vacsr.data.noise import load_noise
from vacsr.errors import DataError, MissingExtra, UsageError
from vacsr.recipes import read_yaml, recipe_from
from vacsr.train.recipe import run_recipe, training_data


def test_a_run_folder(recipes: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe({"method.name": "vacsr", "data.noise.ratio": 0.5, "train.trackers": ["jsonl", "csv"]})
    done = run_recipe(recipe, tmp_path / "run", progress=False)
    names = {"config.yaml", "metrics.jsonl", "metrics.csv", "noise.safetensors", "checkpoint", "model", "report.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    assert recipe_from(read_yaml(tmp_path / "run" / "config.yaml")) == recipe
    assert done.report is not None
    assert json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))["schema"] == 1
    with (tmp_path / "run" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    assert {"step", "epoch", "lr", "loss", "recon", "kl", "grad_norm", "dev_rsum", "steps_per_second"} <= set(rows[0])
    assert load_noise(tmp_path / "run" / "noise.safetensors").ratio == 0.5


def test_noise_is_in_the_training_labels_only() -> None:
    spec = "synthetic:images=20,held_out=10,per_image=2"
    clean = training_data(DataConfig(pairs=spec))
    noisy = training_data(recipe_from({"data": {"pairs": spec, "noise": {"ratio": 0.5, "seed": 3}}}).data)
    assert clean.noise is None
    assert noisy.noise is not None
    assert torch.equal(noisy.train.caption_image, noisy.noise.assignment)
    assert not torch.equal(noisy.train.caption_image, clean.train.caption_image)
    assert noisy.dev is not None
    assert clean.dev is not None
    assert torch.equal(noisy.dev.caption_image, clean.dev.caption_image)


def test_a_share_of_the_training_images_as_dev() -> None:
    data = training_data(DataConfig(pairs="synthetic:images=20,per_image=2", dev_share=0.25))
    assert data.dev is not None
    assert (len(data.train.image_ids), len(data.dev.image_ids)) == (15, 5)
    assert not set(data.train.image_ids) & set(data.dev.image_ids)
    assert all(name.startswith("train") for name in data.dev.image_ids)


@pytest.fixture
def without_splits(tmp_path: Path) -> str:
    pairs = load_pairs("synthetic:images=20,per_image=2", split="train")
    file = tmp_path / "features.safetensors"
    write_features(file, image=pairs.images, text=pairs.texts.view(20, 2, -1))
    return f"features:{file}"


def test_data_without_splits(recipes: Any, without_splits: str, tmp_path: Path) -> None:
    data = {"data.pairs": without_splits, "data.train": "all", "method.name": "sigmoid"}
    with pytest.raises(DataError, match="split 'dev' was asked for"):
        run_recipe(recipes.recipe(data), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    done = run_recipe(recipes.recipe({**data, "data.dev": ""}), tmp_path / "run", progress=False)
    assert done.run.state.best is None
    assert done.report is not None
    assert done.report.results == (), "neither dev nor test is there to report"
    shared = run_recipe(recipes.recipe({**data, "data.dev_share": 0.3}), tmp_path / "share", progress=False)
    assert shared.run.state.best is not None


def test_the_report_has_the_splits_that_exist(recipes: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe({"method.name": "sigmoid", "evaluate.splits": ["dev", "val", "test"]})
    found = run_recipe(recipe, tmp_path / "run", progress=False).report
    assert found is not None
    assert [result["split"] for result in found.results] == ["dev", "test"]


def test_held_out_images_are_reported_as_dev(recipes: Any, without_splits: str, tmp_path: Path) -> None:
    changes = {"method.name": "sigmoid", "data.pairs": without_splits, "data.train": "all", "data.dev_share": 0.3}
    recipe = recipes.recipe(changes)
    found = run_recipe(recipe, tmp_path / "run", progress=False)
    data = training_data(recipe.data)
    assert data.dev is not None
    assert found.report is not None
    assert found.report.results[0]["rsum"] == pytest.approx(found.run.state.best)
    assert not set(data.train.image_ids) & set(data.dev.image_ids)


def broken_test_split(folder: Path) -> str:
    """Training and dev are fine, an image of the test split is not a number."""
    pairs = load_pairs("synthetic:images=30,per_image=2", split="train")
    images = pairs.images.clone()
    images[29] = torch.nan
    write_features(folder / "features.safetensors", image=images, text=pairs.texts.view(30, 2, -1))
    splits = ["train"] * 20 + ["dev"] * 5 + ["test"] * 5
    entries = [{"image": f"i{n}", "split": split, "captions": ["a", "b"]} for n, split in enumerate(splits)]
    (folder / "captions.json").write_text(json.dumps(entries), encoding="utf-8")
    return f"features:{folder / 'features.safetensors'},captions={folder / 'captions.json'}"


def test_broken_data_of_the_report_are_found_before_training(recipes: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe({"data.pairs": broken_test_split(tmp_path), "method.name": "sigmoid"})
    with pytest.raises(DataError, match="'i29'"):
        run_recipe(recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"evaluate.protocols": ["coco-9k"]}, UsageError),
        ({"evaluate.judgments": ["nowhere.tsv"]}, DataError),
        ({"train.batch_size": 1000}, DataError),
        ({"data.train": "val"}, DataError),
        ({"train.optimizer": "adamp"}, MissingExtra),
    ],
)
def test_what_is_refused_leaves_no_folder(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], error: type[Exception]
) -> None:
    monkeypatch.setitem(sys.modules, "adamp", None)
    with pytest.raises(error):
        run_recipe(recipes.recipe(change), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_changed_report_does_not_train_again(recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_recipe(recipes.recipe({"method.name": "sigmoid"}), tmp_path, progress=False)
    monkeypatch.setattr(vacsr.train.step.TrainStep, "__call__", lambda *_: pytest.fail("trains"))
    recipe = recipes.recipe({"method.name": "sigmoid", "evaluate.splits": ["test"]})
    done = run_recipe(recipe, tmp_path, resume=True, progress=False)
    assert done.report is not None
    assert [result["split"] for result in done.report.results] == ["test"]
    assert recipe_from(read_yaml(tmp_path / "config.yaml")) == recipe


def test_an_old_report_never_stands_beside_a_new_config(
    recipes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_recipe(recipes.recipe({"method.name": "sigmoid"}), tmp_path, progress=False)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(vacsr.train.recipe, "evaluate_retrieval", killed)
    recipe = recipes.recipe({"method.name": "sigmoid", "evaluate.splits": ["test"]})
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, tmp_path, resume=True, progress=False)
    assert not (tmp_path / "report.json").exists()
