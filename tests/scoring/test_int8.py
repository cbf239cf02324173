from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr.config.io import method_config
from vacsr.methods import Embedding, build_method
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.int8 import Int8Adapter, quantised

DECODERS: list[dict[str, Any]] = [
    {},
    {"residual": "none"},
    {"decoder_hidden": 0},
    {"decoder_hidden": 0, "residual": "none"},
    {"hidden": 40},
]


def build(adapter: dict[str, Any], dim: int) -> Any:
    method = build_method(method_config({"name": "vacsr", "adapter": adapter}), dim=dim)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in method.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / max(1, p.shape[-1]) ** 0.5)
    return method


def unit(count: int, dim: int, *, seed: int = 0) -> Tensor:
    return functional.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)


def by_hand(method: Any, v: Tensor, t: Tensor) -> Tensor:
    """One pair after the other, in whole numbers: both factors rounded to multiples of their row's step."""
    folded = method.adapter.fold()
    out = torch.empty(len(v), len(t), dtype=torch.float64)
    for i, image in enumerate(v):
        weight = (folded.trunk * image).double()
        for j, text in enumerate(t.double()):
            step = text.abs().max() / 127
            steps = weight.abs().amax(dim=1) / 127
            sums = ((weight / steps[:, None]).round() * (text / step).round()).sum(dim=1)
            hidden = (sums * step * steps + folded.trunk_bias).relu()
            small = folded.small.double() @ hidden + folded.small_bias
            logit = small[0] if folded.last is None else folded.last.double() @ small.relu() + folded.last_bias
            if folded.residual is not None:
                logit = logit + folded.residual[0] * (image.double() @ text) + folded.residual[1]
            out[i, j] = logit
    return out


@pytest.mark.parametrize("adapter", DECODERS, ids=str)
@torch.no_grad()
def test_scores_are_those_of_rounded_factors(adapter: dict[str, Any]) -> None:
    method, v, t = build(adapter, 24), unit(3, 24), unit(7, 24, seed=1)
    got = Int8Adapter(method.adapter.fold()).logits(v, t)
    assert got.dtype == torch.float32
    # An entry that lies halfway between two levels may fall to either side in float32: one level of one entry.
    torch.testing.assert_close(got, by_hand(method, v, t).float(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("adapter", DECODERS, ids=str)
@torch.no_grad()
def test_error_is_within_three_percent_of_the_spread(adapter: dict[str, Any]) -> None:
    """Of the adapter's own part: the cosine is exact. Root mean square over pairs."""
    method, v, t = build(adapter, 256), unit(4, 256), unit(300, 256, seed=1)
    exact = method.score(Embedding(v), Embedding(t))
    folded = method.adapter.fold()
    own = exact if folded.residual is None else exact - folded.residual[0] * (v @ t.T)
    scorer = BlockScorer(method, dtype=torch.int8)
    block = scorer.block(Embedding(v), Embedding(t))
    rows = torch.arange(4).repeat_interleave(300)
    aligned = scorer.aligned(Embedding(v[rows]), Embedding(t.repeat(4, 1))).view(4, 300)
    for got in (block, aligned):
        error = (got - exact).square().mean().sqrt() / own.std()
        assert 1e-4 < error < 0.03


@torch.no_grad()
def test_either_side_may_be_the_longer_one() -> None:
    method, v, t = build({}, 24), unit(3, 24), unit(600, 24, seed=1)
    scorer = BlockScorer(method, dtype=torch.int8)
    wide, tall = scorer.block(Embedding(v), Embedding(t)), scorer.block(Embedding(t), Embedding(v))
    assert torch.equal(wide, tall.T)
    parts = [scorer.block(Embedding(v), Embedding(part)) for part in t.split(100)]
    torch.testing.assert_close(torch.cat(parts, dim=1), wide, atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(1, 6), st.floats(1e-6, 1e6), st.integers(0, 99))
def test_rounding_is_at_most_half_a_step(rows: int, dim: int, scale: float, seed: int) -> None:
    x = scale * torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))
    found = quantised(x)
    assert found.values.abs().max() == 127
    assert ((found.values * found.step - x).abs() <= 0.501 * found.step).all()


@torch.no_grad()
def test_nan_stays_with_its_text() -> None:
    method, v, t = build({"residual": "none"}, 24), unit(2, 24), unit(5, 24, seed=1)
    t[3, 2] = torch.nan
    assert Int8Adapter(method.adapter.fold()).logits(v, t).isnan().tolist() == [[False, False, False, True, False]] * 2


@pytest.mark.parametrize("raw", [{"name": "sigmoid"}, {"name": "vacsr", "adapter": {"mixing": "head"}}], ids=str)
@torch.no_grad()
def test_what_does_not_fold_takes_float32(raw: dict[str, Any]) -> None:
    method = build_method(method_config(raw), dim=24)
    v, t = Embedding(unit(3, 24)), Embedding(unit(5, 24, seed=1))
    assert torch.equal(
        BlockScorer(method, dtype=torch.int8).block(v, t), BlockScorer(method, dtype=torch.float32).block(v, t)
    )


@pytest.mark.parametrize(("images", "texts"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_score(images: int, texts: int) -> None:
    scorer = BlockScorer(build({}, 8), dtype=torch.int8)
    assert scorer.block(Embedding(unit(images, 8)), Embedding(unit(texts, 8))).shape == (images, texts)
    assert scorer.aligned(Embedding(unit(0, 8)), Embedding(unit(0, 8))).shape == (0,)
