"""Scores of all pairs: the paper's way, the folded ones and the kernel beside the bare product none can do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vacsr.bench.result import BenchResult, Cell
from vacsr.bench.scoring_ways import BARE, PAPERS, SQUARE, Problem, Runner, random_problem, ways
from vacsr.bench.timing import timed_in_turn, what_failed
from vacsr.efficiency import where_it_runs
from vacsr.methods.base import Embedding
from vacsr.scoring.folded import BlockScorer
from vacsr.scoring.topk import stable_topk

if TYPE_CHECKING:
    from vacsr.bench import Size

SIZES = {"small": (64, 1000, 512), "coco": (5000, 25000, 1024)}
"""Images, texts, d."""
COLUMNS = {
    "way": "way", "precision": "precision", "seconds": "seconds", "tflops": "trunk TFLOP/s",
    "of_ceiling": "time / bare product", "of_best": "time / best product",
    "faster": "faster than the paper's", "error": "error / spread", "overlap": "top-10 kept",
}  # fmt: skip
_NOTES = (
    "Seconds of the fastest round, all ways in turn; errors against the folded float32 scores, root mean square.",
    "Bare product: the trunk's own, for all pairs. Best product: that or the square ones back to back, whichever is "
    "faster. One alone, after a pause, shows the clocks of a cool machine: no share is taken of it.",
)
_CHECKED = 16  # images on which errors are measured


@torch.inference_mode()
def bench_scoring(size: Size, device: torch.device, say: Callable[[str], None]) -> BenchResult:
    """Every way on random weights and unit vectors; one that fails says so and the others go on."""
    images, texts, dim = SIZES[size]
    made = random_problem(images, texts, dim, device=device)
    exact = BlockScorer(made.method).block(_head(made.v), made.t)
    rows, runners = _first_calls(made, exact, say)
    say("all of them in turn")
    timed = timed_in_turn({name: runner.run for name, runner in runners.items()}, device=device)
    for name, found in timed.found.items():
        operations = runners[name].operations or made.operations
        rows[name] |= {**found._asdict(), "tflops": operations / found.seconds / 1e12}
    for name, problem in timed.problems.items():
        rows[name]["problem"] = problem
    shown = list(rows.values())
    _compare(shown)
    settings = {"images": images, "texts": texts, "d": dim, "decoder": made.method.adapter.config.decoder_hidden}
    return BenchResult("scoring", where_it_runs(device), settings, shown, COLUMNS, ("seconds",), _NOTES, label="bar")


def _first_calls(
    made: Problem, exact: Tensor, say: Callable[[str], None]
) -> tuple[dict[str, dict[str, Cell]], dict[str, Runner]]:
    """A row of each way, and those that can be called again."""
    rows: dict[str, dict[str, Cell]] = {}
    runners: dict[str, Runner] = {}
    for way in ways(made):
        name = f"{way.name}, {way.precision}"
        say(f"{name}: first call")
        rows[name] = {"way": way.name, "precision": way.precision, "bar": name}
        try:
            runner = way.make()
            (runner.warm or runner.run)()
            rows[name] |= {} if runner.check is None else _errors(runner.check(_head(made.v)), exact)
            if runner.alone is not None:
                single = {"way": "one of them alone, after a pause", "precision": way.precision}
                rows[f"{name}, alone"] = {**single, "tflops": runner.alone}
            runners[name] = runner
        except Exception as error:  # one way must not end the run
            rows[name]["problem"] = what_failed(error)
    return rows, runners


def _head(v: Embedding) -> Embedding:
    return Embedding(v.mean[:_CHECKED])


def _errors(found: Tensor, exact: Tensor) -> dict[str, Cell]:
    """Root mean square over the spread of the scores, and the share of the top-10 that is the same."""
    own, other = (stable_topk(x, 10).index for x in (found, exact))
    kept = (own.unsqueeze(2) == other.unsqueeze(1)).any(dim=2).double().mean()
    return {"error": float((found - exact).square().mean().sqrt() / exact.std()), "overlap": float(kept)}


def _compare(rows: list[dict[str, Cell]]) -> None:
    """With the first bare product, float32 on a CPU and bfloat16 on a GPU, the best product in that precision, and the
    paper's way. All by rates: where the work is the same, their ratio is that of the times.
    """
    ceiling = next((_rate(row) for row in rows if row["way"] == BARE), None)
    square = next((_rate(row) for row in rows if str(row["way"]).startswith(SQUARE)), None)
    best = max((rate for rate in (ceiling, square) if rate is not None), default=None)
    papers = next((_rate(row) for row in rows if str(row["way"]).startswith(PAPERS)), None)
    for row in rows:
        rate = _rate(row)
        if rate is not None and "seconds" in row:
            row["of_ceiling"] = None if ceiling is None else ceiling / rate
            row["of_best"] = None if best is None else best / rate
            row["faster"] = None if papers is None else rate / papers


def _rate(row: dict[str, Cell]) -> float | None:
    """TFLOP/s."""
    found = row.get("tflops")
    return found if isinstance(found, float) else None
