"""What a newcomer copies must work: the recipes."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vacsr.cli import app
from vacsr.config.io import read_recipe, read_yaml, recipe_from, recipe_layers
from vacsr.data import load_pairs, parse_spec
from vacsr.data.fewshot import CLASS_FORMATS
from vacsr.fewshot.config import FewshotRecipe, read_fewshot
from vacsr.model import MatchingModel
from vacsr.train.callbacks import frozen_towers, loss_warmup
from vacsr.train.optim import build_optimizer, lr_factor

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FEWSHOT = [path for path in RECIPES if any(layer.get("task") == "fewshot" for layer in recipe_layers(path))]
PARSER: Any = typer.main.get_command(app)


def flatten(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested fields by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flatten(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat


@pytest.mark.parametrize("path", FEWSHOT, ids=lambda path: path.name)
def test_fewshot_recipe_is_valid(path: Path) -> None:
    recipe = read_fewshot(path)
    assert isinstance(recipe, FewshotRecipe)
    for spec in (recipe.data.spec, *recipe.data.targets.values()):
        parse_spec(spec, formats=CLASS_FORMATS)


def test_features_recipe_names_every_field_at_its_default() -> None:
    written = flatten(yaml.safe_load((ROOT / "recipes/features.yaml").read_text(encoding="utf-8")))
    default = flatten(recipe_from({}).model_dump(mode="json"))
    assert written.pop("data.pairs") != default.pop("data.pairs")
    assert written == default


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_says_how_it_is_run(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"vacsr {'fewshot' if path in FEWSHOT else 'train'} recipes/{path.name}" in text
    for command in re.findall(r"^#   (vacsr .*)$", text, re.MULTILINE):
        name, *arguments = shlex.split(command)[1:]
        PARSER.commands[name].make_context(name, arguments)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("synthetic.yaml", ["data.pairs=synthetic:images=40"]),
        ("scenes-tiny.yaml", ["data.pairs=scenes:images=26,held_out=8", "backbone.spec=tiny:width=16,heads=2"]),
    ],
)
def test_a_recipe_without_downloads_trains(name: str, changes: list[str], tmp_path: Path, vacsr: Any) -> None:
    """Through a recipe on top of it, as people would shorten it."""
    own = tmp_path / "short.yaml"
    own.write_text(yaml.safe_dump({"base": str(ROOT / "recipes" / name), "train": {"epochs": 1}}), encoding="utf-8")
    sets = [word for change in changes for word in ("--set", change)]
    answer = vacsr("train", own, *sets, "--out", tmp_path / "run")
    assert answer.code == 0, answer.err
    assert "| flickr | test |" in answer.out
    assert (tmp_path / "run/report.json").is_file()
    resolved = read_yaml(tmp_path / "run/config.yaml")
    assert list(resolved) == ["data", "backbone", "method", "train", "evaluate"]
    assert recipe_from(resolved) == read_recipe(own, changes)


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "data/flickr8k").is_dir(), reason="needs ../shared/data/flickr8k")
def test_flickr_recipe_names_files_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_from(read_yaml(ROOT / "recipes/flickr8k-features.yaml"))
    monkeypatch.chdir(SHARED)  # the recipe's data/ is this one's
    assert len(load_pairs(recipe.data.pairs, split="train").image_ids) == 6000
    assert all(Path(path).is_file() for path in recipe.evaluate.judgments)


def changed(name: str, other: str) -> dict[str, Any]:
    """Fields of a recipe that another one has otherwise."""
    fields, others = (flatten(read_recipe(ROOT / "recipes" / file).model_dump(mode="json")) for file in (name, other))
    return {field: value for field, value in fields.items() if others[field] != value}


@pytest.mark.parametrize("towers", ["coco-vitb32", "coco-vitb16"])
def test_recipes_of_towers_and_of_noise_differ_in_nothing_else(towers: str) -> None:
    assert changed("coco-vitb16.yaml", "coco-vitb32.yaml") == {"backbone.spec": "clip:openai/clip-vit-base-patch16"}
    for percent in (20, 50):
        noisy = changed(f"{towers}-noise{percent}.yaml", f"{towers}.yaml")
        assert noisy == {"data.noise.ratio": percent / 100}


def test_the_papers_settings() -> None:
    """What the paper and the public frame that it trains in (PCME++'s) say, field by field."""
    fields = flatten(read_recipe(ROOT / "recipes/coco-vitb32.yaml").model_dump(mode="json"))
    expected = {
        "data.noise.ratio": 0.0, "backbone.spec": "clip:openai/clip-vit-base-patch32",
        "backbone.weights": "pretrained", "backbone.image_output": "hidden", "backbone.text_output": "norm",
        "backbone.pooling": "gpo", "backbone.image_size": 224, "backbone.resize": "whole",
        "backbone.pixel_stats": "own", "backbone.context": 77, "backbone.augment.crop": [0.6, 1.0],
        "backbone.augment.flip": 0.5, "backbone.augment.image_tokens": 0.2, "backbone.augment.text_tokens": 0.2,
        "backbone.augment.text_mask": 0.5, "backbone.augment.text_random": 0.1, "backbone.head.kind": "linear",
        "backbone.head.dim": 1024, "backbone.head.init": "xavier", "method.name": "vacsr", "train.epochs": 25,
        "train.batch_size": 128, "train.lr": 5e-4, "train.weight_decay": 1e-4, "train.optimizer": "adamp",
        "train.betas": [0.9, 0.999], "train.warmup_steps": 0, "train.clip_norm": 2.0, "train.accumulate": 1,
        "train.precision": "fp32", "train.select": "best", "train.eval_every": 1, "train.dev_images": 1000,
    }  # fmt: skip
    assert {field: fields[field] for field in expected} == expected
    assert min(fields["backbone.augment.crop"]) * fields["data.photo_size"] >= fields["backbone.image_size"]


def test_the_papers_schedule() -> None:
    config = read_recipe(ROOT / "recipes/coco-vitb32.yaml").train
    factors = [lr_factor(epoch * 10 + 9, steps_per_epoch=10, config=config) for epoch in range(25)]
    assert factors == [1.0] * 15 + [0.1] * 10
    assert [sorted(frozen_towers(epoch, config.towers)) for epoch in range(25)] == [["image"]] * 2 + [[]] * 23
    ramp = [loss_warmup(step, steps_per_epoch=4, config=config.towers) for step in range(100)]
    assert ramp == [1.0] * 8 + [0.25, 0.5, 0.75, 1.0] + [1.0] * 88


@pytest.fixture(scope="module")
def narrow_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a CLIP that is twelve blocks deep, as the paper's, and very narrow."""
    transformers = pytest.importorskip("transformers")
    side = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 12, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        vision_config={**side, "image_size": 224, "patch_size": 32},
        text_config={**side, "vocab_size": 600, "max_position_embeddings": 77},
        projection_dim=8,
    )
    folder = tmp_path_factory.mktemp("clip") / "narrow"
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", ["vacsr", "vacsr-paper", "sigmoid"])
def test_the_papers_rate_of_every_parameter(method: str, narrow_clip: Path) -> None:
    given = [f"backbone.spec=clip:{narrow_clip}", "backbone.weights=random", "backbone.head.dim=8"]
    recipe = read_recipe(ROOT / "recipes/coco-vitb32.yaml", [*given, f"method.name={method}"])
    model = MatchingModel.build(recipe.method, recipe.backbone)
    optimizer = build_optimizer(model.param_groups(recipe.train.towers), "adamp", lr=recipe.train.lr, weight_decay=1e-4)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    tower = {"image": 5e-4 * 0.01, "text": 5e-4 * 0.1}
    seen = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # the final norm of the image tower, which the output skips
            assert id(parameter) not in rates
            continue
        side, block = re.match(r"(?:backbone\.(image|text)\.(?:.*\.layers\.(\d+)\.)?)?", name).groups()  # type: ignore[union-attr]
        seen.add((side, block))
        expected = tower.get(side, 5e-4) * (0.7 ** (12 - int(block)) if block else 1.0)  # else heads, pooling, method
        assert rates[id(parameter)] == pytest.approx(expected, rel=1e-12), name
        assert decays[id(parameter)] == (1e-4 if parameter.ndim >= 2 else 0.0), name
    assert seen == {(None, None), *((side, block) for side in tower for block in (None, *map(str, range(12))))}


def test_the_flickr8k_recipe_has_the_settings_of_the_table() -> None:
    """The one to read and the one behind the figures; where data and weights lie, and what is kept, may differ."""
    base = read_yaml(ROOT / "tables/flickr8k.yaml")["base"]
    ours, theirs = (
        flatten(recipe.model_dump(mode="json"))
        for recipe in (read_recipe(ROOT / "recipes/flickr8k-dinov2-minilm.yaml"), recipe_from(base))
    )
    free = {"data.pairs", "backbone.spec", "train.log_every", "train.checkpoint_epochs", "evaluate.judgments"}
    assert {field for field in ours if ours[field] != theirs[field]} <= free


def test_the_coco_part_recipe_differs_from_flickr8ks_where_it_says() -> None:
    """Other data and towers, and neither frozen epochs nor a warm-up of the loss."""
    fields = changed("coco-part-clipb16-minilm.yaml", "flickr8k-dinov2-minilm.yaml")
    assert (fields.pop("train.towers.freeze_image"), fields.pop("train.towers.ramp")) == (0, False)
    assert set(fields) == {"data.pairs", "backbone.spec", "train.checkpoint_epochs", "evaluate.protocols"}
