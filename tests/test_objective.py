from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig, VariationalAdapter
from vacsr.objective import ObjectiveConfig, PairBlock, VacsrObjective, batch_block, cosines, mean_over_rows

DIM, LATENT = 5, 3
IDS = torch.tensor([7, 8, 7, 9, 3])


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), x)[0]


def test_an_unchosen_infinity_does_not_spoil_the_mean_over_rows() -> None:
    values = torch.tensor([[1.0, torch.inf], [torch.nan, 3.0]], requires_grad=True)
    mean = mean_over_rows(values, torch.tensor([[True, False], [False, True]]), rows=2)
    assert mean.item() == 2.0
    assert gradient(mean, values).tolist() == [[0.5, 0.0], [0.0, 0.5]]


def make_adapter(*, seed: int = 0, **fields: Any) -> VariationalAdapter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapter = VariationalAdapter(DIM, AdapterConfig(latent=LATENT, decoder_hidden=4, **fields))
        with torch.no_grad():
            for p in adapter.parameters():
                p.add_(0.4 * torch.randn_like(p))
            if adapter.residual is not None:
                adapter.residual.copy_(torch.tensor([2.5, -0.5]))
    return adapter


def embeddings(seed: int = 0, count: int = len(IDS)) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, count, DIM, generator=torch.Generator().manual_seed(seed))
    v, t = functional.normalize(x, dim=-1)
    return v.requires_grad_(), t.requires_grad_()


class PlainPair:
    """One pair of the batch, every quantity of the paper as a float64 scalar or short vector with its own graph."""

    def __init__(self, w: dict[str, Tensor], v: Tensor, t: Tensor, gumbel: Tensor, normal: Tensor, cfg: Any) -> None:
        adapter, objective = cfg
        k = adapter.components
        hidden = torch.relu(w["trunk.weight"] @ (v * t * DIM) + w["trunk.bias"])
        means = (w["mean_heads.weight"] @ hidden + w["mean_heads.bias"]).chunk(k)
        raw = [x.clamp(-10, 10) for x in (w["log_var_heads.weight"] @ hidden + w["log_var_heads.bias"]).chunk(k)]
        mixing = w["mixing_logits"] if adapter.mixing == "global" else None
        mixing = w["mixing_head.weight"] @ hidden + w["mixing_head.bias"] if mixing is None else mixing
        alpha = mixing.exp() / mixing.exp().sum()
        everywhere = adapter.variance == "sigmoid"
        variances = [torch.sigmoid(x) if everywhere else torch.exp(x) for x in raw]
        g = ((alpha.log() + gumbel) / objective.gumbel_temperature).exp()
        g = g / g.sum()
        if objective.gumbel_hard:
            g = functional.one_hot(g.argmax(), k) + (g - g.detach())
        z = sum(g[i] * (means[i] + variances[i].sqrt() * normal[i]) for i in range(k))
        out = torch.relu(w["decoder.0.weight"] @ z + w["decoder.0.bias"])
        self.cosine = None
        self.logit = (w["decoder.2.weight"] @ out + w["decoder.2.bias"])[0]
        if adapter.residual == "cosine":
            self.cosine = w["residual"][0] * (v @ t) + w["residual"][1]
            self.logit = self.logit + self.cosine
        kl = []
        for mean, variance in zip(means, variances, strict=True):
            kl.append((0.5 * (mean**2 + variance - 1 - variance.log())).sum())
        self.kl = sum(alpha[i] * kl[i] for i in range(k))
        share = g if objective.sigma_component == "gumbel" else alpha
        if everywhere:  # σ² is in (0, 1) already; mixing logs is a weighted geometric mean
            self.variance = math.prod(torch.sigmoid(raw[i]) ** share[i] for i in range(k))
        else:
            mixed = sum(share[i] * raw[i] for i in range(k))
            self.variance = 1 / (1 + torch.exp(-mixed)) if objective.sigma_variance == "sigmoid" else mixed.exp()

    def recon(self, y: float, objective: ObjectiveConfig) -> Tensor:
        target = torch.tensor(float(y), dtype=torch.float64)
        if objective.correction and self.cosine is not None:
            share = objective.correction
            target = (1 - share) * target + share * torch.sigmoid(self.cosine.detach())
        p = torch.sigmoid(self.logit)
        if objective.reconstruction == "bce":
            return -(target * p.log() + (1 - target) * (1 - p).log())
        if objective.reconstruction == "ste":
            p = p.detach() + self.logit - self.logit.detach()
        return 0.5 * (target - p) ** 2

    def sigma(self, y: float, objective: ObjectiveConfig) -> Tensor:
        e = (y - torch.sigmoid(self.logit.detach())) ** 2
        each = e / (2 * self.variance) + torch.log(self.variance) / 2
        return each.mean() if objective.sigma_reduction == "mean" else each.sum()


