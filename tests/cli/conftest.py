"""Small recipes on cached features and on photos, and a run of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vacsr.config.io import read_yaml, recipe_from
from vacsr.data import load_pairs
from vacsr.train import run_recipe

SPEC = "synthetic:images=20,held_out=15,per_image=2"
RECIPE: dict[str, Any] = {
    "data": {"pairs": SPEC},
    "backbone": {"head": {"dim": 4}},
    "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
}
PHOTOS: dict[str, Any] = {
    "data": {"pairs": "scenes:images=12,held_out=4,per_image=2,size=32"},
    "backbone": {"spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32", "head": {"dim": 8}},
    "train": {"epochs": 1, "batch_size": 4, "device": "cpu", "towers": {"freeze_image": 0}},
}


@pytest.fixture(scope="package")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recipes")
    files = {"features": folder / "small.yaml", "photos": folder / "photos.yaml"}
    for name, fields in (("features", RECIPE), ("photos", PHOTOS)):
        files[name].write_text(yaml.safe_dump(fields), encoding="utf-8")
    return files


@pytest.fixture(scope="package")
def trained(recipes: dict[str, Path]) -> Callable[[str], Path]:
    """The run folder of a recipe, trained when it is first asked for."""

    def folder(name: str) -> Path:
        out = recipes[name].with_suffix("")
        if not out.exists():
            run_recipe(recipe_from(read_yaml(recipes[name])), out, progress=False)
        return out

    return folder


@pytest.fixture
def judgments(tmp_path: Path) -> tuple[Path, Path]:
    """Expert and crowd grades of test images with their own captions and those of two neighbours."""
    images = load_pairs(SPEC, split="test").image_ids
    expert = ["image\tcaption_image\tcaption_index\trating_1\trating_2\trating_3"]
    crowd = ["image\tcaption_image\tcaption_index\tyes_share"]
    for n, image in enumerate(images):
        for step in (0, 1, 2):
            other = images[(n + step) % len(images)]
            expert.append(f"{image}\t{other}\t0\t{4 - step}\t{1 + (n + step) % 4}\t{4 - n % 2}")
            crowd.append(f"{image}\t{other}\t1\t{(n + step) % 7 / 6}")
    files = tmp_path / "expert.tsv", tmp_path / "crowd.tsv"
    for path, lines in zip(files, (expert, crowd), strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files
