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
from pydantic import BaseModel, ConfigDict, Field, SkipValidation
from torch import Tensor

from vacsr.data.photos import Picture
from vacsr.errors import UsageError
from vacsr.evaluate.report import data_frame
from vacsr.evaluate.uncertainty import Array
from vacsr.methods.base import Embedding
from vacsr.model import MatchingModel
from vacsr.scoring import Images, PairScorer, PairScores, Texts
from vacsr.scoring.topk import Direction
from vacsr.search.calibrate import CANDIDATES, Calibration, DirectionCalibration
from vacsr.search.calibrate_run import read_calibration
from vacsr.search.fill import ORIGIN
from vacsr.search.galleries import Rescored, rescore
from vacsr.search.index import (
    Hits,
    LazyList,
    VectorIndex,
    calibration_paths,
    check_fits,
    direction_of,
    embedding_provenance,
    model_digest,
)
from vacsr.search.policies import SCORE, Policy, Scored, choose_policy

Way = Literal["t2i", "i2t", "i2i", "t2t"]
"""What was asked with and what was found: images of a text, texts of an image, similar images, similar texts. The last
two are by cosine alone: the method scores pairs of an image and a text, and no others."""
UserText = Annotated[str, SkipValidation]
"""A string of the user's data: it may hold half a surrogate pair, as JSON may, which a check for UTF-8 would refuse."""
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
    """The probability that it is right: calibrated among the other candidates if there is a calibration, else as the
    method was trained. None where neither knows one: a method that only ranks, or no score."""
    uncertainty: float | None
    """σ of the pair; None where the method has none, or there is no score."""
    disagreement: float | None = None
    """Of an ensemble's members about the pair; None without members, or without a score."""
    confident: bool
    """Is its grade above the calibrated cutoff?"""
    metadata: Annotated[dict[str, Any], SkipValidation]
    """That the index keeps with it."""


