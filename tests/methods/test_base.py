from __future__ import annotations

import pytest
import torch
from torch import nn

from vacsr.config.io import merge, method_config, parse_overrides
from vacsr.methods import Embedding, build_method
from vacsr.methods.base import split_by_decay
from vacsr.methods.pcmepp import closed_form_distance

from .cases import gaussians

NAMES = ("vacsr", "sigmoid", "infonce", "vse", "pcme", "pcmepp", "daa", "ncr", "bicro", "npc")


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


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_scores_grades_and_uncertainties(name: str) -> None:
    method = build_method(method_config(name), dim=6)
    v, t = (Embedding(x.mean.float(), x.log_var.float()) for x in (gaussians(1, 4, 6), gaussians(2, 4, 6)))
    score = method.score(v, t)
    if name not in ("vacsr", "pcme", "daa"):  # these have tests of their own
        torch.testing.assert_close(score, -closed_form_distance(v, t) if name == "pcmepp" else v.mean @ t.mean.T)
    grade = method.grade(torch.linspace(-0.99, 0.99, 50))
    if name == "pcmepp":
        torch.testing.assert_close(grade, torch.sigmoid(5.0 + 5.0 * torch.linspace(-0.99, 0.99, 50)))
    if name in ("infonce", "vse", "ncr", "bicro", "npc"):
        assert grade is None, "it only ranks"
    else:
        assert ((grade > 0) & (grade < 1)).all()
        assert (grade.diff() > 0).all()
    uncertainty = method.uncertainty(v, t)
    if name in ("pcme", "pcmepp", "daa"):
        torch.testing.assert_close(uncertainty, v.log_var.exp().sum(1) + t.log_var.exp().sum(1))
    else:
        assert (uncertainty is None) == (name != "vacsr")


@pytest.mark.parametrize(("name", "parameter"), [
    ("infonce", "log_scale"), ("npc", "log_scale"), ("sigmoid", "affine"), ("pcme", "affine"), ("pcmepp", "affine"),
])  # fmt: skip
def test_scales_learn_without_decay_or_not_at_all(name: str, parameter: str) -> None:
    method = build_method(method_config(name), dim=8)
    (group,) = method.param_groups()
    assert group.params == [getattr(method, parameter)]
    assert not group.decay
    assert build_method(method_config({"name": name, "learnable": False}), dim=8).param_groups() == []


def test_which_losses_are_sums_over_rows_and_which_need_more_than_means() -> None:
    methods = {name: build_method(method_config(name), dim=8) for name in NAMES}
    assert [name for name, method in methods.items() if method.pairwise] == ["vacsr", "sigmoid", "pcme"]
    assert [name for name, method in methods.items() if method.networks == 2] == ["ncr", "bicro"]
    norms = {name: method.variance_norm for name, method in methods.items() if method.log_var_start is not None}
    assert norms == {"pcme": 0.01, "pcmepp": None, "daa": 0.01}
    assert [name for name, method in methods.items() if method.mix is not None] == ["pcmepp"]
    assert (methods["pcme"].pair_width, methods["sigmoid"].pair_width) == (64, 1)


PAPERS = {
    "vacsr": "adapter.residual=none adapter.components=2 objective.kl_weight=5e-4 objective.sigma_weight=1.0 "
    "objective.negative_weight=1.0 objective.cosine_weight=0.0 objective.correction=0.0 objective.reconstruction=ste "
    "objective.negative_target=1 objective.hard_negatives=1",
    "infonce": "scale=1.0",
    "sigmoid": "scale=10.0 bias=-10.0",
    "vse": "margin=0.2 warmup_epochs=2",
    "pcme": "samples=8 scale=5.0 shift=5.0 vib_weight=1e-3",
    "pcmepp": "scale=5.0 shift=5.0 vib_weight=1e-4 pseudo_weight=0.1 smoothing=1e-4 reduction=mean "
    "mix.share=0.25 mix.alpha=2 mix.cutmix=0.5",
    "daa": "weight=1000.0 temperature=0.01 base.samples=5 base.scale=15.0 base.shift=15.0 base.vib_weight=1e-5 "
    "base.vib_reduction=sum",
    "ncr": "margin=0.2 warmup=0.35 noisy_from=0.5 threshold=0.5 base=10.0",
    "npc": "scale=100.0 refresh=false rescale=false look_ahead=0.02",
    "bicro": "warmup=0.35 warmup_keep=0.3 noisy_from=0.5 mixture=beta discard=false",
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_settings(name: str) -> None:
    fields = method_config(f"{name}-paper").model_dump()
    assert merge(fields, parse_overrides(PAPERS[name].split())) == fields
