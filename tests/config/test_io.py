from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vacsr import config as config_module
from vacsr.adapter import AdapterConfig
from vacsr.config import Config, Recipe, TrainConfig
from vacsr.config.base import METHODS, method_entry
from vacsr.config.io import (
    dump_yaml,
    layered_recipe,
    merge,
    method_config,
    parse,
    parse_overrides,
    read_recipe,
    read_yaml,
    recipe_from,
)
from vacsr.errors import ConfigError
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.methods.vacsr import VacsrConfig
from vacsr.objective import ObjectiveConfig

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
trees = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), st.one_of(inner, st.integers(0, 9)), max_size=3),
    max_leaves=8,
)


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in tree.items():
        found.update(leaves(value, (*path, key)) if isinstance(value, dict) and value else {(*path, key): value})
    return found


def assert_refused(call: Any, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ------------------------------------------------------------------------------------------------------ presets


def test_every_preset_of_every_method_resolves() -> None:
    assert method_entry("vacsr").presets["paper"]
    for name, entry in METHODS["retrieval"].items():
        presets = entry.presets
        assert {"default", "paper"} <= set(presets)
        for preset in presets:
            assert method_config(f"{name}-{preset}").name == name
            assert method_config({"name": name, "preset": preset}) == method_config(f"{name}-{preset}")
        assert method_config(name) == method_config(f"{name}-default")


def test_the_papers_presets() -> None:
    ours, paper = method_config("vacsr"), method_config("vacsr-paper")
    assert isinstance(ours, VacsrConfig)
    assert isinstance(paper, VacsrConfig)
    assert ours == VacsrConfig()
    assert ours.adapter.residual == "cosine"
    assert paper.adapter.residual == "none"
    assert paper.adapter.components == 2
    objective = paper.objective
    assert (objective.kl_weight, objective.sigma_weight, objective.negative_weight) == (5e-4, 1.0, 1.0)
    assert (objective.reconstruction, objective.negative_target, objective.hard_negatives) == ("ste", 1, 1)
    assert method_config("infonce-paper") == InfoNCEConfig(scale=1.0)
    assert method_config("sigmoid-paper") == SigmoidConfig(scale=10.0, bias=-10.0)


def test_explicit_fields_win_over_the_preset() -> None:
    config = method_config({"name": "vacsr-paper", "adapter": {"residual": "cosine"}, "objective": {"kl_weight": 0.1}})
    assert isinstance(config, VacsrConfig)
    assert config.adapter.residual == "cosine"
    assert config.objective.kl_weight == 0.1
    beside = method_config({"name": "vacsr", "preset": "paper", "adapter": {"components": 3}})
    assert isinstance(beside, VacsrConfig)
    assert (beside.adapter.components, beside.adapter.residual) == (3, "none")


def test_resolving_leaves_the_presets_as_they_were() -> None:
    before = str(METHODS)
    method_config({"name": "vacsr-paper", "adapter": {"components": 4}})
    assert str(METHODS) == before


def test_a_config_passes_through() -> None:
    config = SigmoidConfig(scale=2.0)
    assert method_config(config) is config


# ------------------------------------------------------------------------------------------------------ refusals


def test_unknown_methods_and_presets() -> None:
    assert_refused(lambda: method_config("vascr"), "vascr", "did you mean 'vacsr'?", "infonce")
    assert_refused(lambda: method_config("vacsr-papr"), "papr", "default, paper")
    assert_refused(lambda: method_config({"name": "sigmoid", "preset": "huge"}), "huge")
    assert_refused(lambda: recipe_from({"method": {"name": "clip"}}), "unknown method 'clip'")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"method": {"name": "vacsr", "margin": 0.2}}, "method.margin: unknown field"),  # vse has it
        ({"method": {"name": "vse", "margn": 0.2}}, "method.margn: unknown field (did you mean 'margin'?)"),
        ({"method": {"adapter": {"component": 1}}}, "adapter.component: unknown field (did you mean 'components'?)"),
        ({"epochs": 3}, "epochs: unknown field"),
        ({"trian": {}}, "trian: unknown field (did you mean 'train'?)"),
        ({"train": {"protocols": []}}, "train.protocols: unknown field"),  # evaluate has it
    ],
)
def test_a_hint_is_a_field_that_would_fit_there(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_from(raw)
    assert str(caught.value).endswith(said)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"train": {"epochs": 0}}, "train.epochs:"),
        ({"train": {"lr": "fast"}}, "train.lr:"),
        ({"train": {"lr": 0}}, "train.lr:"),
        ({"backbone": {"head": {"dropout": 1.0}}}, "backbone.head.dropout:"),
        ({"backbone": {"image_scaling": "zscore"}}, "backbone.image_scaling:"),
        ({"data": {"noise": {"ratio": 1.5}}}, "data.noise.ratio:"),
        ({"train": 3}, "train:"),
        ({"data": None}, "data:"),
    ],
)
def test_a_bad_field_is_named_by_its_dotted_path(raw: dict[str, Any], field: str) -> None:
    assert_refused(lambda: recipe_from(raw), field)