class Results(_Result):
    """Hits, best first, and how far they can be trusted."""

    schema_version: int = Field(default=2, alias="schema")
    """Of this answer's form."""
    direction: Way
    """t2i: a text found images. i2t: an image found texts. i2i, t2t: similar ones, by cosine, without grade."""
    policy: str
    """That chose the hits."""
    hits: tuple[Hit, ...]
    """As many as were asked for, or as the policy shows."""
    answered: bool
    """False only where the policy shows confident hits alone, and there is none."""
    reason: str
    """Why there is no answer; empty where there is one."""
    confident: int | None
    """How many hits are confident; None without a calibration."""
    answer_set: int | None
    """The first so many hits by score hold the right one, at the rate ``coverage``, if a match is in the index. 0 where
    no hit is likely enough; None where no set can hold."""
    cutoff: float | None
    """The grade from which on a hit is confident in an index of this size; None where no cutoff could be shown to
    hold."""
    precision: float | None
    """Of confident hits, so many are right at least; None without a calibration."""
    confidence: float | None
    """With which that holds."""
    coverage: float | None
    """Share of the answer sets that hold the right one."""
    guaranteed: bool
    """Do these hold here? Only in an exact index of a size that the calibration has checked, with a cutoff or a set."""
    note: str
    """What does not hold for this answer, and what to type; empty where all does."""
    index_size: int
    """Items that were searched."""

    @property
    def calibrated(self) -> bool:
        """Are grades those of a calibration?"""
        return self.precision is not None

    @property
    def summary(self) -> str:
        """In a few words, what a calibration says of the hits; empty without one."""
        if self.confident is None or self.coverage is None:
            return ""
        if self.confident:
            return f"{self.confident} confident match{'' if self.confident == 1 else 'es'}"
        if not self.answer_set or self.answer_set > max(10, len(self.hits)):
            return "no confident match"
        rate = f"({100 * self.coverage:.4g}%)"
        which = "the first hit" if self.answer_set == 1 else f"one of the first {self.answer_set} hits"
        return f"no confident match; probably {which} {rate}"

    @property
    def scored(self) -> bool:
        """Has the method scored the hits? Not among images alone, or texts alone."""
        return self.direction in ("t2i", "i2t")

    def __repr__(self) -> str:
        hits = ", ".join(f"{hit.id} {hit.cosine if hit.grade is None else hit.grade:.2f}" for hit in self.hits[:3])
        return f"Results({self.direction}, {len(self.hits)} of {self.index_size:,}: {hits}, …)"

    def to_dict(self) -> dict[str, Any]:
        """As JSON and over HTTP: without what the index notes for itself, such as where an item's file is."""
        answer = self.model_dump()
        for hit in answer["hits"]:
            hit["metadata"] = {name: value for name, value in hit["metadata"].items() if name not in ORIGIN}
        return answer

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
        self._files: list[Path] = []  # that may hold the calibration
        self._stamp: object = None  # of the file that it was read from
        self.direction: Direction = direction_of(index.provenance)
        """In which it gives grades."""
        self._provenance = embedding_provenance(self.scorer.model, _HELD[self.direction])
        self.use(index)

    @classmethod
    def from_pretrained(
        cls, run: str | Path, index: VectorIndex, *, calibration: str | Path | None = None, device: str = "auto"
    ) -> Searcher:
        """From RUN, with a calibration: of this file, or else that of the index or the model if there is one."""
        searcher = cls(PairScorer.from_pretrained(run, device=device), index)
        if calibration is not None:
            searcher.calibration = read_calibration(Path(calibration), model=model_digest(searcher.scorer.model))
        else:
            searcher._files = calibration_paths(Path(run), index)
            searcher.refresh_calibration()
        return searcher

    def refresh_calibration(self) -> None:
        """Read the calibration of the index or the model again if its file has changed, as when the index has grown."""
        path = next((path for path in self._files if path.is_file()), None)
        stamp = None if path is None else (path, path.stat().st_mtime_ns)
        if stamp != self._stamp:
            self.calibration = None if path is None else read_calibration(path, model=model_digest(self.scorer.model))
            self._stamp = stamp

    def use(self, index: VectorIndex) -> None:
        """Search this index from now on: of the same model and the same kind."""
        check_fits("the index", index, dim=self.scorer.model.dim, provenance=self._provenance)
        self.index = index

    @property
    def fitted(self) -> DirectionCalibration | None:
        """The calibration of the direction that this index answers."""
        return None if self.calibration is None else self.calibration.of(self.direction)

    def search(
        self, *, text: str | None = None, image: Picture | None = None, k: int = 10, policy: str | Policy = "score",
        min_grade: float = 0.0,
    ) -> Results:  # fmt: skip
        """One query of a model with towers: words, or a photo as a path or a PIL image.

        ``min_grade``: leave out hits with a lower grade, whatever the policy.
        """
        if (text is None) == (image is None):
            raise UsageError("a query is a text or an image — give one of them: search(text='a dog on a beach')")
        if text is not None:
            return self.search_texts([text], k=k, policy=policy, min_grade=min_grade)[0]
        return self.search_images([image], k=k, policy=policy, min_grade=min_grade)[0]  # type: ignore[list-item]

    def search_texts(
        self, texts: Texts, *, k: int = 10, policy: str | Policy = "score", min_grade: float = 0.0
    ) -> list[Results]:
        """The images for each text, or similar texts: words for a model with towers, else features [Q, D_text]."""
        way: Way = "t2i" if self.direction == "t2i" else "t2t"
        return self._search(lambda: self.scorer.embed_texts(texts), way=way, k=k, policy=policy, min_grade=min_grade)

    def search_images(
        self, images: Images, *, k: int = 10, policy: str | Policy = "score", min_grade: float = 0.0
    ) -> list[Results]:
        """The texts for each image, or similar images: photos for a model with towers, else features [Q, D_image]."""
        way: Way = "i2t" if self.direction == "i2t" else "i2i"
        return self._search(lambda: self.scorer.embed_images(images), way=way, k=k, policy=policy, min_grade=min_grade)

    def _search(
        self, embed: Callable[[], Embedding], *, way: Way, k: int, policy: str | Policy, min_grade: float
    ) -> list[Results]:
        if k < 1:
            raise UsageError(f"k is {k}, expected 1 or more — try -k 10")
        name = policy if isinstance(policy, str) else policy.name
        if way != self.direction and (name != SCORE or min_grade):
            kind, other = ("images", "a text") if way == "i2i" else ("texts", "an image")
            message = f"similar {kind} are found by cosine alone, without the grades that a policy or --min-grade needs"
            raise UsageError(f"{message} — leave both out, or search with {other}")
        size = len(self.index)  # read once per search, since it may be on a server
        if not size:
            raise UsageError("the index is empty — fill it: vacsr index add INDEX --run RUN --pairs SPEC")
        if way != self.direction:
            return _similar(self.index.search(embed().mean, k), way, size=size)
        chosen = choose_policy(policy, calibrated=self.fitted is not None) if isinstance(policy, str) else policy
        scored = self._candidates(embed(), k, size)
        if min_grade and scored and scored[0].grade is None:
            message = "the model only ranks, so its hits have no grade"
            raise UsageError(f"{message} — calibrate it: vacsr calibrate RUN --pairs SPEC --index INDEX")
        return [self._results(one, k=k, policy=chosen, size=size, min_grade=min_grade) for one in scored]

    def _candidates(self, queries: Embedding, k: int, size: int) -> list[Scored]:
        """The nearest by cosine, ordered by score as :func:`rescore` does."""
        candidates = CANDIDATES if self.fitted is None else self.fitted.candidates
        hits = self.index.search(queries.mean, max(candidates, k))
        count, width = hits.scores.shape
        held = Embedding(hits.vectors.reshape(count * width, -1).to(self.scorer.device))
        scores = PairScores(self.scorer, *((held, queries) if self.direction == "t2i" else (queries, held)))
        rescored = rescore(
            scores, torch.arange(count), torch.arange(count * width).view(count, width),
            direction=self.direction, candidates=candidates, depth=k,
        )  # fmt: skip
        grade = self._grades(rescored.score, candidates=candidates)
        return [self._scored(hits, rescored, grade, row, size) for row in range(count)]

    def _grades(self, score: Tensor, *, candidates: int) -> Array | None:
        """Calibrated, or else the method's own; None if there is neither. What is no candidate has grade 0. [Q, w]"""
        if self.fitted is not None:
            graded = np.zeros(score.shape)
            graded[:, :candidates] = self.fitted.model.apply(_floats(score[:, :candidates]))
            return graded
        grade = self.scorer.model.method.grade(score.to(self.scorer.device))
        return None if grade is None else _floats(grade)

    def _scored(self, hits: Hits, rescored: Rescored, grades: Array | None, row: int, size: int) -> Scored:
        order = rescored.order[row]
        sigma, disagreement = (
            None if one is None else _floats(one[row]) for one in (rescored.sigma, rescored.disagreement)
        )
        confident = answer_set = None
        if self.fitted is not None and grades is not None:
            confident = int(self.fitted.confident(grades[row : row + 1], size)[0])
            sets = self.fitted.answer_set(grades[row : row + 1], size)
            answer_set = None if sets is None else int(sets[0])
        grade = None if grades is None else grades[row]
        ids = LazyList(hits.ids[row].__getitem__, order.tolist())  # most are never shown
        metadata = LazyList(hits.metadata[row].__getitem__, order.tolist())
        cosine = _floats(hits.scores[row].cpu()[order])
        score = _floats(rescored.score[row])
        return Scored(ids, metadata, cosine, score, grade, sigma, disagreement, confident, answer_set)

    def _results(self, scored: Scored, *, k: int, policy: Policy, size: int, min_grade: float) -> Results:
        ranked = policy.apply(scored)
        order = [int(position) for position in ranked.order[:k]]
        order = [n for n in order if scored.grade is None or scored.grade[n] >= min_grade]
        note, fitted = self._note(size), self.fitted
        cutoff = None if fitted is None else fitted.cutoff(size)
        calibration = None if fitted is None else self.calibration
        return Results(
            direction=self.direction, policy=policy.name, answered=ranked.answered, reason=ranked.reason,
            hits=tuple(_hit(scored, position, rank) for rank, position in enumerate(order, 1)),
            confident=scored.confident, answer_set=scored.answer_set,
            cutoff=cutoff,
            precision=None if calibration is None else calibration.precision,
            confidence=None if calibration is None else calibration.confidence,
            coverage=None if calibration is None else calibration.coverage,
            guaranteed=not note and (cutoff, scored.answer_set) != (None, None), note=note, index_size=size,
        )  # fmt: skip

    def _note(self, size: int) -> str:
        """What of the calibration is not shown to hold for this index; empty if all is."""
        if self.fitted is None:
            return ""
        again = "check it here: vacsr calibrate RUN --pairs SPEC --index INDEX"
        if not self.fitted.covers(size):
            checked = self.fitted.sizes[-1].size
            return f"grades were checked with up to {checked:,} items, and the index holds {size:,} — {again}"
        if self.fitted.certified and not self.fitted.certifies(size):
            return f"confident hits were certified with up to {self.fitted.certified:,} items; the index holds {size:,}"
        if not self.index.exact:
            return "no guarantee: the index is approximate and may miss the nearest items — use exact:FOLDER"
        return ""


