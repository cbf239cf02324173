"""Recipes that can never finish: refused from the recipe alone, and what can finish is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.config.io import read_recipe, read_yaml, recipe_from
from vacsr.errors import UsageError
from vacsr.fewshot import check_fewshot, read_fewshot
from vacsr.train.run import check_recipe

ROOT = Path(__file__).resolve().parents[2]
TINY = {"spec": "tiny:", "text_output": "norm"}
SCENES = {"pairs": "scenes:"}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_can_finish(path: Path) -> None:
    if read_yaml(path).get("task") == "fewshot" or "base2novel" in path.stem or "domain" in path.stem:
        check_fewshot(read_fewshot(path))
    else:
        check_recipe(read_recipe(path))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "laplace on gpo": (
        {"data": SCENES, "backbone": TINY, "method": "infonce", "evaluate": {"posthoc": "laplace"}},
        "train with backbone.pooling=mean or cls",
    ),
    "laplace on two networks": ({"method": "bicro", "evaluate": {"posthoc": "laplace"}}, "Bicro trains two"),
    "no cosine": ({"method": "pcmepp", "evaluate": {"posthoc": "cosine"}}, "Pcmepp does not score by a cosine"),
    "no strips": ({"method": "npc", "train": {"tile": 16}}, "set train.tile=0 or auto"),
    "no words": ({"data": {"pairs": "features:x.safetensors"}, "method": "daa"}, "compares the words of captions"),
    "photos for features": ({"data": SCENES, "method": "infonce"}, "takes cached embeddings, scenes: are photos"),
    "features for towers": ({"backbone": TINY, "method": "infonce"}, "reads photos, synthetic: are cached features"),
    "no captions": ({"data": {"pairs": "photos:x"}, "backbone": TINY}, "photos without captions"),
    "no such data": ({"data": {"pairs": "coko:x"}}, "unknown scheme 'coko'"),
    "no such towers": ({"data": SCENES, "backbone": {"spec": "vit:x"}}, "unknown backbone 'vit:x'"),
    "one tower": ({"data": SCENES, "backbone": {"spec": "towers:a"}}, "does not name two towers"),
    "no name": ({"data": SCENES, "backbone": {"spec": "clip:"}}, "clip: names no checkpoint"),
    "odd towers": ({"data": SCENES, "backbone": {"spec": "tiny:width=13"}}, "tiny: width 13 must be"),
    "no projection in tiny": ({"data": SCENES, "backbone": {**TINY, "text_output": "projected"}}, "tiny: has no proj"),
    "no projection": (
        {"data": SCENES, "backbone": {"spec": "towers:a,b", "image_output": "projected"}},
        "set image_output to norm or hidden",
    ),
    "protocol": ({"evaluate": {"protocols": ["recall"]}}, "unknown protocol 'recall'"),
    "not coco": (
        {"data": SCENES, "backbone": TINY, "evaluate": {"protocols": ["flickr", "cxc"]}},
        "protocol 'cxc' is about COCO's test images",
    ),
    "device": ({"train": {"device": "gpu"}}, "use auto, cpu or cuda"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_never_finish_is_refused(case: str) -> None:
    fields, message = REFUSED[case]
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=re.escape(message)):
        check_recipe(recipe_from({"method": "vacsr", **fields}))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "fields",
    [
        {"data": SCENES, "backbone": {**TINY, "pooling": "mean"}, "method": "vse", "evaluate": {"posthoc": "laplace"}},
        {"data": SCENES, "backbone": TINY, "method": "infonce", "evaluate": {"posthoc": "cosine"}},
        {"backbone": {"pooling": "gpo"}, "method": "sigmoid", "evaluate": {"posthoc": "laplace"}},  # no tokens
        {"method": "ncr", "evaluate": {"posthoc": "cosine"}},
        {"data": {"pairs": "features:x.npz,captions=y.json"}, "method": "daa"},
        {"data": {"pairs": "features:x.npz"}, "method": "npc"},
        {"data": {"pairs": "csv:x.csv"}, "backbone": TINY, "evaluate": {"protocols": ["coco-1k"]}},
        {"method": "vacsr", "train": {"tile": 16}},
        {"method": "npc", "train": {"accumulate": 2, "cuda_graph": True, "device": "cpu"}},
    ],
)  # fmt: skip
def test_what_may_finish_is_let_through(fields: dict[str, Any]) -> None:
    check_recipe(recipe_from({"method": "vacsr", **fields}))


def test_steps_that_are_only_timed_need_no_data_and_no_report() -> None:
    recipe = recipe_from({"backbone": TINY, "method": "vacsr", "evaluate": {"posthoc": "cosine"}})
    check_recipe(recipe, timed=True)
    with pytest.raises(UsageError):
        check_recipe(recipe)


def test_a_graph_and_accumulation_need_other_plans_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    recipe = recipe_from({"method": "infonce", "train": {"accumulate": 2, "cuda_graph": True}})
    with pytest.raises(UsageError, match="accumulate=1"):
        check_recipe(recipe)
