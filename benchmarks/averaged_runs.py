"""What averaging buys: results of single runs, and of every two of them with their scores averaged.

    python benchmarks/averaged_runs.py runs/tolerance/clean/infonce/seed-* [--split test]
    python benchmarks/averaged_runs.py clean/infonce/seed-* --json docs/results/averaged-runs.json --name clean/infonce

Methods that train two networks and score with both (NCR, BiCro) have this gain in their results; this measures it for
any other method, and for these what the first of their networks has alone. The runs must be of one recipe but for the
seed; the data are those of the first run's config.yaml. --json adds them to a file under --name.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import NamedTuple

import torch

from _common import parser
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.evaluate.report import evaluate_scores
from vacsr.evaluate.score_files import MatrixScores
from vacsr.files import write_json
from vacsr.scoring import PairScorer
from vacsr.train.checkpoint import run_pairs


class Retrieval(NamedTuple):
    """Of one score matrix."""

    rsum: float
    map_at_r_i2t: float
    map_at_r_t2i: float


def retrieval(score: torch.Tensor, pairs: PairSet | PhotoSet) -> Retrieval:
    """Of a score matrix. [I, T]"""
    result = evaluate_scores(MatrixScores(score), pairs).results[0]
    return Retrieval(result["rsum"], result["i2t"]["map_at_r"], result["t2i"]["map_at_r"])


class Scores(NamedTuple):
    """Of one run. [I, T] each"""

    first: torch.Tensor
    """Of its network, the first where there are two."""
    both: torch.Tensor | None
    """As it scores with two; None where it has one."""


def read_scores(run: Path, pairs: PairSet | PhotoSet) -> Scores:
    """Score all pairs with what a run has kept."""
    scorer = PairScorer.from_pretrained(run, device="cpu")
    both = None if scorer.model.second is None else scorer.score_set(pairs).score
    scorer.model.second = None
    return Scores(scorer.score_set(pairs).score, both)


def main() -> None:
    """Print both means."""
    choices = parser(__doc__)
    choices.add_argument("runs", nargs="*", type=Path, help="run folders, two or more")
    choices.add_argument("--split", default="test")
    choices.add_argument("--name", help="what these runs are called in the file")
    args = choices.parse_args()
    if len(args.runs) < 2:
        print("give two run folders or more; nothing to do without them")
        return
    pairs = load_pairs(run_pairs(args.runs[0]), split=args.split)
    scores = [read_scores(run, pairs) for run in args.runs]
    apart = [(one.first + other.first) / 2 for one, other in itertools.combinations(scores, 2)]
    kinds = {
        "one network": [retrieval(score.first, pairs) for score in scores],
        "its own two": [retrieval(score.both, pairs) for score in scores if score.both is not None],
        "two trained apart": [retrieval(score, pairs) for score in apart],
    }
    for kind, results in kinds.items():
        if results:
            shown = ", ".join(f"{result.rsum:.1f}" for result in results)
            means = [statistics.fmean(column) for column in zip(*results, strict=True)]
            print(f"{kind}: RSUM {means[0]:.1f} ({shown}), mAP@R {means[1]:.1f} / {means[2]:.1f}")
    if args.json is not None:
        runs = json.loads(args.json.read_text(encoding="utf-8"))["runs"] if args.json.exists() else {}
        runs[args.name or "runs"] = {kind: [one._asdict() for one in results] for kind, results in kinds.items()}
        write_json(args.json, {"schema": 1, "runs": dict(sorted(runs.items()))})


if __name__ == "__main__":
    main()