def _cell(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _hit(scored: Scored, position: int, rank: int) -> Hit:
    unsure = [
        float(values[position]) if values is not None and position < len(values) else None
        for values in (scored.sigma, scored.disagreement)
    ]
    return Hit(
        rank=rank, id=scored.ids[position], metadata=scored.metadata[position], cosine=float(scored.cosine[position]),
        score=float(scored.score[position]), grade=None if scored.grade is None else float(scored.grade[position]),
        uncertainty=unsure[0], disagreement=unsure[1], confident=position < (scored.confident or 0),
    )  # fmt: skip


def _similar(hits: Hits, way: Way, *, size: int) -> list[Results]:
    """Similar images of an image, or texts of a text: the index's own order, without scores."""
    kind = "images" if way == "i2i" else "texts"
    common: dict[str, Any] = dict.fromkeys(("confident", "answer_set", "cutoff", "precision", "confidence", "coverage"))
    common |= {
        "direction": way, "policy": SCORE, "answered": True, "reason": "", "guaranteed": False, "index_size": size,
        "note": f"similar {kind}, by cosine alone: no grade, no uncertainty, no guarantee",
    }  # fmt: skip
    ungraded: dict[str, Any] = {"score": None, "grade": None, "uncertainty": None, "confident": False}
    results = []
    for row in zip(hits.ids, hits.scores.tolist(), hits.metadata, strict=True):
        items = enumerate(zip(*row, strict=True), 1)
        listed = (Hit(rank=rank, id=name, cosine=cos, metadata=item, **ungraded) for rank, (name, cos, item) in items)
        results.append(Results(hits=tuple(listed), **common))
    return results


def _floats(values: Tensor) -> Array:
    return np.asarray(values.detach().double().cpu().numpy(), dtype=np.float64)
