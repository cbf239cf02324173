"""How scores are distributed: histograms, means and spreads of labelled pairs and of all others, for a page to draw.

Scores are read block by block, in two passes: the first finds their range, the second counts. Medians are interpolated
in 10,000 fine bins.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError
from vacsr.evaluate.score_files import Scores

BINS = 50
_FINE = 10_000  # bins of a tally
_CHUNK = 1 << 19  # values counted at once: their float64 copies stay in the processor's cache


def score_histograms(scores: Scores, pairs: LabelledPairs) -> dict[str, Any]:
    """``{"grade": …, "score": …}``: counts of labelled and of other pairs in 50 bins, mean, median and spread.

    ``grade`` is on 0 to 1, and None where scores have no grade; ``score`` is on the range that occurs.
    """
    owner = pairs.caption_image.cpu()
    ends = torch.cat([torch.stack(torch.aminmax(block)) for block in scores.blocks() if block.numel()])
    low, high = float(ends.min()), float(ends.max())
    if not math.isfinite(high - low):
        message = "scores hold NaN or infinity, expected numbers — check those embeddings"
        raise DataError(f"{message}; to keep a pair from being found, give it a very low score")
    graded = scores.grade(ends) is not None
    return {
        "grade": _histogram(_grades(scores), owner, low=0.0, high=1.0) if graded else None,
        "score": _histogram(scores.blocks(), owner, low=low, high=high),
    }


def _grades(scores: Scores) -> Iterator[Tensor]:
    for block in scores.blocks():
        grades = scores.grade(block)
        assert grades is not None, "grade() must be consistently None or not None"
        yield grades


def _histogram(blocks: Iterable[Tensor], owner: Tensor, *, low: float, high: float) -> dict[str, Any]:
    """``blocks``: consecutive rows [b, M]; ``owner``: the row of each column's labelled pair [M]"""
    every, parts, first = torch.zeros(_FINE + 2, dtype=torch.float64), [], 0
    for block in blocks:
        columns = ((owner >= first) & (owner < first + len(block))).nonzero()[:, 0]
        parts.append(block[(owner[columns] - first).to(block.device), columns.to(block.device)].double().cpu())
        for chunk in torch.split(block.reshape(-1), _CHUNK):
            every += _tally(chunk, low, high)
        first += len(block)
    labelled = torch.cat(parts)
    positive = _tally(labelled, low, high)
    return {
        "edges": torch.linspace(low, high, BINS + 1, dtype=torch.float64).tolist(),
        "positive": _counts(positive),
        "negative": _counts(every - positive),
        "positive_stats": {
            "mean": float(labelled.mean()),
            "median": float(labelled.quantile(0.5)),
            "std": float(labelled.std(correction=0)),
        },
        "negative_stats": _stats(every - positive, low, high),
        "all_stats": _stats(every, low, high),
    }


def _tally(values: Tensor, low: float, high: float) -> Tensor:
    """Counts in fine bins from ``low`` to ``high``, then sum and sum of squares of the values, that range being 0 to 1.

    Tallies of parts add up. A grade may leave the range by rounding. [n] -> [10,002] float64 on the CPU
    """
    unit = (values.double() - low).div_(high - low or 1.0).clamp_(0.0, 1.0)
    return torch.cat((torch.histc(unit, _FINE, 0.0, 1.0), unit.sum()[None], (unit @ unit)[None])).cpu()


def _counts(tally: Tensor) -> list[int]:
    return [int(count) for count in tally[:_FINE].view(BINS, -1).sum(1)]


def _stats(tally: Tensor, low: float, high: float) -> dict[str, float]:
    """Mean, median and standard deviation; NaN without values."""
    fine, (total, squares) = tally[:_FINE], tally[_FINE:].tolist()
    number = float(fine.sum())
    if not number:
        return dict.fromkeys(("mean", "median", "std"), math.nan)
    mean = total / number
    deviation = math.sqrt(max(0.0, squares / number - mean * mean))
    cumulative = fine.cumsum(0)
    index = int(torch.searchsorted(cumulative, number / 2))  # the bin that holds the median
    median = (index + 1 - (float(cumulative[index]) - number / 2) / float(fine[index])) / _FINE
    width = high - low
    return {"mean": low + width * mean, "median": low + width * median, "std": width * deviation}
