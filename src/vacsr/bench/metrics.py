"""From one score matrix to the field's figures: vacsr beside eccv_caption and torchmetrics, which must agree with it.

All see the same scores. eccv_caption takes full rankings of ids, so sorting is part of its way and is also shown apart;
it knows COCO's test images only. torchmetrics is called for one query after the other, as its classes do.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vacsr.bench.result import BenchResult, Cell
from vacsr.efficiency import where_it_runs
from vacsr.errors import MissingExtra, VacsrError
from vacsr.evaluate.captions import coco_caption_image, coco_test
from vacsr.evaluate.protocols import protocol_galleries
from vacsr.evaluate.retrieval import mean_result
from vacsr.evaluate.score_files import MatrixIds
from vacsr.evaluate.scored import MatrixScores

if TYPE_CHECKING:
    from vacsr.bench import Size

COCO = ("coco-1k", "coco-5k", "cxc", "eccv")
COLUMNS = {
    "way": "system", "figures": "figures", "seconds": "seconds", "of_ours": "× vacsr",
    "processor": "processor seconds", "processor_of_ours": "× vacsr", "difference": "largest difference, %",
}  # fmt: skip
_SMALL, _PER_IMAGE = 200, 5
_AGREE = {"eccv_caption": 1e-9, "torchmetrics": 1e-4}  # percent; torchmetrics answers in float32
Figures = dict[str, float]


class Timed(NamedTuple):
    """What came out, and how long it took."""

    value: Any
    seconds: float
    processor: float
    """Seconds of processor time, which others on the machine disturb less."""

    def row(self, system: str, figures: str, *, base: Timed, difference: float | None = None) -> dict[str, Cell]:
        """Of the table, beside ours."""
        return {
            "way": system, "figures": figures, "seconds": self.seconds, "of_ours": self.seconds / base.seconds,
            "processor": self.processor, "processor_of_ours": self.processor / base.processor, "difference": difference,
        }  # fmt: skip


class FiguresDiffer(VacsrError):
    """Two systems disagree on the same scores."""


def bench_metrics(size: Size, device: torch.device, say: Callable[[str], None]) -> BenchResult:
    """On the CPU, whatever the device: ``small`` is 200 images with their labels, ``coco`` all of COCO's test list."""
    del device  # metrics of a matrix in memory; the others know no GPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs, protocols = (coco_pairs(), COCO) if size == "coco" else (small_pairs(), ("flickr",))
        scores = random_scores(pairs)
        ours = {}
        for protocol in protocols:
            say(f"vacsr, {protocol}")
            ours[protocol] = timed(partial(our_figures, scores, pairs, protocol))
        rows, notes = _rows(scores, pairs, ours, say=say)
    settings = {"images": len(pairs.image_ids), "captions": len(pairs)}
    return BenchResult("metrics", where_it_runs(torch.device("cpu")), settings, rows, COLUMNS, ("seconds",), notes)


def _rows(
    scores: Tensor, pairs: MatrixIds, ours: dict[str, Timed], *, say: Callable[[str], None]
) -> tuple[list[dict[str, Cell]], list[str]]:
    """Everybody's, ours first; notes say who is absent."""
    figures = {name: value for found in ours.values() for name, value in found.value.items()}
    names = ", ".join(ours)
    whole = Timed(None, *(sum(times) for times in zip(*(found[1:] for found in ours.values()), strict=True)))
    rows = [whole.row("vacsr", names, base=whole)]
    if "eccv" in ours:
        say("eccv_caption: rankings")
        sorting = timed(lambda: rankings(scores, pairs))
        say("eccv_caption: figures")
        package = timed(lambda: package_figures(*sorting.value))
        worst = largest_difference(figures, package.value, system="eccv_caption")
        ranked = Timed(None, sorting.seconds + package.seconds, sorting.processor + package.processor)
        rows.append(ranked.row("eccv_caption with its rankings", names, base=whole, difference=worst))
        rows.append(package.row("eccv_caption, rankings given", names, base=whole, difference=worst))
    plain = "coco-5k" if "coco-5k" in ours else "flickr"
    say(f"torchmetrics, {plain}")
    try:
        other = timed(lambda: torchmetrics_figures(scores, pairs, plain))
    except MissingExtra as error:
        return rows, [f"torchmetrics is left out: {error}"]
    worst = largest_difference(figures, other.value, system="torchmetrics")
    if len(ours) > 1:
        rows.append(ours[plain].row("vacsr", plain, base=ours[plain]))
    rows.append(other.row("torchmetrics", f"{plain}: R@K, R-Precision", base=ours[plain], difference=worst))
    return rows, []


def timed(work: Callable[[], Any]) -> Timed:
    """One call."""
    started, busy = time.perf_counter(), time.process_time()
    value = work()
    return Timed(value, time.perf_counter() - started, time.process_time() - busy)


def coco_pairs() -> MatrixIds:
    """COCO's 5,000 test images with their 25,000 captions."""
    words = coco_test().captions
    images = tuple(str(coco_test().image_of(caption)) for caption in words[::5])
    captions = tuple(str(name) for name in words)
    return MatrixIds(images, captions, coco_caption_image(images, captions))


def small_pairs() -> MatrixIds:
    """200 images with five captions each."""
    owner = torch.arange(_SMALL).repeat_interleave(_PER_IMAGE)
    return MatrixIds(tuple(map(str, range(_SMALL))), tuple(map(str, range(len(owner)))), owner)


def random_scores(pairs: MatrixIds) -> Tensor:
    """Normal scores, those of labelled pairs higher, so that a share of the queries is right. [N, M]"""
    scores = torch.randn(len(pairs.image_ids), len(pairs), generator=torch.Generator().manual_seed(0))
    scores[pairs.caption_image, torch.arange(len(pairs))] += 3.5
    return scores


def our_figures(scores: Tensor, pairs: MatrixIds, protocol: str) -> Figures:
    """By name, in percent."""
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
    figures: Figures = {}
    for name, both in found.items():
        protocol = next(one for one in COCO if name.startswith(one.replace("-", "_")))
        key = name.removeprefix(protocol.replace("-", "_") + "_").replace("rprecision", "r_precision")
        figures |= {f"{protocol} {way} {key}": 100 * float(value) for way, value in both.items()}
    return figures


def torchmetrics_figures(scores: Tensor, pairs: MatrixIds, protocol: str) -> Figures:
    """Each image with its own captions, one query after the other."""
    try:
        from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_r_precision
    except ImportError as error:
        raise MissingExtra("torchmetrics", "dev") from error
    own = torch.arange(len(pairs.image_ids))[:, None] == pairs.caption_image
    figures: Figures = {}
    for way, matrix, labels in (("i2t", scores, own), ("t2i", scores.T.contiguous(), own.T.contiguous())):
        total = torch.zeros(4, dtype=torch.float64)
        for row, label in zip(matrix, labels, strict=True):
            hits = [retrieval_hit_rate(row, label, top_k=k) for k in (1, 5, 10)]
            total += torch.stack([*hits, retrieval_r_precision(row, label)]).double()
        names = (f"{protocol} {way} {key}" for key in ("r1", "r5", "r10", "r_precision"))
        figures |= dict(zip(names, (100 * total / len(matrix)).tolist(), strict=True))
    return figures


def largest_difference(ours: Figures, theirs: Figures, *, system: str) -> float:
    """In percent; one that matters is an error."""
    worst = max(abs(ours[name] - value) for name, value in theirs.items())
    if worst > _AGREE[system]:
        raise FiguresDiffer(f"vacsr and {system} differ by {worst:.3g}% on the same scores — report it as a fault")
    return worst
