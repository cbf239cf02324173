"""`vacsr bench scoring`: the scores of all pairs, several ways in one run.

The ceiling is the trunk's matrix product, which no way can do without; the slowest way is the paper's, all heads for
every pair. Between them are folded scoring in plain torch and the kernel. `benchmarks/scoring.py` adds decoders and
precisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig
from vacsr.bench import BenchResult, Cell, Log, Prepared, Way, describe_device, measure
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.scoring import BlockScorer, Direction, Engine, choose_engine
from vacsr.scoring.folded import FP8
from vacsr.scoring.kernel import KernelScorer, available
from vacsr.scoring.topk import DIRECTIONS, stable_topk
from vacsr.train.step import matmul_precision

SIZES = {
    "small": {"images": 64, "texts": 1000, "dim": 512},
    "coco": {"images": 5000, "texts": 25_000, "dim": 1024},
}
COLUMNS = {
    "way": "way", "precision": "precision", "seconds": "seconds", "tflops": "trunk TFLOP/s",
    "of_ceiling": "time / bare product", "faster": "faster than the paper's", "error": "error / spread",
    "overlap": "top-10 kept",
}  # fmt: skip
BARE, PAPER = "bare product", "the paper's: all heads, 128 × 128 pairs"
_CHUNK = 128  # images and texts at a time in the paper's way
_NOTES = (
    "Seconds of the fastest round, all ways in turn; errors against the folded float32 scores, root mean square.",
    "Bare product: the trunk's own, for all pairs.",
)


class Problem:
    """What is scored: unit vectors and an adapter, all random, also the weights that training starts from zero."""

    @torch.no_grad()
    def __init__(
        self, images: int, texts: int, dim: int, *, device: torch.device, adapter: AdapterConfig | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device, self.method = device, Vacsr(VacsrConfig(adapter=adapter or AdapterConfig()), dim=dim).eval()
        for weight in self.method.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / max(1, weight.shape[-1]) ** 0.5)
        v, t = (functional.normalize(torch.randn(n, dim, generator=generator), dim=1) for n in (images, texts))
        self.v, self.t = Embedding(v.to(device)), Embedding(t.to(device))
        self.operations = 2.0 * images * texts * self.method.to(device).adapter.trunk.weight.numel()
        """Of the trunk for all pairs, which every way does."""

    def errors(self, scores: Callable[[Embedding], Tensor]) -> dict[str, Cell]:
        """Of a way's scores of a few images with all texts, against the folded float32 scores."""
        head = Embedding(self.v.mean[:16])
        ours, exact = scores(head), BlockScorer(self.method).block(head, self.t)
        best, reference = (stable_topk(x, 10).index for x in (ours, exact))
        return {"error": relative_error(ours, exact), "overlap": top_overlap(best, reference)}


def relative_error(scores: Tensor, exact: Tensor) -> float:
    """Root mean square over the spread of the exact scores."""
    return float((scores - exact).square().mean().sqrt() / exact.std())


def top_overlap(index: Tensor, reference: Tensor) -> float:
    """The share of the reference's best items that are kept. [Q, k], [Q, k]"""
    return float((reference.unsqueeze(2) == index.unsqueeze(1)).any(dim=2).double().mean())


def run(device: torch.device, *, size: str | None = None, log: Log = lambda _: None) -> BenchResult:
    """Every way on random weights; the default size is ``coco`` on a GPU, ``small`` elsewhere.

    ``log`` receives the name of each way before it is timed.
    """
    images, texts, dim = SIZES[size or ("coco" if device.type == "cuda" else "small")].values()
    problem = Problem(images, texts, dim, device=device)
    with torch.inference_mode():
        rows = measure(ways(problem), device=device, log=log)
    rates = [(row["way"], row["tflops"]) for row in rows if "tflops" in row]
    bare, paper = (next((rate for way, rate in rates if way == name), None) for name in (BARE, PAPER))
    for row in rows:
        row["bar"] = f"{row['way']}, {row['precision']}"
        if "tflops" in row:
            row |= {"of_ceiling": bare and bare / row["tflops"], "faster": paper and row["tflops"] / paper}
    decoder = problem.method.adapter.config.decoder_hidden
    settings = {"images": images, "texts": texts, "d": dim, "decoder": decoder}
    return BenchResult("scoring", describe_device(device), settings, rows, COLUMNS, _NOTES)


