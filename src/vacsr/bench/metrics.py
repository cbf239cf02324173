"""`vacsr bench metrics`: recalls and precisions from one score matrix by vacsr, eccv_caption and torchmetrics.

All get the same scores and must agree. eccv_caption takes full rankings of ids, so sorting is part of its time and is
also shown apart; it knows COCO's test images only. torchmetrics is called query by query, as its classes do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vacsr.bench import BenchResult, Cost, Log, describe_device, timed
from vacsr.errors import MissingExtra, VacsrError
from vacsr.evaluate.metrics import retrieval_result
from vacsr.evaluate.protocols import coco_owners, protocol_galleries
from vacsr.evaluate.score_files import MatrixIds, MatrixScores
from vacsr.scoring.topk import DIRECTIONS

COCO = ("coco-1k", "coco-5k", "cxc", "eccv")
SIZES = {"small": {"images": 200}, "coco": {"images": None}}
"""Images with five captions each; None: all of COCO's test list."""
COLUMNS = {
    "way": "system", "figures": "metrics", "seconds": "seconds", "of_ours": "× vacsr",
    "processor": "processor seconds", "processor_of_ours": "× vacsr", "difference": "largest difference, %",
}  # fmt: skip
_TOLERANCE = {"eccv_caption": 1e-9, "torchmetrics": 1e-4}  # percent; torchmetrics answers in float32
Metrics = dict[str, float]


def run(device: torch.device, log: Log = lambda _: None, *, images: int | None) -> BenchResult:
    """On the CPU whatever the device: the other systems do not use a GPU."""
    protocols, plain = (COCO, "coco-5k") if images is None else (("flickr",), "flickr")
    pairs = coco_pairs() if images is None else small_pairs(images)
    scores = torch.randn(len(pairs.image_ids), len(pairs), generator=torch.Generator().manual_seed(0))
    scores[pairs.caption_image, torch.arange(len(pairs))] += 3.5  # labelled pairs: a share of the queries is right
    every = ", ".join(protocols)
    metrics: Metrics = {}
    costs: dict[str, Cost] = {}
    for protocol in protocols:
        log(f"vacsr, {protocol}")
        values, costs[protocol] = timed(partial(our_metrics, scores, pairs, protocol))
        metrics |= values
    total, ours = np.sum(list(costs.values()), axis=0), costs[plain]
    rows, notes = [_row("vacsr", every, total, ours=total)], []
    if images is None:
        log("eccv_caption")
        ranked, sorting = timed(lambda: rankings(scores, pairs))
        theirs, cost = timed(lambda: package_metrics(*ranked))
        worst = largest_difference(metrics, theirs, system="eccv_caption")
        rows.append(_row("eccv_caption with its rankings", every, sorting + cost, ours=total, difference=worst))
        rows.append(_row("eccv_caption, rankings given", every, cost, ours=total, difference=worst))
        rows.append(_row("vacsr", plain, ours, ours=ours))
    log(f"torchmetrics, {plain}")
    try:
        theirs, cost = timed(lambda: torchmetrics_metrics(scores, pairs, plain))
        worst = largest_difference(metrics, theirs, system="torchmetrics")
        rows.append(_row("torchmetrics", f"{plain}: R@K, R-Precision", cost, ours=ours, difference=worst))
    except MissingExtra as error:
        notes.append(f"torchmetrics is left out: {error}")
    settings = {"images": len(pairs.image_ids), "captions": len(pairs)}
    where = describe_device(torch.device("cpu"))
    return BenchResult("metrics", where, settings, rows, COLUMNS, ("seconds",), notes)


def _row(system: str, protocols: str, cost: Cost, *, ours: Cost, difference: float | None = None) -> dict[str, Any]:
    numbers = np.stack([cost, cost / ours], axis=1).flatten().tolist()  # each with its ratio
    return dict(zip(COLUMNS, (system, protocols, *numbers, difference), strict=True))


