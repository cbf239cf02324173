from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vacsr.config.io import merge, method_config, parse_overrides
from vacsr.errors import UsageError
from vacsr.methods import Embedding, build_method
from vacsr.methods.base import split_by_decay
from vacsr.methods.pcmepp import closed_form_distance
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig

from .cases import gaussians

with torch.device("meta"):
    PAPER = Vacsr(VacsrConfig(), dim=1024)
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


@pytest.mark.parametrize("method", ["infonce", {"name": "vacsr", "objective": {"contrastive_direction": "both"}}])
def test_a_loss_across_rows_is_taken_whole(method: Any) -> None:
    method = build_method(method_config(method), dim=8)
    assert method.strip_rows("auto", rows=8192, columns=8192) == 8192
    assert method.strip_rows(0, rows=8192, columns=8192) == 8192
    with pytest.raises(UsageError, match=r"train.tile=64: .* — set train.tile=0 or auto"):
        method.strip_rows(64, rows=128, columns=128)


def test_the_height_of_a_strip() -> None:
    method, paper, sigmoid = Vacsr(VacsrConfig(), dim=8), PAPER, Sigmoid(SigmoidConfig(), dim=8)
    assert method.strip_rows(0, rows=100, columns=100) == 100
    assert method.strip_rows(64, rows=100, columns=100) == 50, "equal strips compile once"
    assert method.strip_rows(200, rows=50, columns=100) == 50
    assert paper.strip_rows("auto", rows=128, columns=128) == 128
    assert paper.strip_rows("auto", rows=4096, columns=4096) == 16
    assert paper.strip_rows("auto", rows=512, columns=4096) == 16, "a rank's rows"
    assert paper.strip_rows("auto", rows=100_000, columns=100_000) == 1
    assert sigmoid.strip_rows("auto", rows=4096, columns=4096) == 4096
    assert sigmoid.strip_rows("auto", rows=16384, columns=16384) == 4096
    assert method.strip_rows(64, rows=0, columns=0) == 0


def test_strips_of_a_graph_are_smaller() -> None:
    paper, small = PAPER, Vacsr(VacsrConfig(), dim=256)
    height = partial(Vacsr.strip_rows, tile="auto", graphed=True)
    assert height(paper, rows=128, columns=128) == 32
    assert height(paper, rows=128, columns=128, itemsize=2) == 64
    assert height(small, rows=128, columns=128) == 128, "what is small stays whole"
    assert height(paper, rows=1024, columns=1024) == 16
    assert height(paper, rows=4096, columns=4096) == 16, "nor may there be too many"


@settings(deadline=None)
@given(rows=st.integers(1, 3000), columns=st.integers(800, 100_000))
def test_strips_are_equal_where_that_leaves_them_large(rows: int, columns: int) -> None:
    pairs = (9 << 23) // 2048
    most = max(pairs // columns, min(16, 2 * pairs // columns), 1)
    height = PAPER.strip_rows("auto", rows=rows, columns=columns)
    assert 1 <= height <= min(rows, most)
    assert (height == rows) == (rows <= most)
    assert rows % height == 0 or 2 * height >= most
    assert 3 * height >= min(rows, most)
