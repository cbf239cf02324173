"""Time from one score matrix to the field's figures: vacsr, eccv_caption and torchmetrics side by side.

    python benchmarks/metrics.py [--threads 1] [--json FILE]

All three see the same 5,000 × 25,000 scores of COCO's test list. eccv_caption takes full rankings of ids, so sorting is
part of its way and is also shown apart. torchmetrics knows COCO 5K's labels only, through its function for one query;
its figures are R@1/5/10 and R-Precision. The run takes some minutes, nearly all of them the others'. Figures are
compared, too: a difference above 1e-9 is an error.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vacsr.evaluate.captions import coco_caption_image, coco_test
from vacsr.evaluate.protocols import protocol_galleries
from vacsr.evaluate.retrieval import mean_result
from vacsr.evaluate.score_files import MatrixIds
from vacsr.evaluate.scored import MatrixScores

PROTOCOLS = ("coco-1k", "coco-5k", "cxc", "eccv")
Figures = dict[str, float]


class Timed(NamedTuple):
    """What came out, and how long it took."""

    value: Any
    seconds: float
    processor: float
    """Seconds of processor time, which others on the machine disturb less."""


def timed(work: Callable[[], Any]) -> Timed:
    started, busy = time.perf_counter(), time.process_time()
    value = work()
    return Timed(value, time.perf_counter() - started, time.process_time() - busy)


def random_scores(pairs: MatrixIds) -> Tensor:
    """Normal scores, those of labelled pairs higher, so that a share of the queries is right. [5000, 25000]"""
    scores = torch.randn(len(pairs.image_ids), len(pairs), generator=torch.Generator().manual_seed(0))
    scores[pairs.caption_image, torch.arange(len(pairs))] += 3.5
    return scores


def our_figures(scores: Tensor, pairs: MatrixIds, protocol: str) -> Figures:
    parts = protocol_galleries([protocol], pairs)[protocol]
    result = mean_result([part.ranks(MatrixScores(scores)) for part in parts])
    return {f"{protocol} {way} {key}": result[way][key] for way in ("i2t", "t2i") for key in result[way]}


def rankings(scores: Tensor, pairs: MatrixIds) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Ids in the order (−score, index); the lists share their numbers, which keeps them at 1 GB each."""
    images, words = (
        np.array([int(name) for name in ids], dtype=object) for ids in (pairs.image_ids, pairs.caption_ids)
    )
    found = []
    for queries, items, matrix in ((images, words, scores), (words, images, scores.T)):
        found.append({name: items[_order(row)].tolist() for name, row in zip(queries, matrix, strict=True)})
    return found[0], found[1]


def _order(row: Tensor) -> Any:
    return row.sort(descending=True, stable=True).indices.numpy()


def package_figures(i2t: dict[int, list[int]], t2i: dict[int, list[int]]) -> Figures:
    """eccv_caption's own, in percent; recalls of ECCV Caption need a call of their own."""
    import eccv_caption

    metrics = eccv_caption.Metrics()
    asked = ("coco_1k_recalls", "coco_5k_recalls", "cxc_recalls", "eccv_map_at_r", "eccv_rprecision")
    found = metrics.compute_all_metrics(i2t, t2i, asked) | metrics.compute_all_metrics(i2t, t2i, ("eccv_recalls",))
    figures = {}
    for name, both in found.items():
        protocol = next(one for one in PROTOCOLS if name.startswith(one.replace("-", "_")))
        key = name.removeprefix(protocol.replace("-", "_") + "_").replace("rprecision", "r_precision")
        figures |= {f"{protocol} {way} {key}": 100 * float(value) for way, value in both.items()}
    return figures


def torchmetrics_figures(scores: Tensor, pairs: MatrixIds) -> Figures:
    """COCO 5K, one query after the other, as its classes do it."""
    from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_r_precision

    own = torch.arange(len(pairs.image_ids))[:, None] == pairs.caption_image
    figures = {}
    for way, matrix, labels in (("i2t", scores, own), ("t2i", scores.T.contiguous(), own.T.contiguous())):
        total = torch.zeros(4, dtype=torch.float64)
        for row, label in zip(matrix, labels, strict=True):
            hits = [retrieval_hit_rate(row, label, top_k=k) for k in (1, 5, 10)]
            total += torch.stack([*hits, retrieval_r_precision(row, label)]).double()
        keys = ("r1", "r5", "r10", "r_precision")
        figures |= dict(
            zip((f"coco-5k {way} {key}" for key in keys), (100 * total / len(matrix)).tolist(), strict=True)
        )
    return figures


def largest_difference(ours: Figures, theirs: Figures) -> float:
    return max(abs(ours[name] - value) for name, value in theirs.items())


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    words = coco_test().captions
    images = tuple(str(coco_test().image_of(caption)) for caption in words[::5])
    captions = tuple(str(name) for name in words)
    pairs = MatrixIds(images, captions, coco_caption_image(images, captions))
    scores = random_scores(pairs)

    ours = {name: timed(lambda name=name: our_figures(scores, pairs, name)) for name in PROTOCOLS}
    figures = {key: value for found in ours.values() for key, value in found.value.items()}
    sorting = timed(lambda: rankings(scores, pairs))
    package = timed(lambda: package_figures(*sorting.value))
    sorting = sorting._replace(value=None)
    other = timed(lambda: torchmetrics_figures(scores, pairs))
    worst = {"eccv_caption": largest_difference(figures, package.value)}
    worst["torchmetrics"] = largest_difference(figures, other.value)

    whole = Timed(None, *(sum(times) for times in zip(*(found[1:] for found in ours.values()), strict=True)))
    ranked = Timed(None, sorting.seconds + package.seconds, sorting.processor + package.processor)
    rows = [
        ("vacsr", "COCO 1K, 5K, CxC, ECCV Caption", whole, whole),
        ("eccv_caption with its rankings", "the same", ranked, whole),
        ("eccv_caption, rankings given", "the same", package, whole),
        ("vacsr", "COCO 5K", ours["coco-5k"], ours["coco-5k"]),
        ("torchmetrics", "COCO 5K", other, ours["coco-5k"]),
    ]
    print(f"CPU, threads: {args.threads}, torch {torch.__version__}, 5,000 × 25,000 scores\n")
    print("| system | figures | seconds | × vacsr | processor seconds | × vacsr |\n|---|---|---|---|---|---|")
    for system, what, found, base in rows:
        wall, busy = f"{found.seconds / base.seconds:.1f}", f"{found.processor / base.processor:.1f}"
        print(f"| {system} | {what} | {found.seconds:.1f} | {wall} | {found.processor:.1f} | {busy} |")
    print(f"\nlargest difference of a figure, in percent: {worst}")
    if args.json:
        steps = {f"vacsr {name}": one for name, one in ours.items()}
        steps |= {"eccv_caption rankings": sorting, "eccv_caption figures": package, "torchmetrics coco-5k": other}
        found = {
            "threads": args.threads,
            "torch": torch.__version__,
            "seconds": {name: one.seconds for name, one in steps.items()},
            "processor": {name: one.processor for name, one in steps.items()},
            "difference": worst,
        }
        args.json.write_text(json.dumps(found, indent=2))
    if worst["eccv_caption"] > 1e-9 or worst["torchmetrics"] > 1e-4:  # torchmetrics answers in float32
        raise SystemExit("the figures differ")


if __name__ == "__main__":
    main()
