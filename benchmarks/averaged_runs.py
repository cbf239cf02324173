"""What averaging buys: figures of single runs, and of every two of them with their scores averaged.

    python benchmarks/averaged_runs.py runs/tolerance/clean/infonce/seed-* [--split test]
    python benchmarks/averaged_runs.py clean/infonce/seed-* --json docs/results/averaged-runs.json --name clean/infonce

Methods that train two networks and score with both (NCR, BiCro) have this gain in their figures; this measures it for
any other method, and for these what the first of their networks has alone. The runs must be of one recipe but for the
seed; the data are those of the first run's config.yaml. --json adds them to a file under --name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import NamedTuple

import torch

from vacsr.config.io import read_yaml
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.evaluate.retrieval import evaluate_scores
from vacsr.evaluate.scored import MatrixScores
from vacsr.files import write_text
from vacsr.scoring import PairScorer


class Retrieval(NamedTuple):
    """Of one score matrix."""

    rsum: float
    map_at_r_i2t: float
    map_at_r_t2i: float


def retrieval(score: torch.Tensor, pairs: PairSet | PhotoSet) -> Retrieval:
    """Of a score matrix. [I, T]"""
    found = evaluate_scores(MatrixScores(score), pairs).results[0]
    return Retrieval(found["rsum"], found["i2t"]["map_at_r"], found["t2i"]["map_at_r"])


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


def keep(path: Path, name: str, found: dict[str, list[Retrieval]]) -> None:
    """Add to a file of results."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
    runs[name] = {kind: [one._asdict() for one in figures] for kind, figures in found.items()}
    write_text(path, json.dumps({"schema": 1, "runs": dict(sorted(runs.items()))}, indent=1) + "\n")


def main() -> None:
    """Print both means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, two or more")
    parser.add_argument("--split", default="test")
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--name", help="what these runs are called there")
    options = parser.parse_args()
    if len(options.runs) < 2:
        print("give two run folders or more; nothing to do without them")
        return
    if (options.json is None) != (options.name is None):
        parser.error("--json and --name go together — give both")
    pairs = load_pairs(read_yaml(options.runs[0] / "config.yaml")["data"]["pairs"], split=options.split)
    scores = [read_scores(run, pairs) for run in options.runs]
    apart = [(one.first + other.first) / 2 for one, other in itertools.combinations(scores, 2)]
    found = {
        "one network": [retrieval(score.first, pairs) for score in scores],
        "its own two": [retrieval(score.both, pairs) for score in scores if score.both is not None],
        "two trained apart": [retrieval(score, pairs) for score in apart],
    }
    for name, figures in found.items():
        if not figures:
            continue
        shown = ", ".join(f"{figure.rsum:.1f}" for figure in figures)
        means = [statistics.fmean(column) for column in zip(*figures, strict=True)]
        print(f"{name}: RSUM {means[0]:.1f} ({shown}), mAP@R {means[1]:.1f} / {means[2]:.1f}")
    if options.json:
        keep(options.json, options.name, found)


if __name__ == "__main__":
    main()
