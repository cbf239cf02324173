"""How often does the promise of `abstain` hold? Many random halves of held-out pairs: one calibrates, the other checks.

    python benchmarks/abstain.py RUN --pairs features:FILE,captions=FILE --gallery 100 --rounds 20

Splits dev and test are put together and cut in half by image, again and again. All scores and uncertainties are
computed once and held, so the splits must be of some thousand images at most.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vacsr.data import PairSet, load_pairs
from vacsr.methods.base import Embedding
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search.calibrate import DIRECTIONS
from vacsr.search.candidates import Candidates, labelled_candidates, random_galleries
from vacsr.search.risk import MEASURES, RiskCheck, check_rule, fit_answer_rule

CHOOSE = 0.4  # as `vacsr calibrate`
WAYS = {"chosen": tuple(MEASURES), "all but σ": ("combined",), "score alone": ("score",)}


class Table:
    """Scores and uncertainties of all pairs, looked up; stands for PairScores."""

    def __init__(self, scorer: PairScorer, pairs: PairSet) -> None:
        found = scorer.score_set(pairs)
        self.images: Embedding = found.images
        self.texts: Embedding = found.texts
        self.score = found.score.cpu()
        self.sigma: Tensor | None = None
        cols = torch.arange(len(pairs))
        parts = [found.uncertainty(torch.full_like(cols, row), cols) for row in range(len(pairs.image_ids))]
        known = [part.cpu() for part in parts if part is not None]
        if known:
            self.sigma = torch.stack(known)

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """[N], [N] -> [N]"""
        return self.score[rows, cols]

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """[N], [N] -> [N]"""
        return None if self.sigma is None else self.sigma[rows, cols]


def held_out(spec: str) -> PairSet:
    """dev and test as one set."""
    dev, test = load_pairs(spec, split="dev"), load_pairs(spec, split="test")
    assert isinstance(dev, PairSet), "this benchmark reads features"
    assert isinstance(test, PairSet), "this benchmark reads features"
    return replace(
        dev,
        images=torch.cat((dev.images, test.images)),
        texts=torch.cat((dev.texts, test.texts)),
        image_ids=dev.image_ids + test.image_ids,
        caption_ids=dev.caption_ids + test.caption_ids,
        caption_image=torch.cat((dev.caption_image, test.caption_image + len(dev.image_ids))),
        captions=None,
        split="dev + test",
    )


def halves(table: Table, pairs: PairSet, *, size: int, direction: Direction, seed: int) -> list[Candidates]:
    """Lists of two random halves, each searched in galleries of its own."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pairs.image_ids), generator=generator)
    found = []
    for half in order.chunk(2):
        galleries = [half[rows] for rows in random_galleries(len(half), size=size, generator=generator)]
        found.append(labelled_candidates(table, pairs, galleries, direction=direction))  # type: ignore[arg-type]
    return found


def check(fit: Candidates, other: Candidates, *, way: str, seed: int, risk: float) -> RiskCheck:
    """Calibrate on one half, count on the other."""
    choose = (np.random.default_rng(seed).random(int(fit.image.max()) + 1) < CHOOSE)[fit.image]
    if way == "all but σ":
        fit, other = fit._replace(sigma=None), other._replace(sigma=None)
    rule = fit_answer_rule(
        fit, choose, risk=risk, confidence=0.9, generator=np.random.default_rng(seed), measures=WAYS[way]
    )
    return check_rule(rule, other)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--pairs", required=True)
    parser.add_argument("--gallery", type=int, nargs="+", default=[50, 100])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--risk", type=float, default=0.1)
    given = parser.parse_args()
    pairs = held_out(given.pairs)
    table = Table(PairScorer.from_pretrained(given.run), pairs)
    print("| gallery | direction | confidence | answered | wrong | holds | silent |\n|---|---|---|---|---|---|---|")
    for size in given.gallery:
        for direction in DIRECTIONS:
            found = [halves(table, pairs, size=size, direction=direction, seed=seed) for seed in range(given.rounds)]
            for way in WAYS:
                checks = [
                    check(fit, other, way=way, seed=seed, risk=given.risk) for seed, (fit, other) in enumerate(found)
                ]
                answered = 100 * np.mean([one.coverage for one in checks])
                wrong = 100 * sum(one.wrong for one in checks) / max(1, sum(one.answered for one in checks))
                holds = sum(not one.risk > given.risk for one in checks)
                silent = sum(not one.answered for one in checks)
                cells = [size, direction, way, f"{answered:.1f}%", f"{wrong:.1f}%", f"{holds}/{len(checks)}", silent]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
