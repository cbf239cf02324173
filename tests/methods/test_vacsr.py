from __future__ import annotations

from typing import Any

import pytest
import torch

from vacsr.config.io import method_config
from vacsr.methods import Embedding, Vacsr
from vacsr.methods.vacsr import VacsrConfig
from vacsr.noise import seeded
from vacsr.objective import VacsrObjective

from .cases import block, unit


def build(**fields: Any) -> Vacsr:
    config = method_config({"name": "vacsr", **fields})
    assert isinstance(config, VacsrConfig)
    with seeded(0):
        return Vacsr(config, dim=6)


def test_the_loss_is_the_objectives() -> None:
    method, v, t, pairs = build(objective={"kl_weight": 0.1}), unit(1, 4, 6), unit(2, 4, 6), block([0, 1, 1, 2])
    expected = VacsrObjective(method.config.objective)(method.adapter, v, t, block=pairs)
    terms = method.loss(Embedding(v), Embedding(t), pairs)
    assert torch.equal(terms.total, expected.total)
    assert set(terms.parts) == {"recon", "kl", "sigma_pos", "sigma_neg", "cosine"}


@torch.no_grad()
def test_scores_and_uncertainties_pair_by_pair() -> None:
    method, v, t = build(), unit(1, 3, 6), unit(2, 5, 6)
    score = method.score(Embedding(v), Embedding(t))
    assert score.shape == (3, 5)
    for i in range(3):
        for j in range(5):
            torch.testing.assert_close(score[i, j], method.adapter.logit(v[i], t[j]))
    uncertainty = method.uncertainty(Embedding(v), Embedding(t[:3]))
    assert uncertainty is not None
    torch.testing.assert_close(uncertainty, torch.stack([method.adapter.uncertainty(v[i], t[i]) for i in range(3)]))
    torch.testing.assert_close(method.grade(score), torch.sigmoid(score))
    assert torch.equal(method.score(Embedding(v), Embedding(t)), score), "scoring draws nothing"


@pytest.mark.parametrize(("direction", "pairwise"), [("rows", True), ("both", False)])
def test_only_row_wise_negatives_allow_row_blocks(direction: str, pairwise: bool) -> None:
    assert build(objective={"negative_direction": direction}).pairwise is pairwise


@pytest.mark.parametrize(
    "fields",
    [{}, {"adapter": {"mixing": "head", "trunk_norm": True, "input_scale": "layernorm"}},
     {"adapter": {"residual_learnable": False}}, {"lr_scale": 0.25}],
)  # fmt: skip
def test_groups_cover_every_trainable_parameter_once(fields: dict[str, Any]) -> None:
    method = build(**fields)
    groups = method.param_groups()
    listed = [id(p) for group in groups for p in group.params]
    assert sorted(listed) == sorted(id(p) for p in method.parameters() if p.requires_grad)
    assert {group.lr_scale for group in groups} == {fields.get("lr_scale", 1.0)}
    assert all((p.ndim >= 2) == group.decay for group in groups for p in group.params)


@pytest.mark.parametrize(("fields", "folds"), [({}, True), ({"adapter": {"input_scale": "layernorm"}}, False)])
def test_it_folds_where_the_adapter_does(fields: dict[str, Any], folds: bool) -> None:
    assert (build(**fields).fold() is not None) is folds
