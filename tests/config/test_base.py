import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from vacsr.config import Recipe, TrainConfig
from vacsr.config.base import METHODS, MethodConfig, method_entry, register
from vacsr.errors import ConfigError, UsageError
from vacsr.methods import build_method
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig

MODULE = """
from typing import Literal
from vacsr.methods.base import Method, MethodConfig, register
from vacsr.objective import LossTerms
from vacsr.objective import cosines

class SquareConfig(MethodConfig):
    name: Literal["square"] = "square"
    weight: float = 1.0

@register("square", SquareConfig, presets={"light": {"weight": 0.1}})
class Square(Method):
    config: SquareConfig
    pairwise = True

    def loss(self, v, t, pairs):
        error = (cosines(v.mean, t.mean) - pairs.relevance.float()).square().sum() / pairs.batch
        return LossTerms(self.config.weight * error, {"square": error.detach()})
"""
TRAIN = """
import vacsr, square_module
pairs = vacsr.load_pairs("synthetic:images=8,held_out=6,per_image=2", split="train")
config = vacsr.TrainConfig(epochs=1, batch_size=8, device="cpu")
backbone = vacsr.BackboneConfig(head=vacsr.HeadConfig(dim=8))
run = vacsr.fit("square-light", pairs, config, backbone=backbone, progress=False)
run.model.save_pretrained("model")
"""
LOAD = """
import vacsr
method = vacsr.MatchingModel.from_pretrained("model").method
print(type(method).__module__, method.config.name, method.config.weight)
"""
RECIPE = """
data: {pairs: "synthetic:images=8,held_out=6,per_image=2", dev: ""}
backbone: {head: {dim: 8}}
method: {name: square, weight: 0.5}
train: {epochs: 1, batch_size: 8, device: cpu}
evaluate: {splits: [test]}
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which finds modules in ``folder`` and knows nothing of this one's registry."""
    paths = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with somebody's method in a module, and a model that was trained with it."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "square_module.py").write_text(MODULE, encoding="utf-8")
    done = python(folder, "-c", TRAIN)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_third_party_method_loads_where_its_module_is_imported(package: Path) -> None:
    done = python(package, "-c", "import square_module" + LOAD)
    assert done.stdout.split() == ["square_module", "square", "0.1"], done.stderr


def test_a_third_party_method_is_found_by_its_entry_point(package: Path) -> None:
    done = python(package, "-c", LOAD)
    assert "unknown method 'square'" in done.stderr
    assert "vacsr.methods" in done.stderr
    info = package / "square-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: square\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[vacsr.methods]\nsquare = square_module\n", encoding="utf-8")
    (package / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    done = python(package, "-m", "vacsr", "train", "recipe.yaml", "--out", "run")
    assert done.returncode == 0, done.stderr
    done = python(package, "-c", LOAD.replace('"model"', '"run"'))
    assert done.stdout.split() == ["square_module", "square", "0.5"], done.stderr


def test_the_recipe_validates_its_method_through_the_registry() -> None:
    recipe = Recipe.model_validate({"method": {"name": "sigmoid", "scale": 3.0}})
    assert recipe.method == SigmoidConfig(scale=3.0)
    own = {"name": "sigmoid", "scale": 3.0, "bias": -10.0, "learnable": True}
    assert recipe.model_dump()["method"] == {"members": 1, "teacher": 0.0, "trust": 0.0, **own}
    assert Recipe(method=SigmoidConfig(scale=3.0)) == recipe
    assert type(build_method(recipe.method, dim=4)) is Sigmoid
    with pytest.raises(ConfigError):
        Recipe(method="sigmoid")  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        recipe.train.epochs = 3  # type: ignore[misc]


def test_a_section_built_by_hand_names_its_fields_too() -> None:
    with pytest.raises(ConfigError, match=r"TrainConfig .*\n  epoch: unknown field \(did you mean 'epochs'\?\)"):
        TrainConfig(epoch=3)  # type: ignore[call-arg]


class OtherConfig(MethodConfig):
    name: Literal["sigmoid"] = "sigmoid"


def test_names_are_unique_and_agree_with_the_config() -> None:
    entry = method_entry("sigmoid")

    def made(name: str, config: Any = OtherConfig) -> None:
        register(name, config)(type("Other", (Sigmoid,), {}))

    with pytest.raises(UsageError, match="choose another name"):
        made("sigmoid")
    with pytest.raises(UsageError, match="must default to 'mine'"):
        made("mine")
    assert METHODS["retrieval"]["sigmoid"] is entry
    register("sigmoid", SigmoidConfig, presets=entry.presets)(Sigmoid)  # a notebook cell that runs again
    assert method_entry("sigmoid").method is Sigmoid
