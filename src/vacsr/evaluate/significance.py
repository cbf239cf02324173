"""Is a difference between two systems significant? A paired bootstrap over the outcomes of single queries.

Both systems answered the same queries, so the queries' differences are resampled, with replacement. An image is drawn
with its captions, whose outcomes are correlated: drawn apart they would make intervals too narrow by a fifth. All
comparisons share the draws.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError
from vacsr.evaluate.metrics import METRICS, RECALLS
from vacsr.evaluate.protocols import Gallery
from vacsr.evaluate.ranks import BothRanks
from vacsr.files import read_tensors, write_tensors
from vacsr.scoring.topk import DIRECTIONS, Direction

Array = NDArray[np.float64]
QueryOutcomes = Mapping[str, Tensor]
"""By metric: the share of each query. [Q] float64 each, in the order of the data, NaN where it is not evaluated."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """How each query did under one protocol on one split."""

    protocol: str
    split: str
    i2t: QueryOutcomes
    t2i: QueryOutcomes
    queries: str  # a checksum of the ids: outcomes of two systems may be paired where it is the same
    caption_image: Tensor  # the image row of each caption. [M] int64

    def of(self, direction: Direction) -> QueryOutcomes:
        return self.i2t if direction == "i2t" else self.t2i


def query_outcomes(
    protocol: str, pairs: LabelledPairs, *, galleries: Sequence[Gallery], ranks: Sequence[BothRanks]
) -> Outcomes:
    """Every gallery's queries in the order of the data. ``ranks``: one for each gallery"""
    shares: dict[Direction, dict[str, Tensor]] = {}
    sizes = len(pairs.image_ids), len(pairs.caption_ids)
    for direction, size, of_galleries in zip(DIRECTIONS, sizes, zip(*ranks, strict=True), strict=True):
        shares[direction] = {name: torch.full((size,), torch.nan, dtype=torch.float64) for name in METRICS}
        for gallery, one in zip(galleries, of_galleries, strict=True):
            for name, metric in METRICS.items():
                shares[direction][name][gallery.queries(direction)] = metric(one)
    ids = "\0".join((*pairs.image_ids, "", *pairs.caption_ids)).encode(errors="surrogatepass")
    checksum, owner = hashlib.sha256(ids).hexdigest(), pairs.caption_image.cpu()
    return Outcomes(protocol, pairs.split, shares["i2t"], shares["t2i"], checksum, owner)


def write_outcomes(path: Path, outcomes: Sequence[Outcomes]) -> None:
    tensors = {}
    for number, one in enumerate(outcomes):
        tensors[f"{number}.caption_image"] = one.caption_image.clone()
        for direction in DIRECTIONS:
            tensors |= {f"{number}.{direction}.{name}": values for name, values in one.of(direction).items()}
    named = [{"protocol": one.protocol, "split": one.split, "queries": one.queries} for one in outcomes]
    write_tensors(path, tensors, metadata={"outcomes": json.dumps(named)})


