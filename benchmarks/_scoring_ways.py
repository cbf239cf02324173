"""The ways of `scoring.py`: each makes a call that scores all pairs once, or does as much work in large products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig
from vacsr.bench.ceilings import alone_tflops, square_products
from vacsr.bench.scoring_ways import Runner
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.scoring import choose_engine
from vacsr.scoring.folded import FP8, BlockScorer
from vacsr.scoring.kernel import KernelScorer
from vacsr.scoring.topk import Direction
from vacsr.train.precision import matmul_precision

CHUNK = 128
GROUP = 16  # images that share one product of the ceiling
LINEAR, WIDE, COSINE = "linear", "16-wide", "16-wide + cosine"
DECODERS = {
    LINEAR: AdapterConfig(decoder_hidden=0, residual="none"),
    WIDE: AdapterConfig(decoder_hidden=16, residual="none"),
    COSINE: AdapterConfig(decoder_hidden=16, residual="cosine"),
}
PRODUCTS = "cuBLAS"  # how the names of ceilings begin
TRUNK, PAPERS = f"{PRODUCTS}: the trunk's products", "paper-style: all heads, 128 × 128 pairs"


class Problem(NamedTuple):
    """What all rows score."""

    v: Tensor  # [I, d]
    t: Tensor  # [T, d]
    methods: dict[str, Vacsr]

    @property
    def operations(self) -> float:
        """Of the trunk alone, which every way but the paper's does and nothing more: 2·I·T·d·H."""
        return 2.0 * len(self.v) * len(self.t) * self.v.shape[1] ** 2


class Way(NamedTuple):
    """One row of the table."""

    name: str
    decoder: str
    dtype: str
    make: Callable[[Problem], Runner]
    slow: bool = False  # timed once, at the end
    note: str = ""


@torch.no_grad()
def problem(images: int, texts: int, dim: int, *, device: torch.device) -> Problem:
    """Fresh weights, with none of the zeros that some start from."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    methods = {}
    for name, config in DECODERS.items():
        method = Vacsr(VacsrConfig(adapter=config), dim=dim).eval().to(device)
        for parameter in method.parameters():
            parameter.copy_(draw(*parameter.shape) / max(1, parameter.shape[-1]) ** 0.5)
        methods[name] = method
    return Problem(
        functional.normalize(draw(images, dim), dim=1), functional.normalize(draw(texts, dim), dim=1), methods
    )


def batches(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def ceiling(p: Problem) -> Runner:
    """[16·d, d] × [d, T] products, one for every 16 images, into memory that is there."""
    dim = p.v.shape[1]
    left = torch.randn(GROUP * dim, dim, device=p.v.device, dtype=torch.bfloat16)
    right = p.t.to(torch.bfloat16).T
    out = torch.empty(len(left), len(p.t), device=p.v.device, dtype=torch.bfloat16)

    def call() -> None:
        for here in batches(len(p.v), GROUP):
            rows = (here.stop - here.start) * dim
            torch.mm(left[:rows], right, out=out[:rows])

    return Runner(call)


def ceiling_fp8(p: Problem) -> Runner:
    """The same in e4m3 with one scale a tensor."""
    dim = p.v.shape[1]
    left = torch.randn(GROUP * dim, dim, device=p.v.device).to(FP8)
    right = (100 * functional.pad(p.t, (0, 0, 0, -len(p.t) % 16))).to(FP8).T
    one = torch.ones((), device=p.v.device)

    def call() -> None:
        for here in batches(len(p.v), GROUP):
            rows = left[: (here.stop - here.start) * dim]
            torch._scaled_mm(rows, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return Runner(call)


def square(p: Problem, *, edge: int, dtype: torch.dtype) -> Runner:
    """As many operations in products of edge³, back to back; one of them also alone."""
    found = square_products(edge, dtype, device=p.v.device, operations=p.operations)
    return Runner(found.run, operations=found.operations, alone=alone_tflops(found, device=p.v.device))


def paper_style(p: Problem, *, precision: str) -> Runner:
    """Mean and log-variance heads for every pair of a chunk, as when the loss's forward is used to score."""
    adapter = p.methods[WIDE].adapter

    def scores(v: Tensor) -> Tensor:
        out = torch.empty(len(v), len(p.t), device=v.device)
        with matmul_precision(precision):
            for rows in batches(len(v), CHUNK):
                for cols in batches(len(p.t), CHUNK):
                    posterior = adapter.posterior(adapter.features(v[rows, None], p.t[None, cols]))
                    z = (posterior.log_alpha.exp().unsqueeze(-1) * posterior.mean).sum(dim=-2)
                    out[rows, cols] = adapter.decode(z)
        return out

    return Runner(lambda: scores(p.v), warm=lambda: scores(p.v[:CHUNK]))


