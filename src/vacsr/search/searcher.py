"""Search: embed the query, take candidates from the index, score them with the method, apply a policy.

:class:`Results` is what a search returns in Python, as JSON and over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, SkipValidation, computed_field
from torch import Tensor

from vacsr.data.photos import Picture
from vacsr.errors import UsageError
from vacsr.evaluate.report import data_frame
from vacsr.evaluate.uncertainty import Array
from vacsr.methods.base import Embedding
from vacsr.model import MatchingModel
from vacsr.scoring import Images, PairScorer, PairScores, Texts
from vacsr.scoring.topk import Direction
from vacsr.search.calibrate import CANDIDATES, DEPTH, Calibration, DirectionCalibration, Rescored, rescore
from vacsr.search.calibrate_run import load_calibration
from vacsr.search.index import Hits, LazyList, VectorIndex, check_fits, embedding_provenance, held_kind, model_digest
from vacsr.search.policies import ByScore, Policy, Ranked, Scored, choose_policy

Way = Literal["t2i", "i2t", "i2i", "t2t"]
"""What was asked with and what was found: images of a text, texts of an image, similar images, similar texts. The last
two are by cosine alone: the method scores pairs of an image and a text, and no others."""
UserText = Annotated[str, SkipValidation]
"""A string of the user's data: it may hold half a surrogate pair, as JSON may, which a check for UTF-8 would refuse."""
LIKELY = 0.5
"""From this grade on a hit is more likely a match than not."""
_HELD: dict[Direction, str] = {"t2i": "images", "i2t": "texts"}


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True)


class Hit(_Result):
    """One item of the index."""

    rank: int
    """From 1."""
    id: UserText
    """As the index was given it."""
    cosine: float
    """Of the towers' vectors."""
    score: float | None
    """The method's. It has none for two images or two texts."""
    grade: float | None
    """The probability that it is a match: calibrated if there is a calibration, else as the method was trained. None
    where neither knows one: a method that only ranks, or no score."""
    uncertainty: float | None
    """σ of the pair; None where the method has none, or there is no score."""
    disagreement: float | None = None
    """Of an ensemble's members about the pair; None without members, or without a score."""
    probably_also: bool
    """Not the first, but by its calibrated grade more likely a match than not."""
    metadata: Annotated[dict[str, Any], SkipValidation]
    """That the index keeps with it."""


