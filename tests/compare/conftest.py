"""Small trained runs, made once: cached features with a σ and without, and drawn scenes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.compare import Cell
from vacsr.compare.run import run_records
from vacsr.config.io import recipe_from
from vacsr.pages.curves import RunRecord
from vacsr.train.run import run_recipe

FEATURES = {"data": {"pairs": "synthetic:images=40,held_out=24"}, "backbone": {"head": {"dim": 16}}}
SCENES = {
    "data": {"pairs": "scenes:images=24,held_out=12,per_image=2,size=32"},
    "backbone": {"spec": "tiny:width=16,depth=1,text_depth=1,heads=2", "head": {"dim": 8}},
}


def small_run(fields: dict[str, Any], folder: Path, *, method: str, setting: str, epochs: int = 2) -> RunRecord:
    train = {"epochs": epochs, "batch_size": 16, "device": "cpu", "checkpoint_every": 0}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    recipe = recipe_from({**fields, "method": {"name": method}, "train": train})
    run_recipe(recipe, folder, progress=False)
    torch.set_num_threads(before)
    return run_records([Cell(method, setting, 0, recipe, folder)])[0]


@pytest.fixture(scope="session")
def feature_runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    out = tmp_path_factory.mktemp("features")
    return [small_run(FEATURES, out / method, method=method, setting="clean") for method in ("vacsr", "infonce")]


@pytest.fixture(scope="session")
def scene_run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return small_run(SCENES, tmp_path_factory.mktemp("scenes") / "run", method="vacsr", setting="clean", epochs=1)