@pytest.mark.parametrize(
    "override",
    ["objective.kl_weight=-1", "objective.correction=1.5", "objective.kl_weight=.nan",
     "adapter.components=0", "adapter.components=2.5", "adapter.input_scale=D", "scale=3"],
)  # fmt: skip
def test_a_bad_field_of_a_method(override: str) -> None:
    assert_refused(lambda: recipe_from({}, [f"method.{override}"]), f"method.{override.partition('=')[0]}:")


def test_a_method_that_is_no_mapping_is_read_or_refused() -> None:
    assert recipe_from({"method": "sigmoid"}) == recipe_from({}, ["method=sigmoid"])
    assert recipe_from({"method": None}).method.name == "vacsr"
    assert_refused(lambda: recipe_from({"method": ["vacsr"]}), "method")


def test_every_problem_is_listed() -> None:
    assert_refused(
        lambda: recipe_from({"train": {"epochs": 0, "lr": -1}, "extra": 1}), "train.epochs", "train.lr", "extra"
    )


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError):
        TrainConfig().epochs = 3  # type: ignore[misc]


# ----------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2.5e-4", -2.5e-4),
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("adamw", "adamw"),
        ("cosine", "cosine"),
        ("[jsonl, csv]", ["jsonl", "csv"]),
        ("[0.9, 0.99]", [0.9, 0.99]),
        ("", ""),
        ("features:a.safetensors,captions=b.json", "features:a.safetensors,captions=b.json"),
        ("'12'", "12"),
        ("tiny:", "tiny:"),
        ("features:", "features:"),
        ("clip:vit-b32", "clip:vit-b32"),
        ("{epochs: 3}", {"epochs": 3}),
    ],
)
def test_override_values(text: str, value: Any) -> None:
    got = parse_overrides([f"a.b={text}"])["a"]["b"]
    assert got == value
    assert type(got) is type(value)


def test_overrides_merge_and_the_last_wins() -> None:
    got = parse_overrides(["train.lr=1", "train.epochs=2", "train.lr=3", " method.name =sigmoid"])
    assert got == {"train": {"lr": 3, "epochs": 2}, "method": {"name": "sigmoid"}}
    assert parse_overrides([]) == {}


@pytest.mark.parametrize("item", ["train.lr", "=3", " =3", "train.lr=[1", "a={b"])
def test_a_broken_override(item: str) -> None:
    assert_refused(lambda: parse_overrides([item]))


def test_overrides_reach_the_recipe() -> None:
    recipe = recipe_from(
        {"train": {"lr": 1, "epochs": 5}},
        [
            "train.lr=1e-3",
            "train.trackers=[jsonl, csv]",
            "method.adapter.residual_learnable=false",
            "train.betas=[0,0.5]",
        ],
    )
    assert (recipe.train.lr, recipe.train.epochs) == (0.001, 5)
    assert recipe.train.trackers == ("jsonl", "csv")
    assert recipe.train.betas == (0.0, 0.5)
    assert isinstance(recipe.method, VacsrConfig)
    assert recipe.method.adapter.residual_learnable is False


def test_another_method_starts_afresh() -> None:
    base = {"method": {"name": "vacsr", "adapter": {"components": 3}}}
    assert recipe_from(base, ["method.name=sigmoid"]).method == SigmoidConfig()
    assert recipe_from(base, ["method.name=infonce-paper"]).method == InfoNCEConfig(scale=1.0)
    same = recipe_from(base, ["method.name=vacsr", "method.lr_scale=2"]).method
    assert isinstance(same, VacsrConfig)
    assert (same.adapter.components, same.lr_scale) == (3, 2.0)
    assert base == {"method": {"name": "vacsr", "adapter": {"components": 3}}}


def test_an_empty_recipe_is_the_default() -> None:
    assert recipe_from(None) == recipe_from({}) == Recipe()


# --------------------------------------------------------------------------------------------------- merge ---------