def ways(problem: Problem) -> Iterator[Way]:
    """In the order of the table, the ceiling first."""
    gpu = problem.device.type == "cuda"
    dtypes = [torch.bfloat16, torch.float32] if gpu else [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        yield _way(BARE, dtype, partial(bare_product, problem, dtype))
    for precision in ("fp32", "tf32") if gpu else ("fp32",):
        yield _way(PAPER, precision, partial(papers_way, problem, precision))
    for dtype in dtypes:
        yield _way("folded", dtype, partial(matrix, problem, BlockScorer, dtype))
    yield _way("folded, top-10 both ways", torch.float32, lambda: topk(problem, engine=BlockScorer(problem.method)))
    if gpu and available(problem.device):
        for dtype in (torch.bfloat16, FP8):
            yield _way("kernel", dtype, partial(matrix, problem, KernelScorer, dtype))
        yield _way("kernel, top-10 both ways", torch.bfloat16, partial(topk, problem, torch.bfloat16))


def _way(name: str, precision: torch.dtype | str, prepare: Callable[[], Prepared]) -> Way:
    return Way({"way": name, "precision": str(precision).removeprefix("torch.")}, prepare)


def bare_product(problem: Problem, dtype: torch.dtype) -> Prepared:
    """The trunk's product for all pairs; the scaled weights of the first images serve for all."""
    trunk, images = problem.method.adapter.trunk.weight, len(problem.v.mean)
    group = min(images, 16 if problem.device.type == "cuda" else 1)  # images that share one product
    scaled = (problem.v.mean[:group].unsqueeze(1) * trunk).view(-1, trunk.shape[1])
    return repeated_product(scaled.to(dtype), problem.t.mean.T.to(dtype), times=-(-images // group))


def repeated_product(left: Tensor, right: Tensor, *, times: int) -> Prepared:
    """left × right, back to back. [m, d], [d, k]"""
    out = left.new_empty(len(left), right.shape[1])

    def run() -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    return Prepared(run, operations=2.0 * times * left.numel() * right.shape[1])


def papers_way(problem: Problem, precision: str) -> Prepared:
    """Chunks of 128 × 128 pairs through trunk, all heads and decoder."""
    adapter, texts = problem.method.adapter, problem.t.mean

    def chunk(v: Tensor, t: Tensor) -> Tensor:
        hidden = adapter.features(v.unsqueeze(1), t.unsqueeze(0))
        mean, _ = adapter.mean(hidden), adapter.log_var(hidden)
        logit = adapter.decode((adapter.log_alpha(hidden).exp().unsqueeze(-1) * mean).sum(dim=-2))
        residual = adapter.residual_logit(v @ t.T)
        return logit if residual is None else logit + residual

    def scores(v: Embedding) -> Tensor:
        with matmul_precision(precision):
            rows = [[chunk(some, part) for part in torch.split(texts, _CHUNK)] for some in torch.split(v.mean, _CHUNK)]
            return torch.cat([torch.cat(row, dim=1) for row in rows])

    first = Embedding(problem.v.mean[:_CHUNK])
    return Prepared(lambda: scores(problem.v), problem.errors(scores), problem.operations, lambda: scores(first))


def matrix(problem: Problem, engine: type[BlockScorer] | type[KernelScorer], dtype: torch.dtype) -> Prepared:
    """All scores by one of the library's engines."""
    scorer: Engine = engine(problem.method, dtype=dtype)
    errors = problem.errors(lambda v: scorer.block(v, problem.t))
    return Prepared(lambda: scorer.block(problem.v, problem.t), errors, problem.operations)


def topk(
    problem: Problem, dtype: torch.dtype = torch.float32, *, engine: Engine | None = None,
    directions: Sequence[Direction] = DIRECTIONS,
) -> Prepared:  # fmt: skip
    """The top-10 of one side, or of both in one pass, without the matrix; by the engine that `PairScorer` takes."""
    engine = engine or choose_engine(problem.method, device=problem.device, dtype=dtype)
    rank = partial(engine.topk, problem.v, problem.t, k=10, directions=directions)
    return Prepared(rank, operations=problem.operations)
