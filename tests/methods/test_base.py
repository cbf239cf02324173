from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vacsr.methods import Embedding, build_method
from vacsr.methods.base import split_by_decay, take
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.methods.vacsr import VacsrConfig


def test_take_rows() -> None:
    mean, log_var = torch.arange(6.0).view(3, 2), -torch.arange(6.0).view(3, 2)
    assert torch.equal(take(Embedding(mean), slice(1, 3)).mean, mean[1:])
    assert take(Embedding(mean), slice(1, 3)).log_var is None
    both = take(Embedding(mean, log_var), torch.tensor([2, 0, 2]))
    assert torch.equal(both.mean, mean[[2, 0, 2]])
    assert both.log_var is not None
    assert torch.equal(both.log_var, log_var[[2, 0, 2]])


def test_only_matrices_decay() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    module.scalar = nn.Parameter(torch.tensor(1.0))
    module.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    groups = split_by_decay("x", module.named_parameters(), lr_scale=0.5)
    assert [(g.name, g.lr_scale, g.decay, len(g.params)) for g in groups] == [
        ("x", 0.5, True, 1),
        ("x-plain", 0.5, False, 4),
    ]
    assert groups[0].params[0] is module[0].weight
    assert split_by_decay("x", []) == []


@pytest.mark.parametrize("config", [VacsrConfig(), SigmoidConfig(), InfoNCEConfig()])
def test_grades_lie_between_zero_and_one_and_keep_the_order(
    config: VacsrConfig | SigmoidConfig | InfoNCEConfig,
) -> None:
    score: Tensor = torch.linspace(-0.99, 0.99, 50)
    with torch.no_grad():
        grade = build_method(config, dim=4).grade(score)
    assert ((grade > 0) & (grade < 1)).all()
    assert (grade.diff() > 0).all()