@PROPERTY
@given(trees, trees)
def test_merge_keeps_both_and_prefers_the_change(base: dict[str, Any], changes: dict[str, Any]) -> None:
    merged = merge(base, changes)
    found = leaves(merged)
    for path, value in leaves(changes).items():
        if value != {}:
            assert found[path] == value
    assert merge(merged, changes) == merged
    assert merge(base, {}) == base
    assert merge({}, changes) == changes


# -------------------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    ("raw", "overrides"),
    [
        (None, []),
        ({"method": {"name": "vacsr-paper"}}, ["method.objective.kl_weight=5e-5", "train.lr=1e-7"]),
        ({"method": {"name": "infonce"}}, ["train.trackers=[]", "data.pairs=features:a b.st,captions=é.json"]),
        ({"method": {"name": "sigmoid"}}, ["evaluate.splits=[test]", "train.seed=4"]),
    ],
)
def test_a_resolved_recipe_survives_yaml(raw: dict[str, Any] | None, overrides: list[str], tmp_path: Path) -> None:
    recipe = recipe_from(raw, overrides)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(recipe), encoding="utf-8")
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


REPEATED = """\
data:
  pairs: "synthetic:"
train: {epochs: 3}
evaluate:
  protocols: [flickr]
"train": {lr: 0.1}
"""


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        (REPEATED, "'train'", "lines 3 and 6"),
        ("train:\n  lr: 1\n  epochs: 2\n  lr: 1\n", "'lr'", "lines 2 and 4"),
        ("train: {lr: 1, lr: 2}", "'lr'", "line 1"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n  d: 2\n  d: 3\n", "'d'", "lines 4 and 5"),
    ],
)
def test_a_duplicate_key_is_refused(text: str, key: str, lines: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    assert_refused(lambda: read_yaml(path), str(path), f"duplicate key {key}", lines)
    own = written(tmp_path, "own.yaml", {"base": "recipe.yaml"})
    assert_refused(lambda: read_recipe(own), "own.yaml", str(path), key)


MERGED = """\
shared: &shared {a: 1, b: 2}
more: &more
  <<: *shared
  b: 3
last:
  <<: [*more, *shared]
  c: *shared
again: {<<: *more, a: 4}
"""


def test_merge_keys_still_bring_in_others(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(MERGED, encoding="utf-8")
    shared = {"a": 1, "b": 2}
    more = {"a": 1, "b": 3}
    last = {**more, "c": shared}
    assert read_yaml(path) == {"shared": shared, "more": more, "last": last, "again": {"a": 4, "b": 3}}
    assert read_yaml(path) == yaml.safe_load(MERGED)


@pytest.mark.parametrize("text", ["{lr: 1, lr: 2}", "[e", "2024-13-01"])
def test_a_value_that_is_no_yaml(text: str) -> None:
    assert_refused(lambda: parse_overrides([f"train={text}"]), f"cannot read the value '{text}'")


def test_a_missing_file_or_a_folder_instead_of_yaml(tmp_path: Path) -> None:
    assert_refused(lambda: read_yaml(tmp_path / "none.yaml"), "no such file", "none.yaml")
    assert_refused(lambda: read_yaml(tmp_path), tmp_path.name)


def test_parse_names_the_field() -> None:
    assert_refused(lambda: parse(TrainConfig, {"batch_size": 1}), "  batch_size:")
    assert_refused(lambda: parse(TrainConfig, {"batch_size": 1}, within="train"), "  train.batch_size:")


def test_every_field_gives_its_reason() -> None:
    kinds = [kind for kind in vars(config_module).values() if isinstance(kind, type) and issubclass(kind, Config)]
    kinds += [entry.config for entry in METHODS["retrieval"].values()] + [AdapterConfig, ObjectiveConfig]
    silent = [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, field in kind.model_fields.items()
        if name != "name" and not (field.description or "").strip()  # MethodConfig documents `name`
    ]
    assert len(kinds) > 20
    assert silent == []


# ------------------------------------------------------------------------------------------------- layers of a method


def test_a_named_preset_survives_a_changed_field() -> None:
    recipe = recipe_from({"method": "vacsr-paper"}, ["method.objective.kl_weight=0"])
    paper = method_config("vacsr-paper")
    assert isinstance(recipe.method, VacsrConfig)
    assert isinstance(paper, VacsrConfig)
    assert recipe.method.adapter == paper.adapter
    assert recipe.method.objective == paper.objective.model_copy(update={"kl_weight": 0.0})
    other = recipe_from({"method": "infonce"}, ["method.learnable=false"]).method
    assert other == InfoNCEConfig(learnable=False)


def test_a_preset_asked_for_later_starts_afresh() -> None:
    resolved = yaml.safe_load(dump_yaml(recipe_from({"method": {"name": "vacsr", "lr_scale": 0.5}})))
    assert recipe_from(resolved, ["method.preset=paper"]).method == method_config("vacsr-paper")
    assert recipe_from(resolved, ["method=vacsr-paper"]).method == method_config("vacsr-paper")
    assert recipe_from(resolved, ["method=sigmoid"]).method == SigmoidConfig()


@pytest.mark.parametrize("override", ["train.lr=.inf", "train.lr=.nan", "train.betas=[1.5, 0.9]"])
def test_numbers_no_optimiser_takes_are_refused(override: str) -> None:
    assert_refused(lambda: recipe_from({}, [override]), override.partition("=")[0])


# ------------------------------------------------------------------------------------------- a recipe on another one


def written(folder: Path, name: str, fields: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def test_a_recipe_stands_on_its_base(tmp_path: Path) -> None:
    written(tmp_path, "base.yaml", {"train": {"epochs": 7, "lr": 0.1}, "data": {"noise": {"seed": 3}}})
    path = written(tmp_path, "own.yaml", {"base": "base.yaml", "train": {"lr": 0.2}, "data": {"noise": {"ratio": 0.5}}})
    recipe = read_recipe(path, ["train.epochs=9"])
    assert (recipe.train.epochs, recipe.train.lr) == (9, 0.2)
    assert (recipe.data.noise.seed, recipe.data.noise.ratio) == (3, 0.5)
    assert "base" not in yaml.safe_load(dump_yaml(recipe))


def test_a_base_lies_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "far.yaml", {"train": {"epochs": 3, "seed": 5}})
    written(tmp_path, "near/middle.yaml", {"base": "../far.yaml", "train": {"epochs": 4, "lr": 0.1}})
    written(tmp_path, "near/own.yaml", {"base": "middle.yaml", "train": {"lr": 0.2}})
    written(tmp_path, "middle.yaml", {"train": {"seed": 99}})  # must not be taken for the one beside the recipe
    monkeypatch.chdir(tmp_path)
    train = read_recipe(Path("near/own.yaml")).train
    assert (train.seed, train.epochs, train.lr) == (5, 4, 0.2)
    absolute = written(tmp_path, "near/absolute.yaml", {"base": str(tmp_path / "far.yaml")})
    assert read_recipe(absolute).train.epochs == 3


@pytest.mark.parametrize(
    ("below", "above"),
    [
        ("vacsr-paper", {"objective": {"kl_weight": 0.0}}),
        ({"name": "vacsr", "adapter": {"components": 3}}, {"preset": "paper"}),
        ({"name": "vacsr", "adapter": {"components": 3}}, "sigmoid"),
        ({"name": "vacsr", "lr_scale": 0.5}, {"name": "vacsr", "adapter": {"components": 3}}),
        ("infonce", {"scale": 2.0}),
    ],
)
def test_methods_layer_as_overrides_do(below: Any, above: Any, tmp_path: Path) -> None:
    written(tmp_path, "base.yaml", {"method": below})
    path = written(tmp_path, "own.yaml", {"base": "base.yaml", "method": above})
    assert read_recipe(path).method == layered_recipe({"method": below}, {"method": above}).method


@pytest.mark.parametrize("names", [["a.yaml"], ["a.yaml", "b.yaml"], ["a.yaml", "sub/../b.yaml", "c.yaml"]])
def test_a_circle_of_bases_is_refused(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, following in zip(names, [*names[1:], f"./{names[0]}"], strict=True):
        written(tmp_path, name, {"base": following})
    assert_refused(lambda: read_recipe(tmp_path / "a.yaml"), "circle", *(Path(name).name for name in names), "—")


def test_a_base_that_cannot_be_read_is_told_with_who_asked(tmp_path: Path) -> None:
    path = written(tmp_path, "own.yaml", {"base": "none.yaml"})
    assert_refused(lambda: read_recipe(path), "own.yaml", "none.yaml")
    (tmp_path / "none.yaml").write_text("a: [")
    assert_refused(lambda: read_recipe(path), "own.yaml", "none.yaml")


@pytest.mark.parametrize("base", [None, "", 3, ["a.yaml"], {"train": {}}])
def test_a_base_that_is_no_path(base: Any, tmp_path: Path) -> None:
    path = written(tmp_path, "own.yaml", {"base": base})
    assert_refused(lambda: read_recipe(path), "own.yaml", "base")


def test_a_base_is_a_file_and_not_an_override(tmp_path: Path) -> None:
    path = written(tmp_path, "own.yaml", {"train": {"epochs": 3}})
    assert_refused(lambda: read_recipe(path, ["base=other.yaml"]), "base")
