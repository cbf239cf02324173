"""The ways to all scores that `vacsr bench scoring` times, each built when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig
from vacsr.bench.ceilings import EDGE, alone_tflops, square_products
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel import KernelScorer, available
from vacsr.train.precision import matmul_precision

BARE, SQUARE, PAPERS = "bare product", "square products", "the paper's"
"""How the names of ceilings and of the paper's way begin."""
_CHUNK = 128  # images and texts at a time in the paper's way
_OUT = {"cpu": 1, "cuda": 1 << 29}  # numbers of the bare product alive at a time: on a CPU those of one image


class Runner(NamedTuple):
    """A way with everything prepared."""

    run: Callable[[], object]
    check: Callable[[Embedding], Tensor] | None = None
    """Scores of some images with all texts, where they can differ."""
    operations: float | None = None
    """Where they are not those of the trunk for all pairs."""
    alone: float | None = None
    """TFLOP/s of a single product, for a ceiling."""
    warm: Callable[[], object] | None = None
    """A short call of the same kind, where a whole one is too slow to be made for nothing."""


class Way(NamedTuple):
    """One way to all scores, built when its turn comes."""

    name: str
    precision: str
    make: Callable[[], Runner]


class Problem(NamedTuple):
    """What is scored."""

    v: Embedding
    t: Embedding
    method: Vacsr

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.v.mean.device

    @property
    def operations(self) -> float:
        """Of the trunk for all pairs, which every way does: 2·I·T·d·H."""
        return 2.0 * len(self.v.mean) * len(self.t.mean) * self.method.adapter.trunk.weight.numel()


def random_problem(images: int, texts: int, dim: int, *, device: torch.device) -> Problem:
    """Fresh weights with none of the zeros that some start from, and unit vectors."""
    generator = torch.Generator().manual_seed(0)
    method = Vacsr(VacsrConfig(adapter=AdapterConfig()), dim=dim).eval()
    with torch.no_grad():
        for weight in method.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / max(1, weight.shape[-1]) ** 0.5)
    v, t = (functional.normalize(torch.randn(n, dim, generator=generator), dim=1) for n in (images, texts))
    return Problem(Embedding(v.to(device)), Embedding(t.to(device)), method.to(device))


def ways(of: Problem) -> Iterator[Way]:
    """In the order of the table, ceilings first."""
    gpu = of.device.type == "cuda"
    dtypes = [torch.bfloat16, torch.float32] if gpu else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        yield Way(BARE, _name(dtype), partial(bare_product, of, dtype))
    edge = EDGE[of.device.type]
    yield Way(f"{SQUARE} of {edge:,}³, back to back", _name(dtypes[0]), partial(square, of, edge, dtypes[0]))
    for precision in ("fp32", "tf32") if gpu else ("fp32",):
        yield Way(f"{PAPERS}: all heads, 128 × 128 pairs", precision, partial(papers_way, of, precision))
    for dtype in dtypes:
        yield Way("folded", _name(dtype), partial(scorer_way, of, BlockScorer, dtype))
    yield Way("folded, top-10 both ways", "float32", partial(streamed, of))
    if gpu and available(of.device):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            yield Way("kernel", _name(dtype), partial(scorer_way, of, KernelScorer, dtype))
        yield Way("kernel, top-10 both ways", "bfloat16", partial(kernel_topk, of))


def bare_product(of: Problem, dtype: torch.dtype) -> Runner:
    """The trunk's product for all pairs, with everything prepared: the weights of the first images serve for all."""
    trunk, count = of.method.adapter.trunk.weight, len(of.v.mean)
    group = max(1, min(count, _OUT[of.device.type] // (len(trunk) * len(of.t.mean))))
    scaled = (of.v.mean[:group].unsqueeze(1) * trunk).view(-1, trunk.shape[1])
    texts = of.t.mean
    first, second = scaled.to(dtype), texts.to(dtype).T
    out = torch.empty(len(scaled), len(texts), dtype=dtype, device=of.device)

    def run() -> None:
        for start in range(0, count, group):
            rows = min(group, count - start) * len(trunk)
            torch.mm(first[:rows], second, out=out[:rows])

    return Runner(run)


def square(of: Problem, edge: int, dtype: torch.dtype) -> Runner:
    """As much work in large square products: what the machine gives to a product of no particular shape."""
    found = square_products(edge, dtype, device=of.device, operations=of.operations)
    return Runner(found.run, operations=found.operations, alone=alone_tflops(found, device=of.device))


def papers_way(of: Problem, precision: str) -> Runner:
    """Chunks of 128 × 128 pairs through trunk, all heads and decoder."""
    adapter = of.method.adapter

    def chunk(v: Tensor, t: Tensor) -> Tensor:
        posterior = adapter.posterior(adapter.features(v.unsqueeze(1), t.unsqueeze(0)))
        logit = adapter.decode((posterior.log_alpha.exp().unsqueeze(-1) * posterior.mean).sum(dim=-2))
        residual = adapter.residual_logit(v @ t.T)
        return logit if residual is None else logit + residual

    def scores(v: Embedding) -> Tensor:
        with matmul_precision(precision):
            rows = [[chunk(some, part) for part in _parts(of.t.mean, _CHUNK)] for some in _parts(v.mean, _CHUNK)]
            return torch.cat([torch.cat(row, dim=1) for row in rows])

    return Runner(lambda: scores(of.v), scores, warm=lambda: scores(Embedding(of.v.mean[:_CHUNK])))


def scorer_way(of: Problem, kind: type[BlockScorer] | type[KernelScorer], dtype: torch.dtype) -> Runner:
    """One of the library's."""
    scorer = kind(of.method, dtype=dtype)
    return Runner(lambda: scorer.block(of.v, of.t), lambda v: scorer.block(v, of.t))


def streamed(of: Problem) -> Runner:
    """Top-10 of both sides in one pass without the matrix."""
    scorer = BlockScorer(of.method)
    return Runner(lambda: scorer.topk_both(of.v, of.t, k=10))


def kernel_topk(of: Problem) -> Runner:
    """The same by the kernel."""
    scorer = KernelScorer(of.method, dtype=torch.bfloat16)
    return Runner(lambda: scorer.topk_both(of.v, of.t, k=10))


def _parts(x: Tensor, size: int) -> tuple[Tensor, ...]:
    return torch.split(x, size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
