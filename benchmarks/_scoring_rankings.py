"""What precision does to the order of items, for `scoring.py`: some queries of a side, all items of the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from _scoring_ways import WIDE, Problem
from vacsr.bench.timing import what_failed
from vacsr.methods.base import Embedding
from vacsr.scoring import Engine, choose_engine
from vacsr.scoring.folded import FP8, BlockScorer
from vacsr.scoring.kernel import KernelScorer
from vacsr.scoring.topk import stable_topk

QUERIES, TOP = 256, 10
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}


class Sides(NamedTuple):
    """Of some images with all texts, and of some texts with all images: scores, or the indices of the best."""

    texts: Tensor  # [Q, T] or [Q, k]
    images: Tensor  # [Q, I] or [Q, k]


def rankings(p: Problem) -> dict[str, Any]:
    """Each precision against float32, float8 also against bfloat16; what fails says why, the others go on."""
    known = {"fp32": _scores(p, BlockScorer(p.methods[WIDE]))}
    result: dict[str, Any] = {}
    for name, dtype in PRECISIONS.items():
        try:
            known[name] = _scores(p, KernelScorer(p.methods[WIDE], dtype=dtype))
        except Exception as error:  # the others are worth having without it
            result[f"{name} against fp32"] = {"error": what_failed(error)}
            continue
        for reference in _among(known, ("fp32", "bf16") if name == "fp8" else ("fp32",)):
            result[f"{name} against {reference}"] = _errors(known[name], known[reference])
    for name, find, references in (
        ("fp8 rescored", _rescored, ("fp32", "bf16")),
        ("default topk", _default, ("fp32",)),
    ):
        try:
            found = find(p)
        except Exception as error:
            result[f"{name} against fp32"] = {"error": what_failed(error)}
            continue
        for reference in _among(known, references):
            result[f"{name} against {reference}"] = _overlaps(found, _best(known[reference]))
    return result


def _among(known: dict[str, Sides], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in known]


def _scores(p: Problem, scorer: Engine) -> Sides:
    v, t = Embedding(p.v), Embedding(p.t)
    some = Embedding(p.v[:QUERIES]), Embedding(p.t[:QUERIES])
    return Sides(scorer.block(some[0], t), scorer.block(v, some[1]).T)


def _rescored(p: Problem) -> Sides:
    """float8 finds 3·k of all items, half precision scores these again."""
    return _engine_topk(p, dtype=FP8)


def _default(p: Problem) -> Sides:
    """The result of `PairScores.topk`."""
    return _engine_topk(p, dtype=torch.float32)


def _engine_topk(p: Problem, *, dtype: torch.dtype) -> Sides:
    engine, v, t = choose_engine(p.methods[WIDE], device=p.v.device, dtype=dtype), Embedding(p.v), Embedding(p.t)
    texts = engine.topk(Embedding(p.v[:QUERIES]), t, k=TOP, direction="i2t")
    return Sides(texts.index, engine.topk(v, Embedding(p.t[:QUERIES]), k=TOP, direction="t2i").index)


def _errors(found: Sides, reference: Sides) -> dict[str, float]:
    """τ and the error of the scores are those of the texts of an image."""
    tau = kendall_tau(found.texts, reference.texts)
    spread = float((found.texts - reference.texts).square().mean().sqrt() / reference.texts.std())
    return {**_overlaps(_best(found), _best(reference)), "tau": tau, "rms_over_std": spread}


def _best(scores: Sides) -> Sides:
    return Sides(stable_topk(scores.texts, TOP).index, stable_topk(scores.images, TOP).index)


def _overlaps(found: Sides, reference: Sides) -> dict[str, float]:
    images = topk_overlap(found.images, reference.images)
    return {"overlap": topk_overlap(found.texts, reference.texts), "overlap_images": images}


def topk_overlap(index: Tensor, reference: Tensor) -> float:
    """Mean share of each row of the reference that is in the same row of the other. [Q, k], [Q, k]"""
    shared = (reference.unsqueeze(2) == index.unsqueeze(1)).any(dim=2)
    return float(shared.float().mean())


def kendall_tau(scores: Tensor, reference: Tensor, *, items: int = 1000) -> float:
    """Mean Kendall's τ-a of the rows, over at most ``items`` evenly spaced items. [Q, N], [Q, N]"""
    step = max(1, -(-scores.shape[1] // items))
    taus = []
    for row, other in zip(scores[:, ::step], reference[:, ::step], strict=True):
        signs = [torch.sign(x.unsqueeze(1) - x.unsqueeze(0)) for x in (row, other)]
        taus.append((signs[0] * signs[1]).sum() / max(1, len(row) * (len(row) - 1)))
    return float(torch.stack(taus).mean())