def hard_pairs(values: list[list[float]], positive: list[list[bool]], count: int) -> list[list[int]]:
    """For each row the columns of its ``count`` largest non-positives."""
    chosen = []
    for row, match in zip(values, positive, strict=True):
        negatives = [j for j in range(len(row)) if not match[j]]
        chosen.append(sorted(negatives, key=lambda j, row=row: -row[j])[:count])
    return chosen


def mean_of_hard(loss: list[list[Tensor]], chosen: list[list[int]]) -> Any:
    rows = [sum(loss[i][j] for j in js) / len(js) for i, js in enumerate(chosen) if js]
    return sum(rows) / len(loss)


def transposed(rows: list[list[Any]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]


def plain_objective(
    w: dict[str, Tensor], v: Tensor, t: Tensor, block: PairBlock, adapter: AdapterConfig, c: ObjectiveConfig
) -> dict[str, Any]:
    """The loss of a whole batch, pair by pair."""
    size, k = len(v), adapter.components
    gumbel, normal = block.noise.gumbel(k).double(), block.noise.normal(k * LATENT).double()
    positive = block.relevance.tolist()
    if c.positives == "diagonal":
        positive = [[i == j for j in range(size)] for i in range(size)]
    grid = [
        [PlainPair(w, v[i], t[j], gumbel[i, j], normal[i, j].view(k, LATENT), (adapter, c)) for j in range(size)]
        for i in range(size)
    ]
    every = [(i, j) for i in range(size) for j in range(size)]
    matches = [(i, j) for i, j in every if positive[i][j]]
    logits = [[pair.logit.item() for pair in row] for row in grid]

    parts: dict[str, Any] = {}
    target = positive if block.targets is None else block.targets.tolist()
    trust = [1.0] * size if block.trust is None else block.trust.tolist()
    weight = [[trust[j] if positive[i][j] else 1.0 for j in range(size)] for i in range(size)]
    recon = sum(weight[i][j] * grid[i][j].recon(target[i][j], c) for i, j in every)
    parts["recon"] = recon / (size if c.reduction == "rows" else size * size)
    parts["kl"] = sum(grid[i][j].kl for i, j in every) / (size * size)
    parts["sigma_pos"] = sum(trust[j] * grid[i][j].sigma(1, c) for i, j in matches) / len(matches)
    loss = [[pair.sigma(c.negative_target, c) for pair in row] for row in grid]
    literal = c.negative_rule == "literal_max"
    ranked = [[x.item() for x in row] for row in loss] if literal else logits
    parts["sigma_neg"] = mean_of_hard(loss, hard_pairs(ranked, positive, c.hard_negatives))
    if c.negative_direction == "both":
        columns = hard_pairs(transposed(ranked), transposed(positive), c.hard_negatives)
        parts["sigma_neg"] = (parts["sigma_neg"] + mean_of_hard(transposed(loss), columns)) / 2
    if c.cosine_weight and adapter.residual == "cosine":
        signs = [(weight[i][j], (2 * positive[i][j] - 1) * grid[i][j].cosine) for i, j in every]
        parts["cosine"] = sum(w * torch.log(1 + torch.exp(-x)) for w, x in signs) / size
    if c.contrastive_weight:
        rivals = [[j for j in range(size) if j == i or not positive[i][j]] for i in range(size)]
        shares = [grid[i][i].logit.exp() / sum(grid[i][j].logit.exp() for j in rivals[i]) for i in range(size)]
        parts["contrastive"] = -sum(trust[i] * shares[i].log() for i in range(size)) / size
        if c.contrastive_direction == "both":
            rivals = [[i for i in range(size) if i == j or not positive[i][j]] for j in range(size)]
            shares = [grid[j][j].logit.exp() / sum(grid[i][j].logit.exp() for i in rivals[j]) for j in range(size)]
            captions = -sum(trust[j] * shares[j].log() for j in range(size)) / size
            parts["contrastive"] = (parts["contrastive"] + captions) / 2
    alpha, beta, gamma = c.kl_weight, c.sigma_weight, c.negative_weight
    if c.weighting == "eq13":
        sigma = gamma * (parts["sigma_pos"] + parts["sigma_neg"])
        total = alpha * parts["kl"] + beta * (parts["recon"] + sigma)
    else:
        total = alpha * parts["kl"] + parts["recon"] + beta * (parts["sigma_pos"] + gamma * parts["sigma_neg"])
    own = c.cosine_weight * parts.get("cosine", 0.0) + c.contrastive_weight * parts.get("contrastive", 0.0)
    parts["total"] = total + own
    return parts


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"residual": "none"}, {}),
    ({"components": 1}, {}),
    ({"components": 3}, {}),
    ({"mixing": "head"}, {}),
    ({"variance": "sigmoid"}, {}),
    ({"variance": "sigmoid"}, {"sigma_variance": "exp"}),
    ({}, {"weighting": "eq13"}),
    ({}, {"reconstruction": "plain"}),
    ({}, {"reconstruction": "bce"}),
    ({}, {"reduction": "mean"}),
    ({}, {"sigma_variance": "exp"}),
    ({}, {"sigma_component": "alpha"}),
    ({"mixing": "head"}, {"sigma_component": "alpha"}),
    ({}, {"sigma_reduction": "sum"}),
    ({}, {"negative_rule": "literal_max"}),
    ({}, {"negative_rule": "literal_max", "negative_target": 0}),
    ({}, {"hard_negatives": 3}),
    ({}, {"hard_negatives": 3, "negative_rule": "literal_max"}),
    ({}, {"hard_negatives": 9}),
    ({}, {"negative_target": 0}),
    ({}, {"negative_direction": "both"}),
    ({}, {"negative_direction": "both", "negative_rule": "literal_max", "hard_negatives": 2}),
    ({}, {"positives": "diagonal"}),
    ({}, {"contrastive_weight": 1.3}),
    ({}, {"contrastive_weight": 1.3, "contrastive_direction": "both"}),
    ({"residual": "none"}, {"contrastive_weight": 1.3, "positives": "diagonal"}),
    ({}, {"gumbel_hard": True}),
    ({}, {"gumbel_temperature": 0.3}),
    ({}, {"hard_negatives": 3, "positives": "diagonal"}),
    ({}, {"correction": 0.3}),
    ({}, {"correction": 0.3, "reconstruction": "bce"}),
    ({"residual": "none"}, {"correction": 0.3, "cosine_weight": 0.7}),
    ({}, {"cosine_weight": 0.7}),
]


