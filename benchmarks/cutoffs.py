"""Do cutoffs and answer sets hold on images that nothing was fitted to, and how much do they show? Many random halves.

    python benchmarks/cutoffs.py RUN --pairs SPEC --rounds 200 --json FILE

The images of dev and test are cut in half by image: one half fits, the other counts. Images of the training split fill
larger galleries, as items that nobody asks for. Every query has its own random gallery of each size, drawn once.

Two rivals have the same certificate: a flat cutoff of the cosine, fitted at each size; and a cutoff of the softmax over
the candidates at the temperature of the loss, fitted at 1,000 items. The third is SigLIP's probability, sigmoid(scale ·
cosine + bias), fitted at 1,000 items and shown from 0.5 on without any certificate, as it is used. In the order of
hits it is the cosine, so with a certificate it would be the first rival.

RUN is a run on the cached features of SPEC.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit, softmax

from _common import keep, parser
from vacsr.data import PairSet, load_pairs
from vacsr.scoring import PairScorer
from vacsr.search.calibrate import CalibrateSettings, check_size, fit_direction
from vacsr.search.certify import Graded, count_shown, find_cutoff
from vacsr.search.galleries import Lists

KEYS = ("name", "size", "way")
DEPTH = 20
CAPTIONS = 2
"""Of each image that ask."""
WIDTH = 200
ONE_SIZE = 1000
"""At which the cutoff of the softmax and SigLIP's probability are fitted."""
WAYS = ("vacsr", "flat cosine", "softmax", "sigmoid")


def split(spec: str, name: str) -> PairSet:
    """Cached features."""
    pairs = load_pairs(spec, split=name)
    assert isinstance(pairs, PairSet), "give cached features: features:FILE,captions=FILE"
    return pairs


@torch.inference_mode()
def all_lists(scorer: PairScorer, spec: str, sizes: list[int]) -> tuple[list[Lists], float]:
    """The candidates of the same queries in random galleries of each size; the temperature of the loss."""
    held = [scorer.score_set(split(spec, name)) for name in ("dev", "test")]
    owners = [split(spec, name).caption_image for name in ("dev", "test")]
    others = scorer.embed_images(split(spec, "train").images).mean
    items = torch.cat([*(part.images.mean for part in held), others])
    owner = torch.cat((owners[0], owners[1] + len(held[0].images.mean)))
    rng = np.random.default_rng(0)
    order = rng.permutation(len(owner))
    turn = np.zeros(len(owner), dtype=np.int64)
    seen: dict[int, int] = {}
    for one in order.tolist():
        image = int(owner[one])
        turn[one] = seen[image] = seen.get(image, 0) + 1
    rows = np.flatnonzero(turn <= CAPTIONS)
    image = owner[rows].numpy()
    queries = torch.cat([part.texts.mean for part in held])[rows]
    asked = len(held[0].images.mean) + len(held[1].images.mean)
    found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in sizes]
    for part in torch.split(torch.arange(len(rows)), 512):
        cosine = queries[part] @ items.T
        own = torch.from_numpy(image[part])
        for number, size in enumerate(sizes):
            pool = asked if size <= asked else len(items)
            there = torch.zeros_like(cosine, dtype=torch.bool)
            keys = torch.from_numpy(rng.random((len(part), pool), dtype=np.float32))
            keys[torch.arange(len(part)), own] = -1
            if size > asked:  # all that ask, and some of the others
                keys[:, :asked] -= 1
            there.scatter_(1, keys.topk(min(size, pool), dim=1, largest=False).indices, True)
            near = cosine.masked_fill(~there, -torch.inf).topk(min(WIDTH, size), dim=1)
            found[number].append((near.values.double().numpy(), (near.indices == own[:, None]).numpy()))
    lists = [
        Lists(np.concatenate([score for score, _ in parts]), np.concatenate([right for _, right in parts]), image, size)
        for size, parts in zip(sizes, found, strict=True)
    ]
    return lists, held[0].temperature() or 1.0


def some(lists: Lists, rows: np.ndarray) -> Lists:
    """A part of the queries."""
    return lists._replace(score=lists.score[rows], right=lists.right[rows], image=lists.image[rows])


def counted(graded: Graded, cutoff: float | None) -> dict[str, Any]:
    shown = count_shown(graded, cutoff)
    return {"hits": shown.hits, "wrong": shown.wrong, "answered": shown.coverage}


