"""Recipes as files: presets and layers of methods, overrides, YAML, bases; refusals that name the field."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from vacsr import config as config_module
from vacsr.adapter import AdapterConfig
from vacsr.config import Config, Recipe, TrainConfig
from vacsr.config.base import METHODS, method_entry
from vacsr.config.io import (
    dump_yaml,
    merge_layers,
    method_config,
    parse,
    parse_overrides,
    read_recipe,
    read_yaml,
    recipe_from,
)
from vacsr.errors import ConfigError
from vacsr.fewshot import config as fewshot_config
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.methods.vacsr import VacsrConfig
from vacsr.objective import ObjectiveConfig


def assert_refused(call: Any, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in words), str(caught.value)


def written(folder: Path, name: str, content: Any) -> Path:
    """A file of this text, or of these fields as YAML."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def test_every_preset_of_every_method_resolves() -> None:
    assert method_entry("vacsr").presets["paper"]
    for name, entry in METHODS["retrieval"].items():
        assert {"default", "paper"} <= set(entry.presets)
        for preset in entry.presets:
            assert method_config(f"{name}-{preset}").name == name
            assert method_config({"name": name, "preset": preset}) == method_config(f"{name}-{preset}")
        assert method_config(name) == method_config(f"{name}-default") == entry.config(name=name)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"method": "vascr"}, "unknown method 'vascr' (did you mean 'vacsr'?)"),
        ({"method": "vacsr-papr"}, "choose one of: default, paper"),
        ({"method": {"name": "sigmoid", "preset": "huge"}}, "no preset 'huge'"),
        ({"method": ["vacsr"]}, "method: expected a name or fields"),
        ({"method": {"name": "vacsr", "margin": 0.2}}, "method.margin: unknown field\n"),  # vse has it
        ({"method": {"name": "vse", "margn": 0.2}}, "method.margn: unknown field (did you mean 'margin'?)"),
        ({"method": {"adapter": {"component": 1}}}, "adapter.component: unknown field (did you mean 'components'?)"),
        ({"epochs": 3}, "epochs: unknown field\n"),
        ({"trian": {}}, "trian: unknown field (did you mean 'train'?)"),
        ({"train": {"protocols": []}}, "train.protocols: unknown field\n"),  # evaluate has it
    ],
)
def test_a_wrong_name_is_refused_with_one_that_would_fit_there(raw: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from(raw)
    assert expected in f"{caught.value}\n"


@pytest.mark.parametrize(
    "override",
    ["train.epochs=0", "train.lr=fast", "train.lr=.inf", "train.betas=[1.5, 0.9]", "backbone.head.dropout=1.0",
     "backbone.image_scaling=zscore", "data.noise.ratio=1.5", "train=3", "data=null", "method.objective.kl_weight=-1",
     "method.adapter.components=2.5", "method.scale=3"],
)  # fmt: skip
def test_a_bad_field_is_named_by_its_dotted_path(override: str) -> None:
    assert_refused(lambda: recipe_from({}, [override]), override.partition("=")[0])


def test_every_problem_is_listed_below_its_section() -> None:
    bad = {"train": {"epochs": 0, "lr": -1}, "extra": 1}
    assert_refused(lambda: recipe_from(bad), "  train.epochs:", "  train.lr:", "  extra:")
    assert_refused(lambda: parse(TrainConfig, {"batch_size": 1}), "  batch_size:")
    assert_refused(lambda: parse(TrainConfig, {"batch_size": 1}, within="train"), "  train.batch_size:")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1E5", 1e5), ("-2.5e-4", -2.5e-4), ("3", 3), ("true", True), ("null", None),
        ("adamw", "adamw"), ("", ""), ("'12'", "12"), ("[jsonl, csv]", ["jsonl", "csv"]), ("{a: 3}", {"a": 3}),
        ("tiny:", "tiny:"), ("clip:vit-b32", "clip:vit-b32"), ("features:a.st,captions=b", "features:a.st,captions=b"),
    ],
)  # fmt: skip
def test_override_values(text: str, value: Any) -> None:
    parsed = parse_overrides([f"a.b={text}"])["a"]["b"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_overrides_merge_and_the_last_wins() -> None:
    merged = parse_overrides(["train.lr=1", "train.epochs=2", "train.lr=3", " method.name =sigmoid"])
    assert merged == {"train": {"lr": 3, "epochs": 2}, "method": {"name": "sigmoid"}}
    recipe = recipe_from({"train": {"lr": 1, "epochs": 5}}, ["train.lr=1e-3", "train.betas=[0,0.5]"])
    assert (recipe.train.lr, recipe.train.epochs, recipe.train.betas) == (0.001, 5, (0.0, 0.5))
    assert recipe_from(None) == recipe_from({}) == Recipe()


@pytest.mark.parametrize("item", ["train.lr", "=3", " =3", "a={b", "train=[e", "train={lr: 1, lr: 2}", "a=2024-13-01"])
def test_a_broken_override(item: str) -> None:
    assert_refused(lambda: parse_overrides([item]), item.partition("=")[2])


@pytest.mark.parametrize(
    ("raw", "overrides"),
    [
        (None, []),
        ({"method": {"name": "vacsr-paper"}}, ["method.objective.kl_weight=5e-5", "train.lr=1e-7"]),
        ({"method": {"name": "infonce"}}, ["train.trackers=[]", "data.pairs=features:a b.st,captions=é.json"]),
    ],
)
def test_a_resolved_recipe_survives_yaml(raw: dict[str, Any] | None, overrides: list[str], tmp_path: Path) -> None:
    recipe = recipe_from(raw, overrides)
    path = written(tmp_path, "config.yaml", dump_yaml(recipe))
    assert recipe_from(read_yaml(path)) == recipe
    assert list(read_yaml(path)) == ["data", "backbone", "method", "train", "evaluate"]


@pytest.mark.parametrize(
    "content",
    [b"a: [", b"\xff\xfe\x00", b"", b"- 1\n- 2\n", b"text", b"a: 2024-13-01", pytest.param(b"[" * 100_000, id="deep")],
)
def test_yaml_that_is_no_recipe(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert_refused(lambda: read_yaml(path), "recipe.yaml")
    assert_refused(lambda: read_yaml(tmp_path), tmp_path.name)
    assert_refused(lambda: read_yaml(tmp_path / "none.yaml"), "no such file", "none.yaml")


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ('data: {}\ntrain: {epochs: 3}\n"train": {lr: 0.1}\n', "'train'", "line 3"),
        ("train:\n  lr: 1\n  epochs: 2\n  lr: 1\n", "'lr'", "line 4"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\n  d: 3\n", "'d'", "line 5"),
    ],
)
def test_a_duplicate_key_is_refused(text: str, key: str, line: str, tmp_path: Path) -> None:
    path = written(tmp_path, "recipe.yaml", text)
    assert_refused(lambda: read_yaml(path), str(path), f"duplicate key {key}", line)
    own = written(tmp_path, "own.yaml", {"base": "recipe.yaml"})
    assert_refused(lambda: read_recipe(own), "own.yaml", str(path), key)


def test_merge_keys_still_bring_in_others(tmp_path: Path) -> None:
    text = "shared: &shared {a: 1, b: 2}\nmore: &more\n  <<: *shared\n  b: 3\nlast: {<<: [*more, *shared], c: 4}\n"
    fields = {"shared": {"a": 1, "b": 2}, "more": {"a": 1, "b": 3}, "last": {"a": 1, "b": 3, "c": 4}}
    assert read_yaml(written(tmp_path, "merged.yaml", text)) == fields


def bomb(first: str, form: str, *, levels: int = 10) -> str:
    """Ten aliases on each line, each for the line before."""
    lines = (f"a{n}: &a{n} " + form.replace("?", ", ".join([f"*a{n - 1}"] * 10)) for n in range(1, levels))
    return "\n".join((f"a0: &a0 {first}", *lines, ""))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(bomb("[1]", "[?]"), id="aliases"),
        pytest.param(bomb("{x: 1}", "{<<: [?]}"), id="merge keys"),
        pytest.param(bomb("[1]", "[?]", levels=5) + "base: *a4", id="base"),
        pytest.param("a: &a [*a]", id="itself"),
        pytest.param("#" * (2**20 + 1), id="large"),
    ],
)
def test_a_few_lines_that_stand_for_billions_are_refused(text: str, tmp_path: Path) -> None:
    path, started = written(tmp_path, "bomb.yaml", text), time.process_time()
    with pytest.raises(ConfigError, match=r"bomb\.yaml") as caught:
        read_recipe(path)
    assert len(str(caught.value)) < 500
    assert time.process_time() - started < 1


