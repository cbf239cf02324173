"""How each query fared: what paired tests between two systems need, kept beside the averages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.data.labelled import LabelledPairs
from vacsr.errors import DataError
from vacsr.evaluate.galleries import DIRECTIONS, Direction, Gallery
from vacsr.evaluate.metrics import average_precisions_at_r, best_ranks, r_precisions
from vacsr.evaluate.ranks import BothRanks
from vacsr.files import read_tensors, write_tensors


class QueryOutcomes(NamedTuple):
    """One direction. [Q] float64 each, in the order of the data; NaN for a query that the protocol does not ask."""

    best_rank: Tensor
    """The rank of the best relevant item, from 1."""
    average_precision: Tensor
    """mAP@R of the query alone, a share."""
    r_precision: Tensor | None = None
    """R-precision of the query alone, a share; None in a file from before it was kept."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """One protocol on one split."""

    protocol: str
    split: str
    i2t: QueryOutcomes
    t2i: QueryOutcomes
    queries: str
    """A digest of the ids: outcomes of two systems may be paired where it is the same."""
    caption_image: Tensor
    """The image row of each caption: queries of one image fare alike. [M] int64"""

    def of(self, direction: Direction) -> QueryOutcomes:
        """One direction."""
        return self.i2t if direction == "i2t" else self.t2i


def query_outcomes(
    protocol: str, pairs: LabelledPairs, *, galleries: Sequence[Gallery], ranks: Sequence[BothRanks]
) -> Outcomes:
    """Collect every gallery's queries in the order of the data. ``ranks``: one for each gallery"""
    found: dict[Direction, QueryOutcomes] = {}
    for direction, count in zip(DIRECTIONS, (len(pairs.image_ids), len(pairs.caption_ids)), strict=True):
        best, average, within = (torch.full((count,), torch.nan, dtype=torch.float64) for _ in range(3))
        for gallery, both in zip(galleries, ranks, strict=True):
            rows, own = gallery.rows_of(direction), both.i2t if direction == "i2t" else both.t2i
            best[rows], average[rows], within[rows] = best_ranks(own), average_precisions_at_r(own), r_precisions(own)
        found[direction] = QueryOutcomes(best, average, within)
    ids = "\0".join((*pairs.image_ids, "", *pairs.caption_ids)).encode(errors="surrogatepass")
    digest, owner = hashlib.sha256(ids).hexdigest(), pairs.caption_image.cpu()
    return Outcomes(protocol, pairs.split, found["i2t"], found["t2i"], queries=digest, caption_image=owner)


def write_outcomes(path: Path, outcomes: Sequence[Outcomes]) -> None:
    """Write them to a safetensors file, atomically."""
    tensors = {
        f"{number}.{direction}.{name}": tensor
        for number, found in enumerate(outcomes)
        for direction in DIRECTIONS
        for name, tensor in found.of(direction)._asdict().items()
        if tensor is not None
    }
    tensors |= {f"{number}.caption_image": found.caption_image.clone() for number, found in enumerate(outcomes)}
    named = [{"protocol": one.protocol, "split": one.split, "queries": one.queries} for one in outcomes]
    write_tensors(path, tensors, metadata={"outcomes": json.dumps(named)})


def read_outcomes(path: Path) -> tuple[Outcomes, ...]:
    """Read what :func:`write_outcomes` wrote."""
    tensors, metadata = read_tensors(path)
    try:
        return tuple(
            Outcomes(
                i2t=_direction(tensors, f"{number}.i2t"),
                t2i=_direction(tensors, f"{number}.t2i"),
                protocol=named["protocol"],
                split=named["split"],
                queries=named["queries"],
                caption_image=tensors[f"{number}.caption_image"],
            )
            for number, named in enumerate(json.loads(metadata["outcomes"]))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not hold outcomes of queries ({error!r}) — train or evaluate again") from error


def _direction(tensors: dict[str, Tensor], prefix: str) -> QueryOutcomes:
    return QueryOutcomes(
        best_rank=tensors[f"{prefix}.best_rank"],
        average_precision=tensors[f"{prefix}.average_precision"],
        r_precision=tensors.get(f"{prefix}.r_precision"),
    )