def rounds(lists: list[Lists], temperature: float, *, count: int) -> Iterator[dict[str, Any]]:
    """One record for each round, size and way."""
    images, settings = np.unique(lists[0].image), CalibrateSettings()
    goal = {"precision": settings.precision, "confidence": settings.confidence}
    for seed in range(count):
        half = np.random.default_rng(seed).permutation(images)[: len(images) // 2]
        fits = np.isin(lists[0].image, half)
        fitted = fit_direction([some(part, fits) for part in lists], settings)
        (one,) = (some(part, fits) for part in lists if part.size == ONE_SIZE)
        soft, even = find_cutoff(softened(one, temperature), **goal), even_odds(one)
        for part in lists:
            here, there = some(part, fits), some(part, ~fits)
            row = check_size(there, fitted)
            yield {
                "seed": seed, "size": part.size, "way": "vacsr", "hits": row.hits, "answered": row.answered,
                "wrong": round(row.hits * (1 - (row.precision or 1))), "silent": row.silent, "held": row.held,
                "set_size": row.set_size, "r1": row.r1, "certified": fitted.certified,
            }  # fmt: skip
            flat = find_cutoff(plain(here), **goal)
            yield {"seed": seed, "size": part.size, "way": "flat cosine", **counted(plain(there), flat)}
            yield {
                "seed": seed, "size": part.size, "way": "softmax", **counted(softened(there, temperature), soft),
            }  # fmt: skip
            likely = Graded(there.score, there.right, there.image)
            yield {"seed": seed, "size": part.size, "way": "sigmoid", **counted(likely, even)}


def plain(lists: Lists) -> Graded:
    return Graded(lists.score[:, :DEPTH], lists.right[:, :DEPTH], lists.image)


def softened(lists: Lists, temperature: float) -> Graded:
    return Graded(softmax(lists.score / temperature, axis=1)[:, :DEPTH], lists.right[:, :DEPTH], lists.image)


def even_odds(lists: Lists) -> float:
    """The cosine at which sigmoid(scale · cosine + bias), fitted by likelihood to all candidates, is one half."""
    score, right = lists.score.ravel(), lists.right.ravel().astype(np.float64)
    mean, spread = score.mean(), score.std()
    value = (score - mean) / spread

    def loss(weight: np.ndarray) -> tuple[float, np.ndarray]:
        logit = weight[0] * value + weight[1]
        error = expit(logit) - right
        return float((np.logaddexp(0, logit) - right * logit).sum()), np.array([error @ value, error.sum()])

    scale, bias = minimize(loss, np.array([1.0, -5.0]), jac=True, method="L-BFGS-B").x
    return float(mean - spread * bias / scale)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one size and way, over the rounds."""
    kept = [r["wrong"] <= 0.1 * r["hits"] for r in records]
    hits, wrong = (sum(r[key] for r in records) for key in ("hits", "wrong"))
    answered = [r["answered"] for r in records]
    result: dict[str, Any] = {
        "rounds": len(records), "kept": float(np.mean(kept)), "precision": 1 - wrong / hits if hits else None,
        "answered": float(np.mean(answered)), "low": float(np.quantile(answered, 0.025)),
        "high": float(np.quantile(answered, 0.975)),
    }  # fmt: skip
    for key in ("silent", "held", "set_size", "r1", "certified"):
        values = [r[key] for r in records if r.get(key) is not None]
        if values:
            result[key] = float(np.mean(values))
    return result


def main() -> None:
    """Print a line for each size and way, and keep them."""
    options = parser(__doc__)
    options.add_argument("run", nargs="?", type=Path)
    options.add_argument("--pairs", metavar="SPEC")
    options.add_argument("--sizes", type=int, nargs="+", default=[50, 200, 1000, 2400, 5000, 11000])
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--name", default="")
    args = options.parse_args()
    if args.run is None or args.pairs is None:
        print("give a run and --pairs; nothing to do without them")
        return
    scorer = PairScorer.from_pretrained(args.run, device="cpu")
    lists, temperature = all_lists(scorer, args.pairs, args.sizes)
    records = list(rounds(lists, temperature, count=args.rounds))
    for size in args.sizes:
        for way in WAYS:
            result = summary([r for r in records if (r["size"], r["way"]) == (size, way)])
            print(size, way, {key: round(value, 4) for key, value in result.items() if value is not None}, flush=True)
            keep(args.json, {"name": args.name or args.run.name, "size": size, "way": way, **result}, keys=KEYS)


if __name__ == "__main__":
    main()
