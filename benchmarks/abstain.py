"""How often does the guarantee of `abstain` hold? Fit to dev and count on test, or on many random halves of both.

    python benchmarks/abstain.py check  official/vacsr=RUN resplit-1/vacsr=RUN … --gallery 50 100 200 500 --json FILE
    python benchmarks/abstain.py halves official/vacsr=RUN … --gallery 50 100 200 --rounds 20 --json FILE
    python benchmarks/abstain.py sizes resplit-1/infonce=RUN … --gallery 100 --json FILE
    python benchmarks/abstain.py simulate --rounds 2000 --json FILE

`sizes` fits for galleries of one size and counts in smaller and larger ones. `simulate` needs no run: it compares ways
to certify where the risk is known and the captions of an image fail together. Else each run is on cached features and
brings its own pairs. `--json` adds to the records of a file. Scores of all pairs are computed once and held, so the
splits must be of some thousand images at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import e, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr
from scipy.stats import binom
from torch import Tensor

from _common import keep, parser
from vacsr.data import PairSet, load_pairs
from vacsr.methods.base import Embedding
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import DIRECTIONS
from vacsr.search.calibrate import (
    CalibrateSettings,
    check_direction,
    choosing,
    fit_direction,
    labelled_candidates,
    random_galleries,
)
from vacsr.search.certify import Bounds, RiskCheck, check_threshold, mean_is_negative
from vacsr.search.probabilities import MEASURES, AnswerRule, Candidates, fit_answer_rule
from vacsr.train.checkpoint import run_pairs

WAYS = {"chosen": tuple(MEASURES), "all but σ": ("combined",), "score alone": ("score",)}
RISK = 0.1
KEYS = ("kind", "name", "gallery", "direction", "way", "seed", "fitted_at", "alike", "risk")
"""That tell records apart."""


class Table:
    """Scores of all pairs, looked up, and uncertainties where they are asked for; used as PairScores are."""

    def __init__(self, scorer: PairScorer, pairs: PairSet) -> None:
        self.scores = scorer.score_set(pairs)
        self.images: Embedding = self.scores.images
        self.texts: Embedding = self.scores.texts
        self.score = self.scores.score.cpu()
        self.pairs = pairs

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """[N], [N] -> [N]"""
        return self.score[rows, cols]

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """[N], [N] -> [N]"""
        return self.scores.uncertainty(rows, cols)

    def disagreement(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """[N], [N] -> [N]"""
        return self.scores.disagreement(rows, cols)

    def lists(self, rows: Tensor, *, size: int, generator: torch.Generator) -> dict[str, Candidates]:
        """Of galleries that are drawn from these images."""
        drawn = [rows[part] for part in random_galleries(len(rows), size=size, generator=generator)]
        return {
            direction: labelled_candidates(self, self.pairs, drawn, direction=direction)  # type: ignore[arg-type]
            for direction in DIRECTIONS
        }


def features(spec: str, split: str) -> PairSet:
    """One split."""
    pairs = load_pairs(spec, split=split)
    assert isinstance(pairs, PairSet), "this benchmark reads features"
    return pairs


def held_out(spec: str) -> PairSet:
    """dev and test as one set."""
    dev, test = features(spec, "dev"), features(spec, "test")
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


def check(name: str, run: Path, *, sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """As `vacsr calibrate --split dev --check test`, once for each size; ``rounds`` is not looked at."""
    scorer, spec = PairScorer.from_pretrained(run), run_pairs(run)
    tables = [Table(scorer, features(spec, split)) for split in ("dev", "test")]
    for size in sizes:
        plan = CalibrateSettings(risk=RISK, gallery=size)
        dev, test = (
            table.lists(torch.arange(len(table.images.mean)), size=size, generator=torch.Generator().manual_seed(0))
            for table in tables
        )
        for direction in DIRECTIONS:
            fitted = fit_direction(scorer, dev[direction], plan)
            checked = check_direction(scorer, test[direction], fitted)
            yield {
                "kind": "check", "name": name, "gallery": size, "direction": direction, **counts(checked.answers),
                "measure": fitted.answer.measure, "absent": checked.absent.coverage,
                "r1": checked.r1, "ece_own": checked.ece_own, "ece": checked.ece,
            }  # fmt: skip


def counts(check: RiskCheck) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "queries": check.queries, "answered": check.answered, "wrong": check.wrong,
        "low": check.interval[0], "high": check.interval[1],
    }  # fmt: skip


def halves(name: str, run: Path, *, sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Both splits together, cut in half by image again and again: one half calibrates, the other counts."""
    pairs = held_out(run_pairs(run))
    table = Table(PairScorer.from_pretrained(run), pairs)
    for size in sizes:
        for seed in range(rounds):
            generator = torch.Generator().manual_seed(seed)
            parts = torch.randperm(len(pairs.image_ids), generator=generator).chunk(2)
            fit, other = (table.lists(half, size=size, generator=generator) for half in parts)
            for direction in DIRECTIONS:
                for way in WAYS:
                    checked = half_check(fit[direction], other[direction], way=way, seed=seed)
                    key = {"kind": "halves", "name": name, "gallery": size, "direction": direction}
                    yield {**key, "way": way, "seed": seed, **counts(checked)}


def half_check(fit: Candidates, other: Candidates, *, way: str, seed: int) -> RiskCheck:
    """Calibrate on one half, count on the other."""
    generator = np.random.default_rng(seed)
    choose = choosing(fit, generator)
    if way == "all but σ":
        fit, other = fit._replace(sigma=None), other._replace(sigma=None)
    rule = fit_answer_rule(fit, choose, risk=RISK, confidence=0.9, generator=generator, measures=WAYS[way])
    return check_rule(rule, other)