def test_every_field_gives_its_reason() -> None:
    named = [*vars(config_module).values(), *vars(fewshot_config).values(), AdapterConfig, ObjectiveConfig]
    kinds = [kind for kind in named if isinstance(kind, type) and issubclass(kind, Config)]
    kinds += [entry.config for methods in METHODS.values() for entry in methods.values()]
    silent = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, field in kind.model_fields.items()
        if name != "name" and not (field.description or "").strip()  # MethodConfig documents `name`
    ]
    assert len(kinds) > 30
    assert silent == []


PAPER = {"name": "vacsr", "preset": "paper"}


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ("vacsr-paper", {"objective": {"kl_weight": 0.0}}, {**PAPER, "objective": {"kl_weight": 0.0}}),
        ({"name": "vacsr", "adapter": {"components": 3}}, {"preset": "paper"}, PAPER),
        ({"name": "vacsr", "adapter": {"components": 3}}, "vacsr-paper", PAPER),
        ({"name": "vacsr", "adapter": {"components": 3}}, "sigmoid", SigmoidConfig()),
        ({"name": "vacsr", "adapter": {"components": 3}}, {"name": "infonce-paper"}, InfoNCEConfig(scale=1.0)),
        ({"name": "vacsr", "lr_scale": 0.5}, {"name": "vacsr", "adapter": {"components": 3}},
         {"name": "vacsr", "lr_scale": 0.5, "adapter": {"components": 3}}),
        ("infonce", {"scale": 2.0}, InfoNCEConfig(scale=2.0)),
        (None, None, VacsrConfig()),
    ],
)  # fmt: skip
def test_another_name_or_preset_starts_afresh(below: Any, above: Any, expected: Any, tmp_path: Path) -> None:
    """In layers, as an override, and in a recipe on top of its base."""
    recipe = recipe_from(merge_layers({"method": below}, {"method": above}))
    assert recipe.method == method_config(expected)
    written(tmp_path, "base.yaml", {"method": below})
    own = written(tmp_path, "own.yaml", {"base": "base.yaml", "method": above})
    assert read_recipe(own) == recipe_from({"method": below}, [f"method={yaml.safe_dump(above)}"]) == recipe


