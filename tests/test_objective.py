from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig, VariationalAdapter
from vacsr.objective import (
    LossTerms,
    ObjectiveConfig,
    VacsrObjective,
    hardest,
    mean_over_rows,
    reconstruction_error,
    sigma_loss,
)
from vacsr.pairwise import PairBlock, batch_block

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
DIM, LATENT = 5, 3
IDS = torch.tensor([7, 8, 7, 9, 3])


# ---------------------------------------------------------------------------------------------------- single terms


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), x)[0]


def test_straight_through_reconstruction_has_the_gradient_of_bce() -> None:
    generator = torch.Generator().manual_seed(0)
    logit = (8 * torch.randn(200, generator=generator, dtype=torch.float64)).requires_grad_()
    target = torch.rand(200, generator=generator, dtype=torch.float64)
    target[:100] = (target[:100] > 0.5).double()
    ste, plain, bce = (
        gradient(reconstruction_error(logit, target, kind=kind), logit) for kind in ("ste", "plain", "bce")
    )
    torch.testing.assert_close(ste, bce)
    torch.testing.assert_close(ste, torch.sigmoid(logit) - target)
    p = torch.sigmoid(logit)
    torch.testing.assert_close(plain, (p - target) * p * (1 - p))
    assert (plain - bce).abs().max() > 0.5  # a confident mistake gets next to no gradient without it


@PROPERTY
@given(st.floats(-20, 20), st.floats(0, 1))
def test_reconstruction_values(logit: float, target: float) -> None:
    m, y = torch.tensor(logit, dtype=torch.float64), torch.tensor(target, dtype=torch.float64)
    p = 1 / (1 + math.exp(-logit))
    for kind in ("ste", "plain"):
        assert float(reconstruction_error(m, y, kind=kind)) == pytest.approx(0.5 * (target - p) ** 2, abs=1e-12)
    bce = target * math.log1p(math.exp(-logit)) + (1 - target) * math.log1p(math.exp(logit))
    assert float(reconstruction_error(m, y, kind="bce")) == pytest.approx(bce, abs=1e-9)


def sigma_of(variance: Tensor, error: Tensor) -> Tensor:
    """L_σ of single variances."""
    return sigma_loss(0.5 / variance, 0.5 * variance.log(), error=error)


@PROPERTY
@given(st.floats(0.02, 0.98))
def test_sigma_loss_is_least_where_the_variance_is_the_error(e: float) -> None:
    error = torch.tensor(e, dtype=torch.float64)
    at = error.clone().requires_grad_()
    assert abs(gradient(sigma_of(at, error), at).item()) < 1e-9
    grid = torch.linspace(0.01, 1, 50, dtype=torch.float64).requires_grad_()
    assert (sigma_of(grid, error) >= sigma_of(at, error) - 1e-12).all()
    torch.testing.assert_close(gradient(sigma_of(grid, error), grid), (grid - e) / (2 * grid**2))


masks = st.integers(0, 6).flatmap(
    lambda r: st.integers(1, 6).flatmap(
        lambda c: st.tuples(
            st.lists(st.lists(st.integers(-2, 2), min_size=c, max_size=c), min_size=r, max_size=r),
            st.lists(st.lists(st.booleans(), min_size=c, max_size=c), min_size=r, max_size=r),
            st.just((r, c)),
        )
    )
)


@PROPERTY
@given(masks, st.integers(1, 8))
def test_hardest_takes_the_largest_non_positives(
    drawn: tuple[list[list[int]], list[list[bool]], tuple[int, int]], count: int
) -> None:
    values, relevance, shape = drawn
    matrix = torch.tensor(values, dtype=torch.float32).view(shape)
    got = hardest(matrix, torch.tensor(relevance, dtype=torch.bool).view(shape), count=count)
    assert got.shape == shape
    for row, positive, chosen in zip(values, relevance, got.tolist(), strict=True):
        negatives = sorted((x for x, p in zip(row, positive, strict=True) if not p), reverse=True)
        assert sorted((x for x, c in zip(row, chosen, strict=True) if c), reverse=True) == negatives[:count]
        assert not any(c and p for c, p in zip(chosen, positive, strict=True))