def case_name(case: Any) -> str:
    adapter, objective = case
    return ",".join(f"{k}={v}" for k, v in {**adapter, **objective}.items()) or "default"


def config_of(fields: dict[str, Any]) -> ObjectiveConfig:
    """Weights far from 0 and 1, so that each part and each weight shows in the total."""
    plain = {"kl_weight": 0.37, "sigma_weight": 0.6, "negative_weight": 1.7, "correction": 0.0, "cosine_weight": 0.0}
    return ObjectiveConfig(**{**plain, **fields})


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_the_objective_is_the_plain_loop(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert_plain_loop(*case, batch_block(IDS, seed=2, step=5))


OURS = {"contrastive_weight": 1.3, "contrastive_direction": "both", "correction": 0.3, "cosine_weight": 0.7}


@pytest.mark.parametrize("case", [({}, OURS)])
def test_soft_labels_and_trust(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    block, draw = batch_block(IDS, seed=2, step=5), torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.where(block.relevance, 1.0, 0.5 * draw[:5])
    assert_plain_loop(*case, replace(block, targets=targets, trust=draw[5]))


def assert_plain_loop(adapter_fields: dict[str, Any], fields: dict[str, Any], block: PairBlock) -> None:
    adapter, config = make_adapter(**adapter_fields), config_of(fields)
    v, t = embeddings()
    got = VacsrObjective(config)(adapter, v, t, block=block)
    named = dict(adapter.named_parameters())
    w = {name: p.detach().double().requires_grad_() for name, p in named.items()}
    v2, t2 = v.detach().double().requires_grad_(), t.detach().double().requires_grad_()
    expected = plain_objective(w, v2, t2, block, adapter.config, config)

    assert {*got.parts, "total"} == set(expected)
    for name, value in got.parts.items():
        assert value.item() == pytest.approx(expected[name].item(), rel=2e-5), name
    assert got.total.item() == pytest.approx(expected["total"].item(), rel=2e-5)

    gradients = torch.autograd.grad(got.total, [*named.values(), v, t], allow_unused=True)
    plain = torch.autograd.grad(expected["total"], [*w.values(), v2, t2], allow_unused=True)
    for name, ours, theirs in zip([*named, "v", "t"], gradients, plain, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            torch.testing.assert_close(
                ours.double(), theirs, atol=2e-5, rtol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_the_loss_uses_only_the_noise_it_is_given() -> None:
    v, t = embeddings()
    adapter, objective = make_adapter(), VacsrObjective()

    def total(seed: int, step: int) -> float:
        return objective(adapter, v, t, block=batch_block(IDS, seed=seed, step=step)).total.item()

    torch.manual_seed(0)
    first = total(0, 0)
    torch.manual_seed(1)
    assert total(0, 0) == first
    assert total(0, 1) != first
    assert total(1, 0) != first


@pytest.mark.parametrize("rule", ["logit", "literal_max"])
@pytest.mark.parametrize("direction", ["rows", "both"])
def test_rows_without_any_negative_add_nothing(rule: str, direction: str) -> None:
    v, t = embeddings(count=3)
    config = ObjectiveConfig(negative_rule=rule, negative_direction=direction, hard_negatives=2)
    adapter = make_adapter()
    terms = VacsrObjective(config)(adapter, v, t, block=batch_block(torch.tensor([4, 4, 4]), seed=0, step=0))
    assert terms.parts["sigma_neg"].item() == 0.0
    gradients = torch.autograd.grad(terms.total, [*adapter.parameters(), v, t])
    assert all(torch.isfinite(g).all() for g in gradients)
    assert torch.isfinite(terms.total)


def test_saturated_scores_and_clamped_variances_stay_finite() -> None:
    adapter = make_adapter()
    with torch.no_grad():
        for p in adapter.parameters():
            p.mul_(40)
    v, t = embeddings()
    terms = VacsrObjective()(adapter, v, t, block=batch_block(IDS, seed=0, step=0))
    gradients = torch.autograd.grad(terms.total, [*adapter.parameters(), v, t])
    assert torch.isfinite(terms.total)
    assert all(torch.isfinite(g).all() for g in gradients)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_a_row_block_keeps_the_batchs_counts(image_ids: list[int], start: int, stop: int) -> None:
    size, rows = len(image_ids), slice(start, stop)
    whole = batch_block(torch.tensor(image_ids), seed=1, step=2)
    soft = replace(whole, targets=torch.arange(size * size).view(size, size) / 64).rows(rows)
    assert soft.targets is not None
    assert soft.targets.tolist() == (torch.arange(size * size).view(size, size) / 64)[rows].tolist()
    part = whole.rows(rows)
    assert torch.equal(part.relevance, whole.relevance[rows])
    assert part.batch == len(image_ids)
    assert part.pairs == len(image_ids) ** 2
    assert int(part.positives) == sum(a == b for a in image_ids for b in image_ids)
    assert torch.equal(part.noise.normal(3), whole.noise.normal(3)[rows])
    assert torch.equal(part.noise.gumbel(2), whole.noise.gumbel(2)[rows])


def test_the_diagonal_alone() -> None:
    whole = batch_block(torch.tensor([5, 5, 6]), seed=0, step=0)
    assert int(whole.positives) == 5
    strict = whole.diagonal()
    assert torch.equal(strict.relevance, torch.eye(3, dtype=torch.bool))
    assert int(strict.positives) == 3
    assert torch.equal(whole.rows(slice(1, 3)).diagonal().relevance, torch.eye(3, dtype=torch.bool)[1:])
    assert int(whole.rows(slice(1, 3)).diagonal().positives) == 3


def test_cosines_keep_float32_under_autocast() -> None:
    generator = torch.Generator().manual_seed(0)
    v, t = (functional.normalize(torch.randn(n, 16, generator=generator), dim=1) for n in (5, 7))
    with torch.autocast("cpu", torch.bfloat16):
        scores = cosines(v, t)
        assert (v @ t.T).dtype == torch.bfloat16
    assert scores.dtype == torch.float32
    assert torch.equal(scores, v @ t.T)
