"""Few-shot recipes: fields, the papers' plans, and how layers of YAML become one recipe."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from vacsr.config.base import METHODS
from vacsr.config.io import dump_yaml
from vacsr.data.fewshot.coop import LAYOUTS
from vacsr.errors import ConfigError, UsageError
from vacsr.fewshot import check_fewshot, fewshot_from, read_fewshot
from vacsr.fewshot.config import FewshotRecipe, FewshotTrainConfig
from vacsr.fewshot.methods.mma import Mma, MmaConfig
from vacsr.fewshot.methods.mmrl import MmrlConfig
from vacsr.fewshot.methods.prompts import CoopConfig, MapleConfig

PETS = {"data": {"spec": "coop:data,set=oxford_pets"}}


def on(dataset: str, protocol: str = "base-to-novel") -> dict[str, Any]:
    targets = {"sketch": "coop:data,set=imagenet_sketch"} if protocol == "domain" else {}
    return {"data": {"spec": f"coop:data,set={dataset}", "protocol": protocol, "targets": targets}}


def assert_refused(raw: Any, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fewshot_from(raw)
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ------------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("method", "dataset", "protocol", "expected"),
    [
        ("coop", "dtd", "base-to-novel", {"epochs": 200, "lr": 0.002, "batch_size": 32}),
        ("coop", "imagenet", "base-to-novel", {"epochs": 50}),
        ("cocoop", "food101", "base-to-novel", {"epochs": 10, "lr": 0.002, "batch_size": 1, "warmup_epochs": 1}),
        ("maple", "ucf101", "base-to-novel", {"epochs": 5, "lr": 0.0035, "batch_size": 4}),
        ("maple", "imagenet", "domain", {"epochs": 2, "lr": 0.0026, "batch_size": 4}),
        ("coprompt", "dtd", "base-to-novel", {"epochs": 8, "lr": 0.0035, "batch_size": 4, "view": "randaugment"}),
        ("mma", "dtd", "base-to-novel", {"epochs": 5, "lr": 0.0015, "batch_size": 16, "warmup_epochs": 0}),
        ("mma", "imagenet", "base-to-novel", {"batch_size": 128}),
        ("mma", "imagenet", "domain", {"epochs": 1, "batch_size": 128, "warmup_epochs": 0}),
        ("mmrl", "dtd", "base-to-novel", {"optimizer": "adamw", "lr": 1e-3, "epochs": 10, "crop": (0.5, 1.0)}),
        ("mmrl", "imagenet", "base-to-novel", {"batch_size": 32, "epochs": 5}),
        ("mmrl", "imagenet", "domain", {"batch_size": 32, "epochs": 1}),
        ("clipood", "dtd", "base-to-novel", {"epochs": 1, "steps_per_epoch": 500, "batch_size": 36, "lr": 5e-6}),
        ("clipood", "fgvc_aircraft", "base-to-novel", {"epochs": 10, "weight_decay": 0.1}),
        ("clipood", "ucf101", "base-to-novel", {"epochs": 2, "schedule": "cosine-step", "warmup_epochs": 0}),
        ("vacsr", "dtd", "base-to-novel", {"epochs": 5, "lr": 0.0015, "batch_size": 16, "warmup_epochs": 0}),
        ("vacsr", "sun397", "base-to-novel", {"batch_size": 128}),
        ("vacsr", "imagenet", "domain", {"batch_size": 128, "epochs": 5, "warmup_epochs": 0}),
        ("vacsr", "eurosat", "base-to-novel", {"batch_size": 5}),
    ],
)
def test_the_papers_training(method: str, dataset: str, protocol: str, expected: dict[str, Any]) -> None:
    train = fewshot_from({**on(dataset, protocol), "method": method}).train
    assert {name: getattr(train, name) for name in expected} == expected


def test_the_papers_method_fields() -> None:
    def method(name: str, dataset: str, protocol: str = "base-to-novel") -> Any:
        return fewshot_from({**on(dataset, protocol), "method": name}).method

    weights = {name: method("mmrl", name).consistency for name in tuple(LAYOUTS)[:11]}
    assert (weights["stanford_cars"], weights["oxford_pets"], weights["eurosat"]) == (7.0, 0.2, 0.01)
    assert len(weights) == 11
    assert (method("mmrl", "eurosat").rep_dim, method("mmrl", "dtd").rep_dim) == (2048, 512)
    assert method("mmrl", "imagenet", "domain").consistency == 0.2
    assert (method("maple", "imagenet", "domain").depth, method("maple", "imagenet").depth) == (3, 9)
    assert (method("mma", "imagenet", "domain"), method("mma", "imagenet")) == (MmaConfig(layers=4), MmaConfig())
    assert (method("clipood", "imagenet", "domain").beta, method("clipood", "dtd").beta) == (0.5, 0.1)


def test_every_plan_fits_its_configuration() -> None:
    protocols = ("base-to-novel", "domain", "all")
    for method, dataset, protocol in product(
        METHODS["fewshot"].values(), [*tuple(LAYOUTS)[:11], "scenes", ""], protocols
    ):
        plan = method.method.plan.fields(dataset, protocol)
        method.config.model_validate(plan["method"])
        FewshotTrainConfig.model_validate(plan["train"])

    Mma.plan.fields("imagenet", "domain")["method"]["layers"] = 99
    assert Mma.plan.fields("imagenet", "domain")["method"] == {"layers": 4}, "a copy"


# ----------------------------------------------------------------------------------------------------------- recipes


def test_written_fields_win_over_the_plan() -> None:
    raw = {**on("eurosat"), "method": {"name": "mmrl", "consistency": 3.0}, "train": {"epochs": 2}}
    recipe = fewshot_from(raw, ["train.lr=0.5"])
    assert (recipe.method.consistency, recipe.method.rep_dim) == (3.0, 2048)
    assert (recipe.train.epochs, recipe.train.lr, recipe.train.optimizer) == (2, 0.5, "adamw")


def test_without_the_preset_the_class_defaults_hold() -> None:
    recipe = fewshot_from({**on("eurosat"), "preset": "none", "method": "mmrl"})
    assert (recipe.method, recipe.train) == (MmrlConfig(), FewshotTrainConfig())


def test_another_method_starts_afresh_and_brings_its_plan() -> None:
    raw = {**PETS, "method": {"name": "maple", "depth": 2}}
    assert fewshot_from(raw, ["method.name=coop"]).method == CoopConfig()
    assert fewshot_from(raw, ["method=coop"]).train.epochs == 200
    assert fewshot_from(raw, ["method.tokens=4"]).method == MapleConfig(depth=2, tokens=4)


def test_vacsr_as_printed() -> None:
    ours, printed = (fewshot_from({**PETS, "method": name}).method for name in ("vacsr", "vacsr-paper"))
    assert (ours.adapter.residual, printed.adapter.residual) == ("cosine", "none")
    assert printed.objective.correction == 0.0
    assert fewshot_from({**PETS, "method": "coop-paper"}).method == CoopConfig()
    assert_refused({"method": "coop-huge"}, "coop", "huge", "default, paper")


def test_a_resolved_recipe_survives_yaml() -> None:
    raw = {**on("imagenet", "domain"), "method": "vacsr", "search": {"image_blocks": ["first 1", "last 2", "all"]}}
    recipe = fewshot_from(raw)
    again = fewshot_from(yaml.safe_load(dump_yaml(recipe)))
    assert again == recipe
    assert again.search.image_blocks == ("first 1", "last 2", "all")


def test_a_base_below_and_overrides_above(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**PETS, "method": "coop", "train": {"epochs": 7}}))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"base": "base.yaml", "train": {"batch_size": 3}}))
    recipe = read_fewshot(tmp_path / "own.yaml", ["data.seed=2"])
    assert (recipe.train.epochs, recipe.train.batch_size, recipe.train.lr) == (7, 3, 0.002)
    assert (recipe.data.seed, recipe.method.name) == (2, "coop")


def test_the_backbone_is_a_clip_unless_one_is_named() -> None:
    assert fewshot_from({}).backbone.spec == FewshotRecipe().backbone.spec == "clip:vit-b16"
    assert fewshot_from({"backbone": {"weights": "random"}}).backbone.spec == "clip:vit-b16"
    assert fewshot_from({"backbone": {"spec": "clip:vit-b32"}}).backbone.spec == "clip:vit-b32"
    assert fewshot_from({"backbone": {"start": "runs/x"}}).backbone.start == "runs/x"


def test_refusals_name_the_field() -> None:
    assert_refused({"method": "copo"}, "unknown few-shot method 'copo'", "did you mean", "clipood")
    assert_refused({"method": {"name": "maple", "dept": 3}}, "method.dept:", "did you mean 'depth'?")
    assert_refused({"train": {"crop": [0, 1]}}, "train.crop")
    assert_refused({"data": 3}, "data:")
    assert_refused({"train": None}, "train:")
    assert_refused({"search": {"image_blocks": ["fist 2"]}}, "search.image_blocks")


@pytest.mark.parametrize(
    ("fields", "action"),
    [
        ({"data": {"protocol": "domain"}}, "protocol: domain with targets"),
        ({"data": {"targets": {"x": "scenes:"}}}, "protocol: domain with targets"),
        ({"data": {"protocol": "domain", "targets": {"source": "scenes:"}}}, "give it another name"),
        ({"data": {"protocol": "domain", "targets": {"x": "scene:"}}}, "scene"),
        ({"data": {"spec": "coop"}}, "no such folder"),
        ({"method": "coop", "search": {"image_blocks": ["all"]}}, r"take search\.image_blocks out"),
        ({"method": "zeroshot", "search": {"epochs": [1]}}, "take search out"),
        ({"backbone": {"spec": "tiny:"}}, "clip:ID_OR_FOLDER"),
        ({"data": {"pairs": "scenes:"}}, "vacsr train RECIPE"),
    ],
)
def test_recipes_that_can_never_finish(fields: dict[str, Any], action: str) -> None:
    with pytest.raises(UsageError, match=action):
        check_fewshot(fewshot_from({"task": "fewshot", "method": "vacsr", **fields}))
