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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.evaluate.retrieval import evaluate_scores
from vacsr.evaluate.scored import MatrixScores
from vacsr.files import write_text
from vacsr.recipes import read_yaml
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


def score_matrices(runs: Sequence[Path], pairs: PairSet | PhotoSet) -> Iterator[torch.Tensor]:
    """Of each run's network, the first where there are two. [I, T]"""
    for run in runs:
        scorer = PairScorer.from_pretrained(run, device="cpu")
        scorer.model.second = None
        yield scorer.score_set(pairs).score


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
    scores = list(score_matrices(options.runs, pairs))
    found = {
        "one": [retrieval(score, pairs) for score in scores],
        "two": [retrieval((one + other) / 2, pairs) for one, other in itertools.combinations(scores, 2)],
    }
    for name, figures in (("one network", found["one"]), ("two of them averaged", found["two"])):
        shown = ", ".join(f"{figure.rsum:.1f}" for figure in figures)
        means = [statistics.fmean(column) for column in zip(*figures, strict=True)]
        print(f"{name}: RSUM {means[0]:.1f} ({shown}), mAP@R {means[1]:.1f} / {means[2]:.1f}")
    if options.json:
        keep(options.json, options.name, found)


if __name__ == "__main__":
    main()
