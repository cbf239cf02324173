"""How often does the promise of `abstain` hold? Fit to dev and count on test, or on many random halves of both.

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

import argparse
import json
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

from vacsr.cli.runs import run_pairs
from vacsr.data import PairSet, load_pairs
from vacsr.files import write_json
from vacsr.methods.base import Embedding
from vacsr.scoring import PairScorer
from vacsr.search.betting import Bounds, mean_is_negative
from vacsr.search.calibrate import (
    DIRECTIONS,
    CalibrateSettings,
    check_direction,
    choosing,
    fit_direction,
)
from vacsr.search.candidates import Candidates, labelled_candidates, random_galleries
from vacsr.search.counted import RiskCheck, check_rule
from vacsr.search.risk import MEASURES, fit_answer_rule

WAYS = {"chosen": tuple(MEASURES), "all but σ": ("combined",), "score alone": ("score",)}
RISK = 0.1


class Table:
    """Scores of all pairs, looked up, and uncertainties where they are asked for; stands for PairScores."""

    def __init__(self, scorer: PairScorer, pairs: PairSet) -> None:
        self.found = scorer.score_set(pairs)
        self.images: Embedding = self.found.images
        self.texts: Embedding = self.found.texts
        self.score = self.found.score.cpu()
        self.pairs = pairs

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """[N], [N] -> [N]"""
        return self.score[rows, cols]

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """[N], [N] -> [N]"""
        return self.found.uncertainty(rows, cols)

    def lists(self, rows: Tensor, *, size: int, generator: torch.Generator) -> dict[str, Candidates]:
        """Of galleries that are drawn from these images."""
        drawn = [rows[part] for part in random_galleries(len(rows), size=size, generator=generator)]
        return {
            direction: labelled_candidates(self, self.pairs, drawn, direction=direction)  # type: ignore[arg-type]
            for direction in DIRECTIONS
        }


def features(spec: str, split: str) -> PairSet:
    """One split."""
    found = load_pairs(spec, split=split)
    assert isinstance(found, PairSet), "this benchmark reads features"
    return found


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
            found = check_direction(scorer, test[direction], fitted)
            yield {
                "kind": "check", "name": name, "gallery": size, "direction": direction, **counts(found.answers),
                "measure": fitted.answer.measure, "absent": found.absent.coverage,
                "sigma_weight": fitted.missed.sigma_weight, "lambda": fitted.lcb.weight,
                "r1": found.first.by_score, "r1_lambda": found.first.by_lcb,
                "ece_own": found.ece_own, "ece": found.ece,
            }  # fmt: skip


def counts(found: RiskCheck) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "queries": found.queries, "answered": found.answered, "wrong": found.wrong,
        "low": found.interval.low, "high": found.interval.high,
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
                    found = half_check(fit[direction], other[direction], way=way, seed=seed)
                    key = {"kind": "halves", "name": name, "gallery": size, "direction": direction}
                    yield {**key, "way": way, "seed": seed, **counts(found)}


def half_check(fit: Candidates, other: Candidates, *, way: str, seed: int) -> RiskCheck:
    """Calibrate on one half, count on the other."""
    generator = np.random.default_rng(seed)
    choose = choosing(fit, generator)
    if way == "all but σ":
        fit, other = fit._replace(sigma=None), other._replace(sigma=None)
    rule = fit_answer_rule(fit, choose, risk=RISK, confidence=0.9, generator=generator, measures=WAYS[way])
    return check_rule(rule, other)


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
    told = answers > 0
    total = np.ceil((losses[told] / CAPTIONS + RISK).sum())
    return bool(e * binom.cdf(total, told.sum(), RISK) <= LEVEL)


def line(record: dict[str, Any]) -> str:
    """What is printed of a record."""
    if record["kind"] == "simulate":
        ways = " ".join(f"{way} {record[way]:.1%}" for way in ("betting", "normal", "hoeffding_bentkus"))
        return f"alike {record['alike']} risk {record['risk']} passed by {ways}"
    risk = record["wrong"] / record["answered"] if record["answered"] else float("nan")
    shown = f"answered {record['answered'] / record['queries']:.1%} wrong {risk:.1%}"
    return " ".join(map(str, (record["name"], record["gallery"], record["direction"], record.get("way", ""), shown)))


def keep(path: Path | None, records: Iterator[dict[str, Any]]) -> None:
    """Print them, and add them to those of a file."""
    found = []
    for record in records:
        found.append(record)
        print(line(record), flush=True)
    if path:
        before = json.loads(path.read_text(encoding="utf-8"))["records"] if path.is_file() else []
        write_json(path, {"schema": 1, "records": before + found})


def main() -> None:
    """Print a line for each record, and keep them."""
    ways = {"check": check, "halves": halves, "sizes": sizes}
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?", choices=(*ways, "simulate"))
    parser.add_argument("runs", nargs="*", metavar="NAME=RUN")
    parser.add_argument("--gallery", type=int, nargs="+", default=[50, 100])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.kind is None:
        print("give what to measure, and run folders; nothing to do without them")
        return
    if given.kind == "simulate":
        keep(given.json, simulate(rounds=given.rounds))
        return
    for item in given.runs:
        name, _, run = item.rpartition("=")
        keep(given.json, ways[given.kind](name, Path(run), sizes=given.gallery, rounds=given.rounds))


if __name__ == "__main__":
    main()