def read_outcomes(path: Path) -> tuple[Outcomes, ...]:
    tensors, metadata = read_tensors(path)
    outcomes = []
    try:
        for number, named in enumerate(json.loads(metadata["outcomes"])):
            prefixes = [f"{number}.{direction}." for direction in DIRECTIONS]
            i2t, t2i = (
                {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
                for prefix in prefixes
            )
            ids = named["queries"], tensors[f"{number}.caption_image"]
            outcomes.append(Outcomes(named["protocol"], named["split"], i2t, t2i, *ids))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not hold outcomes of queries ({error!r}) — train or evaluate again") from error
    return tuple(outcomes)


def outcomes_of(outcomes: Sequence[Outcomes], key: str) -> Outcomes | None:
    """Those of a column key's split and protocol; of a split alone, the first."""
    split, _, protocol = key.partition(".")[0].partition("/")
    return next((one for one in outcomes if one.split == split and protocol in ("", one.protocol)), None)


def contributions(outcomes: Outcomes, key: str) -> dict[Direction, Array] | None:
    """Per direction what each query adds to a column's number, in percent; their means add up to it. [Q] each

    `test.rsum` has both directions, `test.i2t.r1` one, `test.mean.map_at_r` half of each. None for what is no mean over
    queries, or is missing in the outcomes.
    """
    weights = _weights(key)
    if weights is None:
        return None
    directions, names, weight = weights
    if any(name not in outcomes.of(direction) for direction in directions for name in names):
        return None
    return {
        direction: sum((weight * outcomes.of(direction)[name].double().numpy() for name in names), np.zeros(1))
        for direction in directions
    }


def is_query_mean(key: str) -> bool:
    """Whether a column's number is a mean over queries."""
    return _weights(key) is not None


def _weights(key: str) -> tuple[tuple[Direction, ...], tuple[str, ...], float] | None:
    """The directions and metrics that a column's key adds up, and the weight of each."""
    match key.split(".")[1:]:
        case ["rsum"]:
            return DIRECTIONS, RECALLS, 100.0
        case ["mean", name] if name in METRICS:
            return DIRECTIONS, (name,), 50.0
        case ["i2t" | "t2i" as direction, name] if name in METRICS:
            return (direction,), (name,), 100.0
    return None


class Interval(NamedTuple):
    """A difference and its 95% bootstrap interval."""

    difference: float
    low: float
    high: float
    p: float  # two-sided: twice the share of draws on the rarer side of 0, the data themselves counted as one draw


class Part(NamedTuple):
    """One direction's queries: what each adds to one system's metric less what it adds to the other's."""

    values: Array  # [Q, C], C comparisons at once
    image: NDArray[np.int64]  # the image that each query is, or belongs to. [Q]


def paired_bootstrap(parts: Sequence[Part], *, draws: int = 10_000, seed: int = 0) -> list[Interval]:
    """C comparisons at once; a metric is the sum over ``parts`` (image queries, caption queries) of a mean. -> C"""
    drawn = drawn_means(parts, draws=draws, generator=np.random.default_rng(seed))
    difference = np.sum([part.values.mean(axis=0) for part in parts], axis=0)
    return [interval(float(one), column) for one, column in zip(difference, drawn.T, strict=True)]


def interval(difference: float, drawn: Array) -> Interval:
    """A difference with its 95% interval, from its value in each draw. [D]

    >>> float(interval(0.5, np.array([-0.5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])).p)
    0.5
    """
    low, high = np.quantile(drawn, [0.025, 0.975])
    rarer = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    return Interval(difference, float(low), float(high), min(1.0, 2 * (rarer + 1) / (len(drawn) + 1)))


def holm(p: Sequence[float]) -> list[float]:
    """p-values of several tests, corrected for their number by Holm's method.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    order = np.argsort(p)
    scaled = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in corrected]


def drawn_means(parts: Sequence[Part], *, draws: int, generator: np.random.Generator, at_once: int = 1 << 22) -> Array:
    """The metric over images drawn with replacement; a draw without any query of some part is left out. -> [D, C]

    ``at_once`` bounds the drawn images in memory.
    """
    images, index = np.unique(np.concatenate([part.image for part in parts]), return_inverse=True)
    owners = np.split(index, np.cumsum([len(part.image) for part in parts])[:-1])
    grouped = []  # sum and number of each image's queries: [I, C], [I, 1]
    for part, owner in zip(parts, owners, strict=True):
        total = np.zeros((len(images), part.values.shape[1]))
        np.add.at(total, owner, part.values)
        grouped.append((total, np.bincount(owner, minlength=len(images))[:, None].astype(float)))
    blocks = []
    step = max(1, at_once // len(images))
    for start in range(0, draws, step):
        times = image_draws(len(images), draws=min(step, draws - start), generator=generator)
        with np.errstate(invalid="ignore"):  # 0/0: no query of this part was drawn
            blocks.append(sum(times @ total / (times @ count) for total, count in grouped))
    means = np.concatenate(blocks)
    return np.asarray(means[~np.isnan(means).any(axis=1)])


def image_draws(images: int, *, draws: int, generator: np.random.Generator) -> Array:
    """How often each image is drawn when as many are drawn with replacement. -> [D, I]"""
    chosen = generator.integers(0, images, (draws, images)) + images * np.arange(draws)[:, None]
    return np.bincount(chosen.ravel(), minlength=chosen.size).reshape(draws, images).astype(float)