class Results(_Result):
    """Hits, best first, and whether the first is guaranteed."""

    schema_version: int = Field(default=1, alias="schema")
    """Of this answer's form."""
    direction: Way
    """t2i: a text found images. i2t: an image found texts. i2i, t2t: similar ones, by cosine, without grade."""
    policy: str
    """That ordered the hits."""
    hits: tuple[Hit, ...]
    """As many as were asked for, or as the index holds."""
    answered: bool
    """False only where the policy abstains; nothing is guaranteed of the hits then."""
    reason: str
    """Why there is no answer; empty where there is one."""
    confidence: float | None
    """Of the answer: the chance that the first by score is right; None without a calibration."""
    promised: bool
    """Is the first hit guaranteed? Only an answer of ``abstain`` is, from an exact index of the size of the fit."""
    note: str
    """What does not hold for this answer, and what to type; empty where all does."""
    calibrated: bool
    """Are grades those of a calibration?"""
    index_size: int
    """Items that were searched."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def probably_also(self) -> list[str]:
        """Ids of the hits that are probably matches too."""
        return [hit.id for hit in self.hits if hit.probably_also]

    @property
    def scored(self) -> bool:
        """Has the method scored the hits? Not among images alone, or texts alone."""
        return self.direction in ("t2i", "i2t")

    def __repr__(self) -> str:
        hits = ", ".join(f"{hit.id} {hit.cosine if hit.grade is None else hit.grade:.2f}" for hit in self.hits[:3])
        return f"Results({self.direction}, {len(self.hits)} of {self.index_size:,}: {hits}, …)"

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump()

    def to_frame(self) -> Any:
        """One row per hit; needs pandas."""
        return data_frame(hit.model_dump() for hit in self.hits)

    def _repr_html_(self) -> str:
        names = ("rank", "id", "grade", "uncertainty", "score", "cosine")
        rows = [[escape(_cell(getattr(hit, name))) for name in names] for hit in self.hits]
        lines = [f"<th>{'</th><th>'.join(names)}</th>", *(f"<td>{'</td><td>'.join(row)}</td>" for row in rows)]
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class Searcher:
    """A model, an index of its embeddings, and optionally a calibration of both on a dev split.

    An index of images queried with a text, and one of texts queried with an image, answers with scores and grades.
    Queried with its own kind, it answers by cosine alone: the method scores pairs of the two kinds only.
    """

    def __init__(
        self, model: MatchingModel | PairScorer, index: VectorIndex, calibration: Calibration | None = None
    ) -> None:
        self.scorer = model if isinstance(model, PairScorer) else PairScorer(model)
        self.calibration = calibration
        self.direction: Direction = "i2t" if held_kind(index.provenance) == "texts" else "t2i"
        """In which it gives grades."""
        self._provenance = embedding_provenance(self.scorer.model, _HELD[self.direction])
        self.use(index)

    @classmethod
    def from_pretrained(cls, run: str | Path, index: VectorIndex, *, device: str = "auto") -> Searcher:
        """From a run or model folder, with its ``search.json`` if it has one."""
        scorer = PairScorer.from_pretrained(run, device=device)
        return cls(scorer, index, load_calibration(Path(run), model=model_digest(scorer.model)))

    def use(self, index: VectorIndex) -> None:
        """Search this index from now on: of the same model and the same kind."""
        check_fits("the index", index, dim=self.scorer.model.dim, provenance=self._provenance)
        self.index = index

    @property
    def fitted(self) -> DirectionCalibration | None:
        return None if self.calibration is None else self.calibration.of(self.direction)

    @torch.inference_mode()
    def grade(self, score: Tensor) -> Array | None:
        """The probability of a match: calibrated, or else the method's own; None if there is neither. [N] -> [N]"""
        if self.fitted is not None:
            return self.fitted.grades.apply(_floats(score))
        grade = self.scorer.model.method.grade(score.to(self.scorer.device))
        return None if grade is None else _floats(grade)

    def search(
        self, *, text: str | None = None, image: Picture | None = None, k: int = 10, policy: str | Policy = "score"
    ) -> Results:
        """One query of a model with towers: words, or a photo as a path or a PIL image."""
        if (text is None) == (image is None):
            raise UsageError("a query is a text or an image — give one of them: search(text='a dog on a beach')")
        if text is not None:
            return self.search_texts([text], k=k, policy=policy)[0]
        return self.search_images([image], k=k, policy=policy)[0]  # type: ignore[list-item]

    def search_texts(self, texts: Texts, *, k: int = 10, policy: str | Policy = "score") -> list[Results]:
        """The images for each text, or similar texts: words for a model with towers, else features [Q, D_text]."""
        way: Way = "t2i" if self.direction == "t2i" else "t2t"
        return self._search(lambda: self.scorer.embed_texts(texts), way=way, k=k, policy=policy)

    def search_images(self, images: Images, *, k: int = 10, policy: str | Policy = "score") -> list[Results]:
        """The texts for each image, or similar images: photos for a model with towers, else features [Q, D_image]."""
        way: Way = "i2t" if self.direction == "i2t" else "i2i"
        return self._search(lambda: self.scorer.embed_images(images), way=way, k=k, policy=policy)

    def _search(self, embed: Callable[[], Embedding], *, way: Way, k: int, policy: str | Policy) -> list[Results]:
        if k < 1:
            raise UsageError(f"k is {k}, expected 1 or more — try -k 10")
        name = policy if isinstance(policy, str) else policy.name
        if way != self.direction and name != ByScore.name:
            kind, other = ("images", "a text") if way == "i2i" else ("texts", "an image")
            message = f"policy {name!r} needs scores, and similar {kind} are found by cosine alone"
            raise UsageError(f"{message} — leave the policy out, or search with {other}")
        size = len(self.index)  # read once per search, since it may be on a server
        if not size:
            raise UsageError("the index is empty — fill it: vacsr index add INDEX --run RUN --pairs SPEC")
        if way != self.direction:
            return _similar(self.index.search(embed().mean, k), way, size=size)
        chosen = choose_policy(policy, self.fitted) if isinstance(policy, str) else policy
        scored = self._candidates(embed(), k)
        return [self._results(one, chosen.apply(one), k=k, policy=chosen, size=size) for one in scored]

    def _candidates(self, queries: Embedding, k: int) -> list[Scored]:
        """The nearest by cosine, ordered by score as :func:`rescore` does."""
        candidates, depth = (CANDIDATES, DEPTH) if self.fitted is None else (self.fitted.candidates, self.fitted.depth)
        hits = self.index.search(queries.mean, max(candidates, k))
        count, width = hits.scores.shape
        held = Embedding(hits.vectors.reshape(count * width, -1).to(self.scorer.device))
        scores = PairScores(self.scorer, *((held, queries) if self.direction == "t2i" else (queries, held)))
        rescored = rescore(
            scores, torch.arange(count), torch.arange(count * width).view(count, width),
            direction=self.direction, candidates=candidates, depth=max(depth, k),
        )  # fmt: skip
        return [self._scored(hits, rescored, row) for row in range(count)]

    def _scored(self, hits: Hits, rescored: Rescored, row: int) -> Scored:
        order, score = rescored.order[row], _floats(rescored.score[row])
        cosine = _floats(hits.scores[row].cpu()[order])
        sigma, disagreement = (
            None if one is None else _floats(one[row]) for one in (rescored.sigma, rescored.disagreement)
        )
        grade, confidence = self.grade(rescored.score[row]), None
        if self.fitted is not None and len(score) > 1:  # from as many candidates as it was fitted with
            near, deep = slice(self.fitted.candidates), slice(self.fitted.depth)
            first = None if sigma is None else sigma[None, deep]
            confidence = float(self.fitted.answer.confidence_of(score[None, near], cosine[None, near], first)[0])
        ids = LazyList(hits.ids[row].__getitem__, order.tolist())  # most are never shown
        metadata = LazyList(hits.metadata[row].__getitem__, order.tolist())
        return Scored(ids, metadata, cosine, score, grade, sigma, confidence, disagreement)

    def _results(self, scored: Scored, ranked: Ranked, *, k: int, policy: Policy, size: int) -> Results:
        order = [int(position) for position in ranked.order[:k]]
        fitted, also = self.fitted, set[int]()
        if fitted is not None and scored.grade is not None and fitted.covers(size):
            likely = (scored.grade >= LIKELY) & (scored.score >= fitted.also_floor)
            also = {*np.flatnonzero(likely[: fitted.depth]).tolist()} - {order[0]}
        note = self._note(policy, size)
        certified = fitted is not None and policy.rule == fitted.answer and policy.rule.threshold is not None
        return Results(
            direction=self.direction, policy=policy.name, answered=ranked.answered, reason=ranked.reason,
            hits=tuple(_hit(scored, position, rank, also=position in also) for rank, position in enumerate(order, 1)),
            confidence=scored.confidence, promised=ranked.answered and not note and certified, note=note,
            calibrated=fitted is not None, index_size=size,
        )  # fmt: skip

    def _note(self, policy: Policy, size: int) -> str:
        """What of the calibration does not hold for this index; empty if all does."""
        if self.fitted is None:
            return ""
        if not self.fitted.same_size(size):
            message = f"grades and confidence are off: the index holds {size:,} items, the calibration is for"
            if policy.rule is not None:
                message = f"no guarantee at this size: the index holds {size:,} items, the calibration is for"
            action = "vacsr calibrate RUN --pairs SPEC --gallery N, with N images per gallery"
            return f"{message} {self.fitted.gallery:,} — calibrate again: {action}"
        if policy.rule is not None and not self.index.exact:
            return "no guarantee: the index is approximate and may miss the nearest items — use exact:FOLDER"
        return ""


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _hit(scored: Scored, position: int, rank: int, *, also: bool) -> Hit:
    unsure = [
        float(values[position]) if values is not None and position < len(values) else None
        for values in (scored.sigma, scored.disagreement)
    ]
    return Hit(
        rank=rank, id=scored.ids[position], metadata=scored.metadata[position], cosine=float(scored.cosine[position]),
        score=float(scored.score[position]), grade=None if scored.grade is None else float(scored.grade[position]),
        uncertainty=unsure[0], disagreement=unsure[1], probably_also=also,
    )  # fmt: skip


def _similar(hits: Hits, way: Way, *, size: int) -> list[Results]:
    """Similar images of an image, or texts of a text: the index's own order, without scores."""
    kind = "images" if way == "i2i" else "texts"
    common: dict[str, Any] = {
        "direction": way, "policy": ByScore.name, "answered": True, "reason": "", "confidence": None,
        "promised": False, "calibrated": False, "index_size": size,
        "note": f"similar {kind}, by cosine alone: no grade, no uncertainty, no guarantee",
    }  # fmt: skip
    ungraded: dict[str, Any] = {"score": None, "grade": None, "uncertainty": None, "probably_also": False}
    results = []
    for row in zip(hits.ids, hits.scores.tolist(), hits.metadata, strict=True):
        items = enumerate(zip(*row, strict=True), 1)
        listed = (Hit(rank=rank, id=name, cosine=cos, metadata=item, **ungraded) for rank, (name, cos, item) in items)
        results.append(Results(hits=tuple(listed), **common))
    return results


def _floats(values: Tensor) -> Array:
    return np.asarray(values.detach().double().cpu().numpy(), dtype=np.float64)
