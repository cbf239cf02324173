"""How often do confident hits and answer sets hold? Fit to dev and count on test, or on many random halves of both.

    python benchmarks/calibration.py check  official/vacsr=RUN resplit-1/vacsr=RUN … --json FILE
    python benchmarks/calibration.py halves official/vacsr=RUN … --rounds 20 --json FILE
    python benchmarks/calibration.py simulate --rounds 2000 --json FILE

`simulate` needs no run: it looks for cutoffs where the true precision is known and the hits of an image fail together.
Else each run is on cached features and brings its own pairs. `--json` adds to the records of a file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr

from _common import keep, parser
from vacsr.data import PairSet, load_pairs
from vacsr.scoring import PairScorer
from vacsr.search.calibrate import CalibrateSettings, calibrate, check_calibration
from vacsr.search.certify import Graded, count_shown, find_cutoff
from vacsr.train.checkpoint import run_pairs

KEYS = ("kind", "name", "direction", "size", "seed", "images", "alike")
"""That tell records apart."""
CAPTIONS = 5
"""Of each image of the simulated worlds."""


def check(name: str, run: Path, *, rounds: int) -> Iterator[dict[str, Any]]:
    """As `vacsr calibrate --split dev --check test`; ``rounds`` is not looked at."""
    scorer, (dev, test) = PairScorer.from_pretrained(run), features(run)
    yield from counts({"kind": "check", "name": name}, scorer, dev, test, seed=0)


def halves(name: str, run: Path, *, rounds: int) -> Iterator[dict[str, Any]]:
    """Both splits together, cut in half by image again and again: one half calibrates, the other counts."""
    scorer, (dev, test) = PairScorer.from_pretrained(run), features(run)
    both = replace(
        dev,
        images=torch.cat((dev.images, test.images)),
        texts=torch.cat((dev.texts, test.texts)),
        image_ids=dev.image_ids + test.image_ids,
        caption_ids=dev.caption_ids + test.caption_ids,
        caption_image=torch.cat((dev.caption_image, test.caption_image + len(dev.image_ids))),
        captions=None,
        split="dev + test",
    )
    for seed in range(rounds):
        order = torch.randperm(len(both.image_ids), generator=torch.Generator().manual_seed(seed))
        fit, other = (both.subset(half) for half in order.chunk(2))
        yield from counts({"kind": "halves", "name": name, "seed": seed}, scorer, fit, other, seed=seed)


def features(run: Path) -> tuple[PairSet, PairSet]:
    """The dev and test split of a run."""
    dev, test = (load_pairs(run_pairs(run), split=split) for split in ("dev", "test"))
    assert isinstance(dev, PairSet), "this benchmark reads features"
    assert isinstance(test, PairSet)
    return dev, test


def counts(
    key: dict[str, Any], scorer: PairScorer, fit: PairSet, other: PairSet, *, seed: int
) -> Iterator[dict[str, Any]]:
    """What a fit to some pairs is worth on others, for both directions and galleries of all sizes."""
    calibration = calibrate(scorer, fit, CalibrateSettings(seed=seed))
    for direction, sizes in check_calibration(scorer, other, calibration).items():
        fitted = calibration.of(direction)
        for size in sizes:
            certified = fitted is not None and fitted.certifies(size.size)
            yield {**key, "direction": direction, "certified": certified, **size.model_dump()}


def simulate(*, rounds: int) -> Iterator[dict[str, Any]]:
    """How often the precision above a cutoff is below the 90% that were asked for: in truth, and counted elsewhere."""
    rng = np.random.default_rng(0)
    for images, alike in itertools.product((200, 1000), (0.3, 0.9)):
        found, below, counted = list[float](), 0, 0
        for _ in range(rounds):
            cutoff = find_cutoff(world(rng, images, alike=alike), precision=0.9, confidence=0.9)
            if cutoff is not None:
                found.append(1 - cutoff)
                below += (1 + cutoff) / 2 < 0.9  # grades are even from 0 to 1, and true
                counted += count_shown(world(rng, images, alike=alike), cutoff).precision < 0.9
        yield {
            "kind": "simulate", "images": images, "alike": alike, "captions": CAPTIONS, "rounds": rounds,
            "found": len(found) / rounds, "below": below / rounds, "counted_below": counted / rounds,
            "shown": float(np.mean(found)) if found else 0.0, "possible": 0.2,
        }  # fmt: skip


def world(rng: np.random.Generator, images: int, *, alike: float) -> Graded:
    """One hit per caption, right as often as its grade says; both are normal values that an image's captions share."""
    own, shared = rng.normal(size=(2, images, CAPTIONS)), rng.normal(size=(2, images, 1))
    grade, luck = ndtr(sqrt(alike) * shared + sqrt(1 - alike) * own)
    return Graded(grade.reshape(-1, 1), (luck < grade).reshape(-1, 1), np.arange(images).repeat(CAPTIONS))


def line(record: dict[str, Any]) -> str:
    """What is printed of a record."""
    if record["kind"] == "simulate":
        shares = " ".join(f"{name} {record[name]:.1%}" for name in ("found", "below", "counted_below", "shown"))
        return f"images {record['images']} alike {record['alike']}: {shares}"
    shares = " ".join(
        f"{name} {'–' if record[name] is None else format(record[name], '.1%')}"
        for name in ("answered", "precision", "silent", "held")
    )
    return f"{record['name']} {record['direction']} {record['size']:,}: {shares}"


def main() -> None:
    """Print a line for each record, and keep them."""
    ways = {"check": check, "halves": halves}
    options = parser(__doc__)
    options.add_argument("kind", nargs="?", choices=(*ways, "simulate"))
    options.add_argument("runs", nargs="*", metavar="NAME=RUN")
    options.add_argument("--rounds", type=int, default=20)
    args = options.parse_args()
    if args.kind is None:
        print("give what to measure, and run folders; nothing to do without them")
        return
    records = simulate(rounds=args.rounds) if args.kind == "simulate" else iter(())
    for item in args.runs:
        name, _, run = item.rpartition("=")
        records = itertools.chain(records, ways[args.kind](name, Path(run), rounds=args.rounds))
    for record in records:
        print(line(record), flush=True)
        keep(args.json, record, keys=KEYS)


if __name__ == "__main__":
    main()