def folded(p: Problem, *, decoder: str) -> Runner:
    """The library's torch path."""
    scorer, v, t = BlockScorer(p.methods[decoder], dtype=torch.bfloat16), Embedding(p.v), Embedding(p.t)
    return Runner(lambda: scorer.block(v, t))


def folded_compiled(p: Problem, *, decoder: str) -> Runner:
    """The folded logits of 4 images with all texts, compiled, over all images."""
    folded = p.methods[decoder].adapter.fold().to(p.v.device, torch.bfloat16)
    tile = torch.compile(folded.logits, dynamic=False)

    def call() -> Tensor:
        out = torch.empty(len(p.v), len(p.t), device=p.v.device)
        for rows in batches(len(p.v), 4):
            out[rows] = tile(p.v[rows], p.t)
        return out

    return Runner(call)


def kernel_matrix(p: Problem, *, decoder: str, dtype: torch.dtype) -> Runner:
    """Every score written."""
    scorer, v, t = KernelScorer(p.methods[decoder], dtype=dtype), Embedding(p.v), Embedding(p.t)
    return Runner(lambda: scorer.block(v, t))


def kernel_topk(p: Problem, *, decoder: str, dtype: torch.dtype) -> Runner:
    """No matrix: the best 10 of each image and of each text."""
    engine = choose_engine(p.methods[decoder], device=p.v.device, dtype=dtype)
    return Runner(lambda: engine.topk_both(Embedding(p.v), Embedding(p.t), k=10))


def default_topk(p: Problem, *, decoder: str, direction: Direction) -> Runner:
    """What `PairScores.topk` does by default: the kernel chooses candidates, float32 orders them."""
    engine = choose_engine(p.methods[decoder], device=p.v.device)
    return Runner(lambda: engine.topk(Embedding(p.v), Embedding(p.t), k=10, direction=direction))


def default_both(p: Problem, *, decoder: str) -> Runner:
    """What `PairScores.topk_both` does by default."""
    engine = choose_engine(p.methods[decoder], device=p.v.device)
    return Runner(lambda: engine.topk_both(Embedding(p.v), Embedding(p.t), k=10))


def ways(edge: int) -> list[Way]:
    """In the order of the table; ``edge`` is that of the square ceilings."""
    half, low = torch.bfloat16, FP8
    matrix, both, default = "kernel, all scores", "kernel, top-10 of both sides", "default topk(10)"
    squares = f"{PRODUCTS}: products of {edge:,}³, back to back"
    return [
        Way(TRUNK, "–", "bf16", ceiling),
        Way(squares, "–", "bf16", partial(square, edge=edge, dtype=half)),
        Way(TRUNK, "–", "fp8", ceiling_fp8, note="one scale a tensor"),
        Way(squares, "–", "fp8", partial(square, edge=edge, dtype=low), note="one scale a tensor"),
        Way(matrix, LINEAR, "bf16", partial(kernel_matrix, decoder=LINEAR, dtype=half)),
        Way(matrix, WIDE, "bf16", partial(kernel_matrix, decoder=WIDE, dtype=half)),
        Way(matrix, COSINE, "bf16", partial(kernel_matrix, decoder=COSINE, dtype=half)),
        Way(matrix, WIDE, "fp16", partial(kernel_matrix, decoder=WIDE, dtype=torch.float16)),
        Way(both, LINEAR, "bf16", partial(kernel_topk, decoder=LINEAR, dtype=half)),
        Way(both, WIDE, "bf16", partial(kernel_topk, decoder=WIDE, dtype=half)),
        Way(f"{default}, texts of images", WIDE, "fp16, fp32", partial(default_topk, decoder=WIDE, direction="i2t")),
        Way(f"{default}, images of texts", WIDE, "fp16, fp32", partial(default_topk, decoder=WIDE, direction="t2i")),
        Way("default topk_both(10)", WIDE, "fp16, fp32", partial(default_both, decoder=WIDE)),
        Way(matrix, LINEAR, "fp8", partial(kernel_matrix, decoder=LINEAR, dtype=low)),
        Way(matrix, WIDE, "fp8", partial(kernel_matrix, decoder=WIDE, dtype=low)),
        Way(both, WIDE, "fp8", partial(kernel_topk, decoder=WIDE, dtype=low), note="30 of each scored again in fp16"),
        Way("folded torch, compiled", LINEAR, "bf16", partial(folded_compiled, decoder=LINEAR)),
        Way("folded torch", LINEAR, "bf16", partial(folded, decoder=LINEAR)),
        Way("folded torch", WIDE, "bf16", partial(folded, decoder=WIDE)),
        Way(PAPERS, WIDE, "TF32", partial(paper_style, precision="tf32"), slow=True),
        Way(PAPERS, WIDE, "fp32", partial(paper_style, precision="fp32"), slow=True),
    ]
