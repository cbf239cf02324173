"""Scores on a CPU against the bare matrix product: 200 candidates of each query, and all pairs.

    python benchmarks/rerank.py [--dims 256,512,1024] [--images 1000] [--texts 5000] [--threads 1] [--json FILE]

`torch.mm` multiplies as many pairs as the scorer scores, [pairs, d] × [d, d], or for all pairs the texts by one image's
weights again and again. Both take turns; seconds are those of the fastest round, with one thread in time of the
processor, which other work does not lengthen. The decoder is 16-wide with cosine; errors and the kept top-10 are
relative to float32 scores. Weights and vectors are random.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from _common import finish, log, parser
from vacsr.bench import BenchResult, Prepared, describe_device
from vacsr.bench.scoring import Problem, relative_error, repeated_product, top_overlap
from vacsr.methods.base import Embedding
from vacsr.scoring import BlockScorer
from vacsr.scoring.cascade import candidate_scores
from vacsr.scoring.topk import stable_topk

CANDIDATES = 200
PRODUCT, SCORES = "torch.mm", "scores"
COLUMNS = {key: key for key in ("work", "d", "precision", "way", "seconds")} | {
    "tflops": "TFLOP/s", "share": "share of torch.mm", "error": "error / spread", "overlap": "top-10 kept",
}  # fmt: skip


def product(problem: Problem, dtype: torch.dtype, *, rows: int, times: int) -> Prepared:
    weights = problem.method.adapter.trunk.weight
    return repeated_product(torch.randn(rows, weights.shape[1]).to(dtype), weights.to(dtype).T, times=times)


def rerank(problem: Problem, dtype: torch.dtype) -> Prepared:
    """Every query with its own 200 items."""
    queries, items = problem.v, problem.t
    index = torch.arange(len(items.mean)).view(len(queries.mean), CANDIDATES)
    score = partial(candidate_scores, queries=queries, items=items, index=index)
    engine, exact = BlockScorer(problem.method, dtype=dtype), BlockScorer(problem.method)
    return Prepared(partial(score, engine), _errors(score(engine), score(exact)), _operations(problem, index.numel()))


def all_pairs(problem: Problem, dtype: torch.dtype) -> Prepared:
    engine, head = BlockScorer(problem.method, dtype=dtype), Embedding(problem.v.mean[:16])
    errors = _errors(engine.block(head, problem.t), BlockScorer(problem.method).block(head, problem.t))
    return Prepared(partial(engine.block, problem.v, problem.t), errors, problem.operations)


def _operations(problem: Problem, pairs: int) -> float:
    return 2.0 * pairs * problem.method.adapter.trunk.weight.numel()


def _errors(scores: torch.Tensor, exact: torch.Tensor) -> dict[str, Any]:
    kept = top_overlap(*(stable_topk(x, 10).index for x in (scores, exact)))
    return {"error": relative_error(scores, exact), "overlap": kept}


def timed(ways: dict[str, Prepared], *, rounds: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """The fastest round of each way. They take turns; the first call of a round only fills the caches."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way.run()
            started = clock()
            way.run()
            times[name].append(clock() - started)
    rows = []
    for name, way in ways.items():
        log(f"{name}: {min(times[name]):.3g} s")
        known = {"way": name, "seconds": min(times[name]), "median": statistics.median(times[name]), "rounds": rounds}
        rows.append({**known, **(way.cells or {}), "tflops": (way.operations or 0) / min(times[name]) / 1e12})
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--dims", type=lambda text: [*map(int, text.split(","))], default=[256, 512, 1024])
    made.add_argument("--images", type=int, default=1000)
    made.add_argument("--texts", type=int, default=5000)
    made.add_argument("--threads", type=int, default=1)
    args, device = made.parse_args(), torch.device("cpu")
    torch.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    rows: list[dict[str, Any]] = []
    for dim in args.dims:
        work = [(f"{n} × {CANDIDATES} candidates", n, n * CANDIDATES, n * CANDIDATES, 1, rerank, 100) for n in (1, 8)]
        whole = f"all {args.images:,} × {args.texts:,}"
        work.append((whole, args.images, args.texts, args.texts, args.images, all_pairs, 9))
        for name, images, texts, rows_at_a_time, times, scores, rounds in work:
            problem = Problem(images, texts, dim, device=device)
            for dtype in (torch.bfloat16, torch.float32)[: 1 if scores is all_pairs else 2]:
                cells = {"work": name, "d": dim, "precision": str(dtype).removeprefix("torch.")}
                with torch.inference_mode():
                    ways = {
                        PRODUCT: product(problem, dtype, rows=rows_at_a_time, times=times),
                        SCORES: scores(problem, dtype),
                    }
                    both = [{**cells, **row} for row in timed(ways, rounds=rounds, clock=clock)]
                both[1]["share"] = both[1]["tflops"] / both[0]["tflops"]
                rows += both
    settings = {"decoder": "16-wide + cosine", "candidates": CANDIDATES}
    finish(BenchResult("rerank", describe_device(device), settings, rows, COLUMNS), args.json)


if __name__ == "__main__":
    main()
