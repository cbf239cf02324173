from typing import Any

import pytest
import torch

from vacsr.config.io import method_config
from vacsr.methods import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
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
    method = build(objective={"negative_direction": direction}, lr_scale=0.25)
    assert method.pairwise is pairwise
    assert {group.lr_scale for group in method.param_groups()} == {0.25}


@pytest.mark.parametrize(("fields", "folds"), [({}, True), ({"adapter": {"input_scale": "layernorm"}}, False)])
def test_it_folds_where_the_adapter_does(fields: dict[str, Any], folds: bool) -> None:
    assert (build(**fields).fold() is not None) is folds
