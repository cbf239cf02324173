"""The ways of `scoring.py`: each makes a call that scores all pairs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.config import AdapterConfig, VacsrConfig
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel_pack import FP8
from vacsr.scoring.kernel_scorer import FinderScorer, KernelScorer
from vacsr.scoring.topk import Direction

CHUNK = 128
LINEAR, WIDE, COSINE = "linear", "16", "16 + cosine"
DECODERS = {
    LINEAR: AdapterConfig(decoder_hidden=0, residual="none"),
    WIDE: AdapterConfig(decoder_hidden=16, residual="none"),
    COSINE: AdapterConfig(decoder_hidden=16, residual="cosine"),
}


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
    make: Callable[[Problem], Callable[[], object]]
    rounds: int | None = None  # fewer for slow ones
    note: str = ""


@torch.no_grad()
def problem(images: int, texts: int, dim: int) -> Problem:
    """Fresh weights, with none of the zeros that some start from."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    methods = {}
    for name, config in DECODERS.items():
        method = Vacsr(dim, VacsrConfig(adapter=config)).eval().cuda()
        for parameter in method.parameters():
            parameter.copy_(draw(*parameter.shape) / max(1, parameter.shape[-1]) ** 0.5)
        methods[name] = method
    return Problem(
        functional.normalize(draw(images, dim), dim=1), functional.normalize(draw(texts, dim), dim=1), methods
    )


def batches(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def ceiling(p: Problem) -> Callable[[], object]:
    """[16·d, d] × [d, T] products, one for every 16 images, into memory that is there."""
    left = torch.randn(16 * p.v.shape[1], p.v.shape[1], device="cuda", dtype=torch.bfloat16)
    right = p.t.to(torch.bfloat16).T
    out = torch.empty(len(left), len(p.t), device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        for here in batches(len(p.v), 16):
            rows = (here.stop - here.start) * p.v.shape[1]
            torch.mm(left[:rows], right, out=out[:rows])

    return call


def ceiling_fp8(p: Problem) -> Callable[[], object]:
    """The same in e4m3 with one scale a tensor."""
    left = torch.randn(16 * p.v.shape[1], p.v.shape[1], device="cuda").to(FP8)
    right = (100 * functional.pad(p.t, (0, 0, 0, -len(p.t) % 16))).to(FP8).T
    one = torch.ones((), device="cuda")

    def call() -> None:
        for here in batches(len(p.v), 16):
            rows = left[: (here.stop - here.start) * p.v.shape[1]]
            torch._scaled_mm(rows, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return call


def paper_style(p: Problem, *, tf32: bool) -> Callable[[], object]:
    """Mean and log-variance heads for every pair of a chunk, as when the loss's forward is used to score."""
    adapter = p.methods[WIDE].adapter

    def call() -> Tensor:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        out = torch.empty(len(p.v), len(p.t), device="cuda")
        for rows in batches(len(p.v), CHUNK):
            for cols in batches(len(p.t), CHUNK):
                posterior = adapter.posterior(adapter.features(p.v[rows, None], p.t[None, cols]))
                z = (posterior.log_alpha.exp().unsqueeze(-1) * posterior.mean).sum(dim=-2)
                out[rows, cols] = adapter.decode(z)
        torch.backends.cuda.matmul.allow_tf32 = False
        return out

    return call


def folded(p: Problem, decoder: str) -> Callable[[], object]:
    """The library's torch path."""
    scorer, v, t = BlockScorer(p.methods[decoder], dtype=torch.bfloat16), Embedding(p.v), Embedding(p.t)
    return lambda: scorer.block(v, t)


def folded_compiled(p: Problem, decoder: str) -> Callable[[], object]:
    """The folded logits of 4 images with all texts, compiled, over all images."""
    folded = p.methods[decoder].adapter.fold().to(p.v.device, torch.bfloat16)
    tile = torch.compile(folded.logits, dynamic=False)

    def call() -> Tensor:
        out = torch.empty(len(p.v), len(p.t), device="cuda")
        for rows in batches(len(p.v), 4):
            out[rows] = tile(p.v[rows], p.t)
        return out

    return call


def kernel_matrix(p: Problem, decoder: str, dtype: torch.dtype) -> Callable[[], object]:
    """Every score written."""
    scorer, v, t = KernelScorer(p.methods[decoder], dtype=dtype), Embedding(p.v), Embedding(p.t)
    return lambda: scorer.block(v, t)


def kernel_topk(p: Problem, decoder: str, dtype: torch.dtype) -> Callable[[], object]:
    """No matrix: the best 10 of each image and of each text."""
    scorer, v, t = KernelScorer(p.methods[decoder], dtype=dtype), Embedding(p.v), Embedding(p.t)
    return lambda: scorer.topk_both(v, t, k=10)


def default_topk(p: Problem, decoder: str, direction: Direction) -> Callable[[], object]:
    """What `PairScores.topk` does by default: the kernel finds, float32 scores again what it found."""
    scorer, v, t = FinderScorer(p.methods[decoder]), Embedding(p.v), Embedding(p.t)
    return lambda: scorer.topk(v, t, k=10, direction=direction)


def ways() -> list[Way]:
    """In the order of the table."""
    half, low = torch.bfloat16, FP8
    slow = "one timed run"
    return [
        Way("ceiling (cuBLAS)", "–", "bf16", ceiling),
        Way("ceiling (cuBLAS)", "–", "fp8", ceiling_fp8, note="one scale a tensor"),
        Way("kernel", LINEAR, "bf16", lambda p: kernel_matrix(p, LINEAR, half)),
        Way("kernel", WIDE, "bf16", lambda p: kernel_matrix(p, WIDE, half)),
        Way("kernel", COSINE, "bf16", lambda p: kernel_matrix(p, COSINE, half)),
        Way("kernel", WIDE, "fp16", lambda p: kernel_matrix(p, WIDE, torch.float16)),
        Way("kernel, top-10 both ways", LINEAR, "bf16", lambda p: kernel_topk(p, LINEAR, half)),
        Way("kernel, top-10 both ways", WIDE, "bf16", lambda p: kernel_topk(p, WIDE, half)),
        Way("default topk(10)", WIDE, "fp16, fp32", lambda p: default_topk(p, WIDE, "i2t"), note="texts of images"),
        Way("default topk(10)", WIDE, "fp16, fp32", lambda p: default_topk(p, WIDE, "t2i"), note="images of texts"),
        Way("kernel", LINEAR, "fp8", lambda p: kernel_matrix(p, LINEAR, low)),
        Way("kernel", WIDE, "fp8", lambda p: kernel_matrix(p, WIDE, low)),
        Way("kernel, top-10 both ways", WIDE, "fp8", lambda p: kernel_topk(p, WIDE, low), note="30 of each rescored"),
        Way("folded, compiled", LINEAR, "bf16", lambda p: folded_compiled(p, LINEAR), 1),
        Way("folded, eager", LINEAR, "bf16", lambda p: folded(p, LINEAR), 2),
        Way("folded, eager", WIDE, "bf16", lambda p: folded(p, WIDE), 2),
        Way("paper-style", WIDE, "TF32", lambda p: paper_style(p, tf32=True), 1, slow),
        Way("paper-style", WIDE, "fp32", lambda p: paper_style(p, tf32=False), 1, slow),
    ]  # fmt: skip