@PROPERTY
@given(masks, st.integers(1, 9))
def test_mean_over_rows_is_the_loop(
    drawn: tuple[list[list[int]], list[list[bool]], tuple[int, int]], rows: int
) -> None:
    values, chosen, shape = drawn
    total = 0.0
    for row, mask in zip(values, chosen, strict=True):
        kept = [x for x, c in zip(row, mask, strict=True) if c]
        total += sum(kept) / len(kept) if kept else 0.0
    matrix = torch.tensor(values, dtype=torch.float32).view(shape)
    got = mean_over_rows(matrix, torch.tensor(chosen, dtype=torch.bool).view(shape), rows=rows)
    assert float(got) == pytest.approx(total / rows, abs=1e-6)


def test_an_unchosen_infinity_does_not_spoil_the_mean_over_rows() -> None:
    values = torch.tensor([[1.0, torch.inf], [torch.nan, 3.0]], requires_grad=True)
    mean = mean_over_rows(values, torch.tensor([[True, False], [False, True]]), rows=2)
    assert mean.item() == 2.0
    assert gradient(mean, values).tolist() == [[0.5, 0.0], [0.0, 0.5]]


# ------------------------------------------------------------------------------------- the whole against plain loops


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
    recon = sum(grid[i][j].recon(positive[i][j], c) for i, j in every)
    parts["recon"] = recon / (size if c.reduction == "rows" else size * size)
    parts["kl"] = sum(grid[i][j].kl for i, j in every) / (size * size)
    parts["sigma_pos"] = sum(grid[i][j].sigma(1, c) for i, j in matches) / len(matches)
    loss = [[pair.sigma(c.negative_target, c) for pair in row] for row in grid]
    literal = c.negative_rule == "literal_max"
    ranked = [[x.item() for x in row] for row in loss] if literal else logits
    parts["sigma_neg"] = mean_of_hard(loss, hard_pairs(ranked, positive, c.hard_negatives))
    if c.negative_direction == "both":
        columns = hard_pairs(transposed(ranked), transposed(positive), c.hard_negatives)
        parts["sigma_neg"] = (parts["sigma_neg"] + mean_of_hard(transposed(loss), columns)) / 2
    if c.cosine_weight and adapter.residual == "cosine":
        signs = [(2 * positive[i][j] - 1) * grid[i][j].cosine for i, j in every]
        parts["cosine"] = sum(torch.log(1 + torch.exp(-x)) for x in signs) / size
    alpha, beta, gamma = c.kl_weight, c.sigma_weight, c.negative_weight
    if c.weighting == "eq13":
        sigma = gamma * (parts["sigma_pos"] + parts["sigma_neg"])
        total = alpha * parts["kl"] + beta * (parts["recon"] + sigma)
    else:
        total = alpha * parts["kl"] + parts["recon"] + beta * (parts["sigma_pos"] + gamma * parts["sigma_neg"])
    parts["total"] = total + c.cosine_weight * parts.get("cosine", 0.0)
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
    adapter, config = make_adapter(**case[0]), config_of(case[1])
    v, t = embeddings()
    block = batch_block(IDS, seed=2, step=5)
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


ALONE = [case for case in CASES if case[1] and (not case[0] or case[0] == {"mixing": "head"})]


