"""Scores of all pairs: the paper's way, the folded ones and the kernel beside the bare product none can do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.bench.result import BenchResult, Cell
from vacsr.bench.timing import timed_in_turn, what_failed
from vacsr.config import AdapterConfig, VacsrConfig
from vacsr.efficiency import where_it_runs
from vacsr.errors import VacsrError
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr
from vacsr.scoring.cpu import offered_dtypes
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.kernel import available
from vacsr.scoring.kernel_scorer import KernelScorer
from vacsr.scoring.kernel_topk import topk_both
from vacsr.scoring.topk import stable_topk
from vacsr.train.precision import matmul_precision

if TYPE_CHECKING:
    from vacsr.bench import Size

SIZES = {"small": (64, 1000, 512), "coco": (5000, 25000, 1024)}
"""Images, texts, d."""
COLUMNS = {
    "way": "way", "precision": "precision", "seconds": "seconds", "tflops": "trunk TFLOP/s",
    "of_ceiling": "time / bare product", "faster": "faster than the paper's", "error": "error / spread",
    "overlap": "top-10 kept",
}  # fmt: skip
_NOTE = "Seconds of the fastest round, all ways in turn; errors against the folded float32 scores, root mean square."
_CHUNK = 128  # images and texts at a time in the paper's way
_CHECKED = 16  # images on which errors are measured
_ROWS = 64  # images a block where scores are streamed
_OUT = {"cpu": 1, "cuda": 1 << 29}  # numbers of the bare product alive at a time: on a CPU those of one image


class Runner(NamedTuple):
    """A way with everything prepared."""

    run: Callable[[], object]
    check: Callable[[Embedding], Tensor] | None = None
    """Scores of some images with all texts, where they can differ."""


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


@torch.inference_mode()
def bench_scoring(size: Size, device: torch.device, say: Callable[[str], None]) -> BenchResult:
    """Every way on random weights and unit vectors; one that fails says so and the others go on."""
    images, texts, dim = SIZES[size]
    made = random_problem(images, texts, dim, device=device)
    exact = BlockScorer(made.method).block(_head(made.v), made.t)
    runners: dict[str, Callable[[], object]] = {}
    rows: dict[str, dict[str, Cell]] = {}
    for way in ways(made):
        name = f"{way.name}, {way.precision}"
        say(f"{name}: first call")
        rows[name] = {"way": way.name, "precision": way.precision, "bar": name}
        try:
            runner = way.make()
            runner.run()
            rows[name] |= {} if runner.check is None else _errors(runner.check(_head(made.v)), exact)
            runners[name] = runner.run
        except (RuntimeError, VacsrError) as error:
            rows[name]["problem"] = what_failed(error)
    say("all of them in turn")
    flops = 2.0 * images * texts * made.method.adapter.trunk.weight.numel()
    for name, found in timed_in_turn(runners, device=device).items():
        rows[name] |= {**found._asdict(), "tflops": flops / found.seconds / 1e12}
    _compare(list(rows.values()))
    settings = {"images": images, "texts": texts, "d": dim, "decoder": made.method.adapter.config.decoder_hidden}
    return BenchResult(
        "scoring", where_it_runs(device), settings, list(rows.values()), COLUMNS, "seconds", (_NOTE,), label="bar"
    )


def random_problem(images: int, texts: int, dim: int, *, device: torch.device) -> Problem:
    """Fresh weights with none of the zeros that some start from, and unit vectors."""
    generator = torch.Generator().manual_seed(0)
    method = Vacsr(dim, VacsrConfig(adapter=AdapterConfig())).eval()
    with torch.no_grad():
        for weight in method.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / max(1, weight.shape[-1]) ** 0.5)
    v, t = (functional.normalize(torch.randn(n, dim, generator=generator), dim=1) for n in (images, texts))
    return Problem(Embedding(v.to(device)), Embedding(t.to(device)), method.to(device))


def ways(of: Problem) -> Iterator[Way]:
    """In the order of the table; the first is the ceiling."""
    gpu = of.device.type == "cuda"
    dtypes = [torch.bfloat16, torch.float32] if gpu else offered_dtypes()
    for dtype in dtypes:
        yield Way("bare product", _name(dtype), partial(bare_product, of, dtype))
    for precision in ("fp32", "tf32") if gpu else ("fp32",):
        yield Way("the paper's: all heads, 128 × 128 pairs", precision, partial(papers_way, of, precision))
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
    if dtype == torch.int8:
        left, right = ((100 * x / x.abs().max()).to(dtype) for x in (texts, scaled))
        whole = torch.empty(len(texts), len(scaled), dtype=torch.int32)

        def multiply(n: int) -> None:
            torch._int_mm(left, right[: n * len(trunk)].T, out=whole[:, : n * len(trunk)])
    else:
        first, second = scaled.to(dtype), texts.to(dtype).T
        out = torch.empty(len(scaled), len(texts), dtype=dtype, device=of.device)

        def multiply(n: int) -> None:
            torch.mm(first[: n * len(trunk)], second, out=out[: n * len(trunk)])

    def run() -> None:
        for start in range(0, count, group):
            multiply(min(group, count - start))

    return Runner(run)


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

    return Runner(lambda: scores(of.v), scores)


def scorer_way(of: Problem, kind: type[BlockScorer], dtype: torch.dtype) -> Runner:
    """One of the library's."""
    scorer = kind(of.method, dtype=dtype)
    return Runner(lambda: scorer.block(of.v, of.t), lambda v: scorer.block(v, of.t))


def streamed(of: Problem) -> Runner:
    """Top-10 of both sides in one pass without the matrix."""
    scorer = BlockScorer(of.method)
    return Runner(lambda: topk_both((scorer.block(Embedding(v), of.t) for v in _parts(of.v.mean, _ROWS)), 10))


def kernel_topk(of: Problem) -> Runner:
    """The same by the kernel."""
    scorer = KernelScorer(of.method, dtype=torch.bfloat16)
    return Runner(lambda: scorer.topk_both(of.v, of.t, k=10))


def _parts(x: Tensor, size: int) -> tuple[Tensor, ...]:
    return torch.split(x, size)


def _head(v: Embedding) -> Embedding:
    return Embedding(v.mean[:_CHECKED])


def _errors(found: Tensor, exact: Tensor) -> dict[str, Cell]:
    """Root mean square over the spread of the scores, and the share of the top-10 that is the same."""
    own, other = (stable_topk(x, 10).index for x in (found, exact))
    kept = (own.unsqueeze(2) == other.unsqueeze(1)).any(dim=2).double().mean()
    return {"error": float((found - exact).square().mean().sqrt() / exact.std()), "overlap": float(kept)}


def _compare(rows: list[dict[str, Cell]]) -> None:
    """With the first of the bare products, float32 on a CPU and bfloat16 on a GPU, and with the paper's way."""
    ceiling = next((row.get("seconds") for row in rows if row["way"] == "bare product"), None)
    papers = next((row.get("seconds") for row in rows if str(row["way"]).startswith("the paper's")), None)
    for row in rows:
        seconds = row.get("seconds")
        if isinstance(seconds, float):
            row["of_ceiling"] = seconds / ceiling if isinstance(ceiling, float) else None
            row["faster"] = papers / seconds if isinstance(papers, float) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
