"""Recalls and precisions from one score matrix by vacsr, eccv_caption and torchmetrics, which must agree.

    python benchmarks/metrics.py [--coco] [--threads 1] [--json FILE]

Random scores on the CPU: of 200 images with five captions each, or with --coco of its 5,000 test images, the only ones
that eccv_caption knows. It takes full rankings of ids, so sorting is part of its time and is also shown apart.
torchmetrics is called query by query, as its classes do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from _common import finish, log, parser, timed
from vacsr.bench import BenchResult, describe_device
from vacsr.evaluate.metrics import retrieval_result
from vacsr.evaluate.protocols import coco_owners, protocol_galleries
from vacsr.evaluate.score_files import MatrixIds, MatrixScores

COCO = ("coco-1k", "coco-5k", "cxc", "eccv")
COLUMNS = {
    "way": "system", "metrics": "metrics", "seconds": "seconds", "of_ours": "× vacsr",
    "processor": "processor seconds", "processor_of_ours": "× vacsr", "difference": "largest difference, %",
}  # fmt: skip
Metrics = dict[str, float]
Rankings = dict[int, list[int]]


def main() -> None:
    """Time vacsr by protocol, then the others on the same scores."""
    options = parser(__doc__)
    options.add_argument("--coco", action="store_true", help="the protocols of COCO's test images; takes minutes")
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    protocols, plain = (COCO, "coco-5k") if args.coco else (("flickr",), "flickr")
    owners = coco_owners() if args.coco else {str(caption): str(caption // 5) for caption in range(1000)}
    row_of = {image: row for row, image in enumerate(dict.fromkeys(owners.values()))}
    pairs = MatrixIds(tuple(row_of), tuple(owners), torch.tensor([row_of[image] for image in owners.values()]))
    scores = torch.randn(len(pairs.image_ids), len(pairs), generator=torch.Generator().manual_seed(0))
    scores[pairs.caption_image, torch.arange(len(pairs))] += 3.5  # labelled pairs: a share of the queries is right
    metrics, costs, rows = {}, {}, []
    for protocol in protocols:
        log(f"vacsr, {protocol}")
        values, costs[protocol] = timed(partial(our_metrics, scores, pairs, protocol))
        metrics |= values
    every, total = ", ".join(protocols), sum(costs.values())

    def add(system: str, what: str, cost: np.ndarray, *, ours: np.ndarray, theirs: Metrics | None = None) -> None:
        worst = None if theirs is None else max(abs(metrics[name] - value) for name, value in theirs.items())
        assert worst is None or worst < 1e-4, f"vacsr and {system} differ by {worst}%"  # torchmetrics is in float32
        numbers = np.stack([cost, cost / ours], axis=1).flatten().tolist()  # each with its ratio
        rows.append(dict(zip(COLUMNS, (system, what, *numbers, worst), strict=True)))

    add("vacsr", every, total, ours=total)
    if args.coco:
        log("eccv_caption")
        ranked, sorting = timed(partial(rankings, scores, pairs))
        theirs, cost = timed(partial(package_metrics, *ranked))
        add("eccv_caption with its rankings", every, sorting + cost, ours=total, theirs=theirs)
        add("eccv_caption, rankings given", every, cost, ours=total, theirs=theirs)
        add("vacsr", plain, costs[plain], ours=costs[plain])
    log(f"torchmetrics, {plain}")
    theirs, cost = timed(partial(torchmetrics_metrics, scores, pairs, plain))
    add("torchmetrics", f"{plain}: R@K, R-Precision", cost, ours=costs[plain], theirs=theirs)
    settings = {"images": len(pairs.image_ids), "captions": len(pairs)}
    finish(BenchResult("metrics", describe_device(torch.device("cpu")), settings, rows, COLUMNS), args.json)


def our_metrics(scores: Tensor, pairs: MatrixIds, protocol: str) -> Metrics:
    """By vacsr, in percent."""
    parts = protocol_galleries([protocol], pairs)[protocol]
    result = retrieval_result([part.ranks(MatrixScores(scores)) for part in parts])
    return {f"{protocol} {side} {key}": value for side in ("i2t", "t2i") for key, value in result[side].items()}


def rankings(scores: Tensor, pairs: MatrixIds) -> tuple[Rankings, Rankings]:
    """Ids in the order (−score, index); the lists share their int objects, which keeps them at 1 GB each."""
    images, words = (np.array(list(map(int, ids)), dtype=object) for ids in (pairs.image_ids, pairs.caption_ids))

    def ranked(queries: Any, items: Any, matrix: Tensor) -> Rankings:
        orders = (row.sort(descending=True, stable=True).indices.numpy() for row in matrix)
        return {name: items[order].tolist() for name, order in zip(queries, orders, strict=True)}

    return ranked(images, words, scores), ranked(words, images, scores.T)


def package_metrics(i2t: Rankings, t2i: Rankings) -> Metrics:
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
    from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_r_precision

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


if __name__ == "__main__":
    main()
