"""Search: embed the query, take candidates from the index, score them again, apply a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.evaluate.uncertainty import Array
from vacsr.methods.base import Embedding
from vacsr.scoring import Images, PairScorer, Texts
from vacsr.scoring.topk import Direction
from vacsr.search.calibration import Calibration, DirectionCalibration, load_calibration
from vacsr.search.candidates import CANDIDATES, DEPTH
from vacsr.search.index import Hits, VectorIndex, check_same
from vacsr.search.ondemand import OnDemand
from vacsr.search.provenance import embedding_provenance, model_digest
from vacsr.search.rerank import Abstain, Policy, Ranked, Scored, choose_policy
from vacsr.search.rescore import Rescored, rescore
from vacsr.search.results import Hit, Results, Way
from vacsr.search.similar import check_policy, similar

T = TypeVar("T")

_HELD: dict[Direction, str] = {"t2i": "images", "i2t": "texts"}


class Searcher:
    """A model, an index of its embeddings, and what a dev split said about both.

    An index of images asked with a text, and one of texts asked with an image, answers with scores and grades. Asked
    with its own kind, it answers by cosine alone: the method scores pairs of the two kinds only.
    """

    def __init__(self, scorer: PairScorer, index: VectorIndex, calibration: Calibration | None = None) -> None:
        self.scorer, self.index, self.calibration = scorer, index, calibration
        self.direction: Direction = "i2t" if index.holds == "texts" else "t2i"
        """In which it gives grades."""
        self._provenance = embedding_provenance(scorer.model, _HELD[self.direction])
        self.use(index)

    @classmethod
    def from_pretrained(cls, run: str | Path, index: VectorIndex, *, device: str = "auto") -> Searcher:
        """From a run or model folder, with its ``search.json`` where it has one."""
        scorer = PairScorer.from_pretrained(run, device=device)
        return cls(scorer, index, load_calibration(Path(run), model=model_digest(scorer.model)))

    def use(self, index: VectorIndex) -> None:
        """Search this one from now on: of the same model and of the same kind."""
        check_same(
            "the index",
            dim=index.dim,
            provenance=index.provenance,
            wanted_dim=self.scorer.model.dim,
            wanted_provenance=self._provenance,
        )
        self.index = index

    @property
    def fitted(self) -> DirectionCalibration | None:
        """What is known about this direction."""
        return None if self.calibration is None else self.calibration.of(self.direction)

    def search_texts(self, texts: Texts, *, k: int = 10, policy: str | Policy = "score") -> list[Results]:
        """The images for each text, or similar texts: words for a model with towers, else features [Q, D_text]."""
        way: Way = "t2i" if self.direction == "t2i" else "t2t"
        size = self._checked_size(k, policy, way=way)
        return self._search(self.scorer.embed_texts(texts), way=way, k=k, policy=policy, size=size)

    def search_images(self, images: Images, *, k: int = 10, policy: str | Policy = "score") -> list[Results]:
        """The texts for each image, or similar images: photos for a model with towers, else features [Q, D_image]."""
        way: Way = "i2t" if self.direction == "i2t" else "i2i"
        size = self._checked_size(k, policy, way=way)
        return self._search(self.scorer.embed_images(images), way=way, k=k, policy=policy, size=size)

    def _checked_size(self, k: int, policy: str | Policy, *, way: Way) -> int:
        """Of the index, asked for once a search: it may lie on a server."""
        if k < 1:
            raise UsageError(f"k is {k}, expected 1 or more — try -k 10")
        if way != self.direction:
            check_policy(policy, way)
        size = len(self.index)
        if not size:
            raise UsageError("the index is empty — fill it: vacsr index add INDEX --run RUN --pairs SPEC")
        return size

    def _search(self, queries: Embedding, *, way: Way, k: int, policy: str | Policy, size: int) -> list[Results]:
        if way != self.direction:
            return similar(self.index.search(queries.mean, k), way, size=size)
        chosen = choose_policy(policy, self.fitted) if isinstance(policy, str) else policy
        candidates, depth = (CANDIDATES, DEPTH) if self.fitted is None else (self.fitted.candidates, self.fitted.depth)
        hits = self.index.search(queries.mean, max(candidates, k))
        found = rescore(
            self.scorer, queries, hits, direction=self.direction, candidates=candidates, depth=max(depth, k)
        )
        scored = [self._scored(hits, found, row) for row in range(len(hits.ids))]
        return [self._results(one, chosen.apply(one), k=k, policy=chosen, size=size) for one in scored]

    def _scored(self, hits: Hits, found: Rescored, row: int) -> Scored:
        score, cosine = _floats(found.score[row]), _floats(found.cosine[row])
        sigma = None if found.sigma is None else _floats(found.sigma[row])
        order = found.place[row].tolist()
        return Scored(
            ids=_reordered(hits.ids[row], order),
            metadata=_reordered(hits.metadata[row], order),
            cosine=cosine,
            score=score,
            grade=self._grade(found.score[row]),
            sigma=sigma,
            confidence=self._confidence(score, cosine, sigma),
        )

    def _grade(self, score: Tensor) -> Array:
        if self.fitted is not None:
            return self.fitted.grades.apply(score)
        with torch.inference_mode():
            return _floats(self.scorer.model.method.grade(score.to(self.scorer.device)))

    def _confidence(self, score: Array, cosine: Array, sigma: Array | None) -> float | None:
        """Chance that the first is right, from as many candidates as it was fitted with."""
        if self.fitted is None or len(score) < 2:
            return None
        near = slice(self.fitted.candidates)
        deep = None if sigma is None else sigma[None, : self.fitted.depth]
        return float(self.fitted.answer.confidence_of(score[None, near], cosine[None, near], deep)[0])

    def _results(self, scored: Scored, ranked: Ranked, *, k: int, policy: Policy, size: int) -> Results:
        places = ranked.order[:k].tolist()
        also = _also(self.fitted, scored) - {places[0]}
        note = self._note(policy, size)
        return Results(
            direction=self.direction,
            policy=policy.name,
            hits=tuple(_hit(scored, place, rank, also=place in also) for rank, place in enumerate(places, 1)),
            answered=ranked.answered,
            reason=ranked.reason,
            confidence=scored.confidence,
            promised=ranked.answered and not note and self._vouches(policy),
            note=note,
            calibrated=self.fitted is not None,
            index_size=size,
        )

    def _vouches(self, policy: Policy) -> bool:
        """Is it the rule that was certified, with a threshold?"""
        if self.fitted is None or not isinstance(policy, Abstain):
            return False
        return policy.rule == self.fitted.answer and policy.rule.threshold is not None

    def _note(self, policy: Policy, size: int) -> str:
        """What of the calibration does not hold for this index; empty where all does."""
        if self.fitted is None:
            return ""
        fitted, again = self.fitted.gallery, "vacsr calibrate RUN --pairs SPEC --gallery N, N images a gallery"
        if not self.fitted.same_size(size):
            message = f"grades and confidence are off: the index holds {size:,}, they were fitted at {fitted:,}"
            if isinstance(policy, Abstain):
                message = f"no promise at this size: the index holds {size:,}, thresholds were fitted at {fitted:,}"
                message += ", grades and confidence too"
            return f"{message} — fit them again: {again}"
        if isinstance(policy, Abstain) and not self.index.exact:
            return "no promise: the index may miss the nearest, which the fit did not — search an index of exact:FOLDER"
        return ""


def _also(fitted: DirectionCalibration | None, scored: Scored) -> set[int]:
    """Places of the candidates that look like matches."""
    if fitted is None:
        return set()
    depth = min(fitted.depth, len(scored.ids))
    sigma = None if scored.sigma is None else scored.sigma[:depth]
    value = fitted.missed.of(scored.score[:depth], sigma)
    return {place for place in range(depth) if value[place] >= fitted.missed.floor}


def _hit(scored: Scored, place: int, rank: int, *, also: bool) -> Hit:
    known = scored.sigma is not None and place < len(scored.sigma)
    return Hit(
        rank=rank,
        id=scored.ids[place],
        cosine=float(scored.cosine[place]),
        score=float(scored.score[place]),
        grade=float(scored.grade[place]),
        uncertainty=float(scored.sigma[place]) if scored.sigma is not None and known else None,
        probably_also=also,
        metadata=scored.metadata[place],
    )


def _reordered(items: Sequence[T], order: Sequence[int]) -> Sequence[T]:
    """Read as late as the index allows: most are never shown, and a policy seldom looks at them."""
    return OnDemand(items.__getitem__, order)


def _floats(values: Tensor) -> Array:
    return np.asarray(values.detach().double().cpu().numpy(), dtype=np.float64)