def check_rule(rule: AnswerRule, candidates: Candidates) -> RiskCheck:
    """Count what the rule answers, and how often wrongly."""
    return check_threshold(rule.outcomes(candidates), rule.threshold)


def sizes(name: str, run: Path, *, sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Fit to dev for each size and count on test in galleries of others; ``rounds`` is not looked at."""
    scorer, spec = PairScorer.from_pretrained(run), run_pairs(run)
    dev, test = (Table(scorer, features(spec, split)) for split in ("dev", "test"))

    def drawn(table: Table, size: int) -> dict[str, Candidates]:
        every = torch.arange(len(table.images.mean))
        return table.lists(every, size=size, generator=torch.Generator().manual_seed(0))

    for fitted_at in sizes:
        lists = drawn(dev, fitted_at)
        rules = {way: fit_direction(scorer, lists[way], CalibrateSettings(risk=RISK)).answer for way in DIRECTIONS}
        for size in (round(share * fitted_at) for share in (0.8, 0.9, 1, 1.02, 1.1, 1.2)):
            others = drawn(test, size)
            for direction, rule in rules.items():
                key = {"kind": "sizes", "name": name, "fitted_at": fitted_at, "gallery": size, "direction": direction}
                yield {**key, **counts(check_rule(rule, others[direction]))}


IMAGES, CHOOSING, CAPTIONS, COVERAGE, LEVEL = 600, 200, 5, 0.5, 0.1
"""Of the simulated worlds: images that certify and that choose, captions of each, the share answered, and δ."""


def simulate(*, rounds: int) -> Iterator[dict[str, Any]]:
    """How often a true risk is found to be below 10%: the power below it, and above it the error, which δ allows."""
    rng = np.random.default_rng(0)
    for alike in (0.9, 0.3):
        for risk in (0.07, 0.101):
            passed = {"betting": 0, "normal": 0, "hoeffding_bentkus": 0}
            for _ in range(rounds):
                wrong, answers = captions(rng, IMAGES, risk=risk, alike=alike)
                losses, chose = wrong - RISK * answers, captions(rng, CHOOSING, risk=risk, alike=alike)
                before = chose[0] - RISK * chose[1]
                spread = sqrt((before @ before + (1 - RISK) ** 2) / (CHOOSING + 1))
                bounds = Bounds(-RISK * CAPTIONS, (1 - RISK) * CAPTIONS, spread)
                passed["betting"] += mean_is_negative(losses, bounds, level=LEVEL)
                passed["normal"] += losses.mean() < NormalDist().inv_cdf(LEVEL) * losses.std(ddof=1) / sqrt(IMAGES)
                passed["hoeffding_bentkus"] += by_hoeffding_bentkus(losses, answers)
            shares = {way: count / rounds for way, count in passed.items()}
            yield {
                "kind": "simulate", "alike": alike, "risk": risk, "rounds": rounds, "images": IMAGES,
                "choosing": CHOOSING, "captions": CAPTIONS, "coverage": COVERAGE, "level": LEVEL, **shares,
            }  # fmt: skip


def captions(rng: np.random.Generator, images: int, *, risk: float, alike: float) -> tuple[np.ndarray, np.ndarray]:
    """Wrong answers and answers of each image, by two normal values whose correlation in an image is ``alike``."""
    own, shared = rng.normal(size=(2, images, CAPTIONS)), rng.normal(size=(2, images, 1))
    sure, right = ndtr(sqrt(alike) * shared + sqrt(1 - alike) * own)
    answered = sure < COVERAGE
    return (answered & (right < risk)).sum(1), answered.sum(1)


def by_hoeffding_bentkus(losses: np.ndarray, answers: np.ndarray) -> bool:
    """Bentkus' bound on sums of losses that are moved into 0 to 1; images without answers are left out. [I], [I]"""
    answered = answers > 0
    total = np.ceil((losses[answered] / CAPTIONS + RISK).sum())
    return bool(e * binom.cdf(total, answered.sum(), RISK) <= LEVEL)


def line(record: dict[str, Any]) -> str:
    """What is printed of a record."""
    if record["kind"] == "simulate":
        ways = " ".join(f"{way} {record[way]:.1%}" for way in ("betting", "normal", "hoeffding_bentkus"))
        return f"alike {record['alike']} risk {record['risk']} passed by {ways}"
    risk = record["wrong"] / record["answered"] if record["answered"] else float("nan")
    shown = f"answered {record['answered'] / record['queries']:.1%} wrong {risk:.1%}"
    return " ".join(map(str, (record["name"], record["gallery"], record["direction"], record.get("way", ""), shown)))


def main() -> None:
    """Print a line for each record, and keep them."""
    ways = {"check": check, "halves": halves, "sizes": sizes}
    options = parser(__doc__)
    options.add_argument("kind", nargs="?", choices=(*ways, "simulate"))
    options.add_argument("runs", nargs="*", metavar="NAME=RUN")
    options.add_argument("--gallery", type=int, nargs="+", default=[50, 100])
    options.add_argument("--rounds", type=int, default=20)
    args = options.parse_args()
    if args.kind is None:
        print("give what to measure, and run folders; nothing to do without them")
        return
    records = simulate(rounds=args.rounds) if args.kind == "simulate" else ()
    for item in args.runs:
        name, _, run = item.rpartition("=")
        records = itertools.chain(records, ways[args.kind](name, Path(run), sizes=args.gallery, rounds=args.rounds))
    for record in records:
        print(line(record), flush=True)
        keep(args.json, record, keys=KEYS)


if __name__ == "__main__":
    main()