def test_a_recipe_is_read_on_top_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is named relative to the recipe, not to the current folder."""
    written(tmp_path, "far.yaml", {"train": {"epochs": 3, "seed": 5}, "data": {"noise": {"seed": 3}}})
    written(tmp_path, "near/middle.yaml", {"base": "../far.yaml", "train": {"epochs": 4, "lr": 0.1}})
    own = {"base": "middle.yaml", "train": {"lr": 0.2}, "data": {"noise": {"ratio": 0.5}}}
    written(tmp_path, "near/own.yaml", own)
    written(tmp_path, "middle.yaml", {"train": {"seed": 99}})
    absolute = written(tmp_path, "near/absolute.yaml", {"base": str(tmp_path / "far.yaml")})
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(Path("near/own.yaml"), ["train.batch_size=9"])
    assert (recipe.train.seed, recipe.train.epochs, recipe.train.lr, recipe.train.batch_size) == (5, 4, 0.2, 9)
    assert (recipe.data.noise.seed, recipe.data.noise.ratio) == (3, 0.5)
    assert "base" not in yaml.safe_load(dump_yaml(recipe))
    assert read_recipe(absolute).train.epochs == 3
    assert_refused(lambda: read_recipe(absolute, ["base=other.yaml"]), "base")


@pytest.mark.parametrize("names", [["a.yaml"], ["a.yaml", "sub/../b.yaml", "c.yaml"]])
def test_a_circle_of_bases_is_refused(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, following in zip(names, [*names[1:], f"./{names[0]}"], strict=True):
        written(tmp_path, name, {"base": following})
    assert_refused(lambda: read_recipe(tmp_path / "a.yaml"), "circle", "—")


@pytest.mark.parametrize("base", [None, "", 3, ["a.yaml"], {"train": {}}, "none.yaml", "broken.yaml"])
def test_a_base_that_cannot_be_read_is_reported_with_the_recipe(base: Any, tmp_path: Path) -> None:
    written(tmp_path, "broken.yaml", "a: [")
    path = written(tmp_path, "own.yaml", {"base": base})
    assert_refused(lambda: read_recipe(path), "own.yaml", base if isinstance(base, str) else "base")
