"""Blocks in torch against the method's own scores, whatever the tiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.adapter import FoldedAdapter, VariationalAdapter
from vacsr.bench.scoring import top_overlap
from vacsr.config.io import method_config
from vacsr.errors import UsageError
from vacsr.methods import Embedding, build_method
from vacsr.scoring import choose_engine
from vacsr.scoring.cascade import candidate_scores
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.topk import stable_topk

from .models import exact, method, units

NOT_FOLDABLE: list[dict[str, Any]] = [
    {"mixing": "head"},
    {"decode": "argmax"},
    {"input_scale": "layernorm"},
    {"trunk_norm": True},
]
METHODS: list[Any] = [
    *("vacsr", "vacsr-paper", "sigmoid", "infonce"),
    *({"name": "vacsr", "adapter": fields} for fields in NOT_FOLDABLE),
]
every_method = pytest.mark.parametrize("raw", METHODS, ids=str)


def build(raw: Any, dim: int = 6) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        method = build_method(method_config(raw), dim=dim)
        with torch.no_grad():
            for p in method.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return method


def unit(count: int, *, seed: int = 0, dim: int = 6) -> Embedding:
    return Embedding(units(count, dim, seed=seed))


@torch.no_grad()
def dense(method: Any, v: Embedding, t: Embedding) -> Tensor:
    return method.score(v, t)


@every_method
def test_blocks_and_aligned_pairs_are_the_dense_scores(raw: Any) -> None:
    """In bfloat16 within two percent of their spread."""
    method, v, t = build(raw, 32), unit(70, dim=32), unit(70, seed=1, dim=32)
    expected, scorer = dense(method, v, t), BlockScorer(method)
    assert (scorer.folded is None) == (raw in ("sigmoid", "infonce") or isinstance(raw, dict))
    torch.testing.assert_close(scorer.block(v, t), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scorer.aligned(v, t), expected.diagonal(), atol=1e-5, rtol=1e-5)
    low = BlockScorer(method, dtype=torch.bfloat16)
    for scores, reference in ((low.block(v, t), expected), (low.aligned(v, t), expected.diagonal())):
        assert scores.dtype == torch.float32
        assert 0 < (scores - reference).abs().max() < 0.02 * (expected.max() - expected.min())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 200), st.sampled_from(METHODS))
def test_any_tiling_gives_the_same(images: int, texts: int, room: int, raw: Any) -> None:
    method, v, t = build(raw), unit(images), unit(texts, seed=1)
    scores = BlockScorer(method, outputs=room).block(v, t)
    torch.testing.assert_close(scores, dense(method, v, t), atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 9), st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 1, 16]),
    st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([1, 100, 1 << 20]),
)  # fmt: skip
def test_strips_of_any_shape_stay_within_the_bound(
    images: int, texts: int, dim: int, hidden: int, width: int, residual: bool, dtype: torch.dtype, room: int
) -> None:
    """Against float64; v⊙t or the scaled weights, one row, none, ragged strips. Rounded are both vectors or a vector
    and the scaled trunk, the trunk and its bias, the hidden unit, the decoder's small matrix and its sum."""
    made = method(dim, hidden=hidden, width=width, residual=residual)
    v, t = units(images, dim, seed=1), units(texts, dim, seed=2)
    scorer = BlockScorer(made, dtype=dtype, outputs=room)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-21
    bound = 7 * rounding * exact(made.adapter, v, t, absolute=True) + 1e-4
    scores, reference = scorer.block(Embedding(v), Embedding(t)), exact(made.adapter, v, t)
    assert scores.shape == (images, texts)
    assert bool(((scores - reference).abs() <= bound).all())
    lists = torch.randint(max(1, texts), (images, min(3, texts)), generator=torch.Generator().manual_seed(3))
    own = candidate_scores(scorer, Embedding(v), Embedding(t), lists, chunk=room)
    assert bool(((own - reference.gather(1, lists)).abs() <= bound.gather(1, lists)).all())


def test_bfloat16_keeps_the_ranking() -> None:
    made, v, t = method(256), units(50, 256, seed=1), units(500, 256, seed=2)
    scores = BlockScorer(made, dtype=torch.bfloat16).block(Embedding(v), Embedding(t))
    reference = exact(made.adapter, v, t)
    assert (scores - reference).square().mean().sqrt() < 0.01 * reference.std()
    best, kept = (stable_topk(x.float(), 10).index for x in (reference, scores))
    assert top_overlap(kept, best) > 0.97


@pytest.mark.parametrize(("images", "texts"), [(70, 90), (300, 20), (3, 500), (70, 17)])
def test_trunk_outputs_stay_within_the_bound(images: int, texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do scaled weights and v⊙t, which have no bound of their own."""
    made, room, held = method(16), 2000, []
    decode = FoldedAdapter._decode

    def watched(self: FoldedAdapter, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        height = len(self.trunk if weight is None else weight)
        held.append(max(len(x) * height, x.numel(), height * 16))
        return decode(self, x, weight, bias)

    monkeypatch.setattr(FoldedAdapter, "_decode", watched)
    v, t = units(images, 16, seed=1), units(texts, 16, seed=2)
    scores = BlockScorer(made, outputs=room).block(Embedding(v), Embedding(t))
    torch.testing.assert_close(scores, exact(made.adapter, v, t).float(), atol=1e-5, rtol=1e-5)
    assert max(held) <= room


@every_method
def test_the_default_engine_of_a_cpu(raw: Any) -> None:
    engine = choose_engine(build(raw), device=torch.device("cpu"), dtype="auto")
    assert engine.dtype == torch.float32
    assert engine.block(unit(0), unit(3)).shape == (0, 3)
    assert engine.block(unit(3), unit(0)).shape == (3, 0)
    assert engine.aligned(unit(0), unit(0)).shape == (0,)


def test_long_rows_come_in_smaller_blocks() -> None:
    scorer = BlockScorer(build("vacsr"), pairs=40 * 90)
    v, t = unit(150), unit(90, seed=1)
    blocks = list(scorer.stream(v, t))
    assert [len(block) for block in blocks] == [40, 40, 40, 30]
    torch.testing.assert_close(torch.cat(blocks), scorer.block(v, t), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float8_e4m3fn, "bf16"])
def test_a_dtype_that_a_cpu_has_not_is_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match=r"use 'auto' or one of torch\.float32, torch\.bfloat16"):
        choose_engine(build("vacsr"), device=torch.device("cpu"), dtype=dtype)


def test_the_adapter_is_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method, calls, fold = build("vacsr"), [], VariationalAdapter.fold
    monkeypatch.setattr(VariationalAdapter, "fold", lambda self: calls.append(1) or fold(self))
    engine = choose_engine(method, device=torch.device("cpu"))
    engine.topk(unit(5), unit(7), k=3)
    assert len(calls) == 1
