"""What a recipe's steps cost: parameters, times and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vacsr.bench.training import count_parameters, inference_step, measure_recipe, step_cost
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config, recipe_from
from vacsr.data import load_pairs
from vacsr.model import MatchingModel
from vacsr.train.retrieval import RetrievalTask


def recipe(method: str, **train: Any) -> Any:
    return recipe_from(
        {
            "data": {"pairs": "synthetic:images=20"},
            "backbone": {"head": {"dim": 8}},
            "method": {"name": method},
            "train": {"batch_size": 16, "device": "cpu", **train},
        }
    )


def test_a_methods_own_parameters() -> None:
    """The adapter's, by the paper's count at d=1024; two scalars of the sigmoid; PCME++'s variance heads."""
    pairs = load_pairs("synthetic:images=20", split="train")
    config = BackboneConfig(head=HeadConfig(kind="linear", dim=1024))
    shape = {"image_dim": pairs.images.shape[1], "text_dim": pairs.texts.shape[1]}

    def counted(name: str) -> tuple[int, int]:
        return count_parameters(MatchingModel.build(method_config(name), config, **shape))

    heads = (shape["image_dim"] + shape["text_dim"] + 2) * 1024
    assert counted("vacsr-paper") == (heads + 5_264_419, 5_264_419)
    assert counted("sigmoid") == (heads + 2, 2)
    total, own = counted("pcmepp")
    assert total == heads + own
    assert own >= heads, "a second pair of heads at least"


@pytest.mark.parametrize("method", ["sigmoid", "vacsr", "pcmepp"])
def test_features_are_measured(method: str) -> None:
    costs = measure_recipe(recipe(method), steps=2)
    assert costs["steps"] == 2
    assert min(costs["training"]["ms"], costs["inference"]["ms"]) > 0
    assert costs["inference"]["images_per_s"] == pytest.approx(16e3 / costs["inference"]["ms"])
    assert "torch" in costs["where"]


def test_every_step_is_run_and_timed() -> None:
    """Warm-up and the steps that count; the mean is over the latter."""
    calls: list[int] = []
    cost: Any = step_cost(lambda: calls.append(0), batch=4, device=torch.device("cpu"), steps=5)
    assert len(calls) == 7
    assert cost["images_per_s"] == pytest.approx(4e3 / cost["ms"])
    assert cost["peak_gib"] is None, "known on a GPU only"


def test_inference_embeds_and_scores_all_pairs_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = recipe("pcmepp")
    pairs = load_pairs(settings.data.pairs, split="train")
    task = RetrievalTask(settings.method, pairs, settings.train, backbone=settings.backbone, reading=settings.data)
    seen = []

    def block(_: Any, v: Any, t: Any) -> None:
        seen.append((v.mean.shape, t.mean.shape, v.log_var is not None, v.mean.requires_grad))

    monkeypatch.setattr("vacsr.bench.training.BlockScorer.block", block)
    inference_step(task)()
    assert seen == [((16, 8), (16, 8), True, False)]