def coco_pairs() -> MatrixIds:
    """COCO's 5,000 test images with their 25,000 captions."""
    owners = coco_owners()
    rows = {image: row for row, image in enumerate(dict.fromkeys(owners.values()))}
    return MatrixIds(tuple(rows), tuple(owners), torch.tensor([rows[image] for image in owners.values()]))


def small_pairs(images: int) -> MatrixIds:
    """Images with five captions each."""
    caption_image = torch.arange(images).repeat_interleave(5)
    return MatrixIds(tuple(map(str, range(images))), tuple(map(str, range(5 * images))), caption_image)


def our_metrics(scores: Tensor, pairs: MatrixIds, protocol: str) -> Metrics:
    """By vacsr, in percent."""
    parts = protocol_galleries([protocol], pairs)[protocol]
    result = retrieval_result([part.ranks(MatrixScores(scores)) for part in parts])
    return {f"{protocol} {side} {key}": value for side in DIRECTIONS for key, value in result[side].items()}


def rankings(scores: Tensor, pairs: MatrixIds) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Ids in the order (−score, index); the lists share their int objects, which keeps them at 1 GB each."""
    images, words = (np.array(list(map(int, ids)), dtype=object) for ids in (pairs.image_ids, pairs.caption_ids))

    def ranked(queries: Any, items: Any, matrix: Tensor) -> dict[int, list[int]]:
        orders = (row.sort(descending=True, stable=True).indices.numpy() for row in matrix)
        return {name: items[order].tolist() for name, order in zip(queries, orders, strict=True)}

    return ranked(images, words, scores), ranked(words, images, scores.T)


def package_metrics(i2t: dict[int, list[int]], t2i: dict[int, list[int]]) -> Metrics:
    """By eccv_caption, in percent; recalls of ECCV Caption need a separate call."""
    import eccv_caption

    package = eccv_caption.Metrics()
    names = ("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision")
    results = package.compute_all_metrics(i2t, t2i, names) | package.compute_all_metrics(i2t, t2i, ("eccv_recalls",))
    values: Metrics = {}
    for name, both in results.items():
        protocol = next(protocol for protocol in COCO if name.startswith(protocol.replace("-", "_")))
        key = name.removeprefix(protocol.replace("-", "_") + "_").replace("rprecision", "r_precision")
        values |= {f"{protocol} {direction} {key}": 100 * float(value) for direction, value in both.items()}
    return values


def torchmetrics_metrics(scores: Tensor, pairs: MatrixIds, protocol: str) -> Metrics:
    """By torchmetrics in percent, one query after the other."""
    try:
        from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_r_precision
    except ImportError as error:
        raise MissingExtra("torchmetrics", "dev") from error
    positive = torch.arange(len(pairs.image_ids))[:, None] == pairs.caption_image
    values: Metrics = {}
    for direction, matrix, labels in (("i2t", scores, positive), ("t2i", scores.T, positive.T)):
        total = torch.zeros(4, dtype=torch.float64)
        for row, label in zip(matrix.contiguous(), labels.contiguous(), strict=True):
            hits = [retrieval_hit_rate(row, label, top_k=k) for k in (1, 5, 10)]
            total += torch.stack([*hits, retrieval_r_precision(row, label)]).double()
        names = (f"{protocol} {direction} {key}" for key in ("r1", "r5", "r10", "r_precision"))
        values |= dict(zip(names, (100 * total / len(matrix)).tolist(), strict=True))
    return values


def largest_difference(ours: Metrics, theirs: Metrics, *, system: str) -> float:
    """In percent; one beyond the tolerance is an error."""
    worst = max(abs(ours[name] - value) for name, value in theirs.items())
    if worst > _TOLERANCE[system]:
        raise VacsrError(f"vacsr and {system} differ by {worst:.3g}% on the same scores — report it as a bug")
    return worst
