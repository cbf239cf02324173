from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from vacsr.config.io import method_config
from vacsr.methods import Embedding, Vacsr
from vacsr.methods.vacsr import VacsrConfig
from vacsr.objective import VacsrObjective
from vacsr.pairwise import batch_block


def build(**fields: Any) -> Vacsr:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = method_config({"name": "vacsr", **fields})
        assert isinstance(config, VacsrConfig)
        return Vacsr(config, dim=6)


def case(rows: int, cols: int) -> tuple[Embedding, Embedding]:
    generator = torch.Generator().manual_seed(0)
    v, t = (functional.normalize(torch.randn(n, 6, generator=generator), dim=-1) for n in (rows, cols))
    return Embedding(v), Embedding(t)


def test_the_loss_is_the_objectives() -> None:
    method, (v, t) = build(objective={"kl_weight": 0.1}), case(4, 4)
    block = batch_block(torch.tensor([0, 1, 1, 2]), seed=3, step=1)
    expected = VacsrObjective(method.config.objective)(method.adapter, v.mean, t.mean, block=block)
    got = method.loss(v, t, block)
    assert torch.equal(got.total, expected.total)
    assert set(got.parts) == {"recon", "kl", "sigma_pos", "sigma_neg", "cosine"}


@torch.no_grad()
def test_scores_and_uncertainties_pair_by_pair() -> None:
    method, (v, t) = build(), case(3, 5)
    score = method.score(v, t)
    assert score.shape == (3, 5)
    for i in range(3):
        for j in range(5):
            torch.testing.assert_close(score[i, j], method.adapter.logit(v.mean[i], t.mean[j]))
    uncertainty = method.uncertainty(v, Embedding(t.mean[:3]))
    assert uncertainty is not None
    assert uncertainty.shape == (3,)
    torch.testing.assert_close(uncertainty[1], method.adapter.uncertainty(v.mean[1], t.mean[1]))
    torch.testing.assert_close(method.grade(score), torch.sigmoid(score))


def test_scoring_draws_nothing() -> None:
    method, (v, t) = build(), case(3, 5)
    torch.manual_seed(0)
    first = method.score(v, t)
    torch.manual_seed(1)
    assert torch.equal(method.score(v, t), first)


@pytest.mark.parametrize(("direction", "pairwise"), [("rows", True), ("both", False)])
def test_only_row_wise_negatives_allow_row_blocks(direction: str, pairwise: bool) -> None:
    assert build(objective={"negative_direction": direction}).pairwise is pairwise


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapter": {"residual": "none"}},
        {"adapter": {"mixing": "head", "trunk_norm": True, "input_scale": "layernorm"}},
        {"adapter": {"residual_learnable": False}},
        {"lr_scale": 0.25},
    ],
)
def test_groups_cover_every_trainable_parameter_once(fields: dict[str, Any]) -> None:
    method = build(**fields)
    groups = method.param_groups()
    listed = [id(p) for group in groups for p in group.params]
    assert sorted(listed) == sorted(id(p) for p in method.parameters() if p.requires_grad)
    assert {group.lr_scale for group in groups} == {fields.get("lr_scale", 1.0)}
    for group in groups:
        assert all((p.ndim >= 2) == group.decay for p in group.params)
    plain = {id(p) for group in groups if not group.decay for p in group.params}
    if method.adapter.mixing_logits is not None:
        assert id(method.adapter.mixing_logits) in plain
