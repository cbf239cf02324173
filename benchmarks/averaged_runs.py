"""What averaging buys: RSUM of single runs, and of every two of them with their scores averaged.

    python benchmarks/averaged_runs.py runs/tolerance/clean/infonce/seed-* [--split test]

Methods that train two networks and score with both (NCR, BiCro) have this gain in their figures; this measures it for
any other method. The runs must be of one recipe but for the seed; the data are those of the first run's config.yaml.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path

import torch

from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.evaluate.retrieval import evaluate_scores
from vacsr.evaluate.scored import MatrixScores
from vacsr.recipes import read_yaml
from vacsr.scoring import PairScorer


def rsum(score: torch.Tensor, pairs: PairSet | PhotoSet) -> float:
    """Of a score matrix. [I, T]"""
    return float(evaluate_scores(MatrixScores(score), pairs).results[0]["rsum"])


def main() -> None:
    """Print both means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, two or more")
    parser.add_argument("--split", default="test")
    options = parser.parse_args()
    if len(options.runs) < 2:
        print("give two run folders or more; nothing to do without them")
        return
    pairs = load_pairs(read_yaml(options.runs[0] / "config.yaml")["data"]["pairs"], split=options.split)
    scores = [PairScorer.from_pretrained(run, device="cpu").score_set(pairs).score for run in options.runs]
    singles = [rsum(score, pairs) for score in scores]
    doubles = [rsum((one + other) / 2, pairs) for one, other in itertools.combinations(scores, 2)]
    for name, found in (("one run", singles), ("two runs averaged", doubles)):
        shown = ", ".join(f"{value:.1f}" for value in found)
        print(f"{name}: RSUM {statistics.fmean(found):.1f} ({shown})")


if __name__ == "__main__":
    main()