@pytest.mark.parametrize("case", ALONE, ids=case_name)
def test_every_switch_changes_the_loss_or_its_gradient(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    v, t = embeddings()
    results = []
    for config in (config_of({}), config_of(case[1])):
        adapter = make_adapter(**case[0])
        terms = VacsrObjective(config)(adapter, v, t, block=batch_block(IDS, seed=2, step=5))
        gradients = torch.autograd.grad(terms.total, list(adapter.parameters()))
        results.append(torch.cat([terms.total.detach().view(1), *(g.flatten() for g in gradients)]))
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_both_weightings_agree_when_the_weights_are_one() -> None:
    v, t = embeddings()
    totals = [
        VacsrObjective(ObjectiveConfig(kl_weight=0.1, weighting=weighting))(
            make_adapter(), v, t, block=batch_block(IDS, seed=2, step=5)
        ).total.item()
        for weighting in ("appendix", "eq13")
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-6)


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


# ------------------------------------------------------------------------------------------------- hard negatives


def equal_variance_draw(rule: str) -> tuple[VacsrObjective, VariationalAdapter, Tensor, Tensor, PairBlock]:
    """An adapter whose log-variance heads ignore their input, so that L_σ differs by the error alone."""
    adapter = make_adapter()
    with torch.no_grad():
        adapter.log_var_heads.weight.zero_()
        adapter.log_var_heads.bias.fill_(-0.7)
    v, t = embeddings(seed=3)
    return VacsrObjective(ObjectiveConfig(negative_rule=rule)), adapter, v, t, batch_block(IDS, seed=0, step=0)


@pytest.mark.parametrize(("rule", "pick"), [("logit", max), ("literal_max", min)])
def test_the_literal_rule_picks_the_easiest_negative(rule: str, pick: Any) -> None:
    objective, adapter, v, t, block = equal_variance_draw(rule)
    draw = objective.draw(adapter, v, t, noise=block.noise)
    loss = sigma_loss(draw.inverse, draw.log_variance, error=(1 - draw.logit.sigmoid()).square())
    ranked = loss if rule == "literal_max" else draw.logit
    chosen = hardest(ranked, block.relevance, count=1)
    expected = 0.0
    for i in range(len(IDS)):
        negatives = [j for j in range(len(IDS)) if not block.relevance[i, j]]
        column = pick(negatives, key=lambda j, i=i: draw.logit[i, j].item())
        assert chosen[i].nonzero().flatten().tolist() == [column]
        expected += loss[i, column].item() / len(IDS)
    # And it is what the whole objective reports.
    assert objective(adapter, v, t, block=block).parts["sigma_neg"].item() == pytest.approx(expected, rel=1e-5)


def test_hard_negatives_are_never_other_captions_of_the_image() -> None:
    objective, adapter, v, t, block = equal_variance_draw("logit")
    with torch.no_grad():  # captions 0 and 2 are of one image: make them score highest of all with it
        t[2], t[0] = v[0], v[0]
    draw = objective.draw(adapter, v, t, noise=block.noise)
    assert not (hardest(draw.logit, block.relevance, count=2) & block.relevance).any()


@pytest.mark.parametrize("part", ["sigma_pos", "sigma_neg"])
def test_the_error_inside_sigma_is_detached(part: str) -> None:
    adapter = make_adapter(components=1)
    v, t = embeddings()
    parts = VacsrObjective()(adapter, v, t, block=batch_block(IDS, seed=2, step=5)).parts
    inputs = [*adapter.decoder.parameters(), adapter.residual, *adapter.mean_heads.parameters()]
    gradients = torch.autograd.grad(parts[part], inputs, allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)


# ------------------------------------------------------------------------------------------------- row blocks


def summed(terms: list[LossTerms]) -> dict[str, Tensor]:
    result = {"total": sum((x.total for x in terms), torch.zeros(()))}
    for name in terms[0].parts:
        result[name] = sum((x.parts[name] for x in terms), torch.zeros(()))
    return result


ROW_WISE = [case for case in CASES if case[1].get("negative_direction") != "both"]


@pytest.mark.parametrize("case", ROW_WISE, ids=case_name)
@settings(PROPERTY, max_examples=4)
@example([0, 0, 0, 1, 2], [1, 4])  # rows with fewer negatives than others
@given(st.lists(st.integers(0, 3), min_size=2, max_size=7), st.lists(st.integers(0, 7), max_size=3))
def test_row_blocks_add_up(case: tuple[dict[str, Any], dict[str, Any]], ids: list[int], cuts: list[int]) -> None:
    adapter, objective = make_adapter(**case[0]), VacsrObjective(config_of(case[1]))
    v, t = embeddings(seed=len(ids), count=len(ids))
    whole = batch_block(torch.tensor(ids), seed=4, step=1)
    edges = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    blocks = [slice(a, b) for a, b in pairwise(edges)]
    together = objective(adapter, v, t, block=whole)
    pieces = summed([objective(adapter, v[rows], t, block=whole.rows(rows)) for rows in blocks])
    inputs = [*adapter.parameters(), v, t]
    for name, value in {"total": together.total, **together.parts}.items():
        torch.testing.assert_close(pieces[name], value, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(total, inputs) for total in (pieces["total"], together.total))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


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
