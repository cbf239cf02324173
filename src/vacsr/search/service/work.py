"""What the model is asked to do, many at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from PIL import Image

from vacsr.errors import VacsrError
from vacsr.search.engine import Searcher
from vacsr.search.exact import ExactIndex
from vacsr.search.results import Results

log = logging.getLogger("vacsr.service")


@dataclass(frozen=True, eq=False)
class SearchJob:
    """One query: words, or an image."""

    query: str | Image.Image
    k: int
    policy: str


@dataclass(frozen=True, eq=False)
class ScoreJob:
    """Every text with every image."""

    texts: tuple[str, ...]
    images: tuple[Image.Image, ...]


class ScoreTable(NamedTuple):
    """[T][I] each."""

    score: list[list[float]]
    grade: list[list[float]]
    uncertainty: list[list[float]] | None


Job = SearchJob | ScoreJob
Outcome = Results | ScoreTable


class Worker:
    """Runs jobs with a searcher; queries that ask for the same go through the model together."""

    def __init__(self, searcher: Searcher, *, refresh_seconds: float) -> None:
        self.searcher, self._every = searcher, refresh_seconds
        self._next = time.monotonic() + refresh_seconds

    def __call__(self, jobs: Sequence[Job]) -> list[Outcome | Exception]:
        """One outcome or one exception for each."""
        self._refresh()
        outcomes: list[Outcome | Exception | None] = [None] * len(jobs)
        for places in _alike(jobs):
            for place, outcome in zip(places, self._together([jobs[place] for place in places]), strict=True):
                outcomes[place] = outcome
        return [outcome for outcome in outcomes if outcome is not None]

    def _together(self, jobs: Sequence[Job]) -> Sequence[Outcome | Exception]:
        """Alike jobs. If they fail, each is tried alone: one query must not cost another its answer."""
        try:
            return self._run(jobs)
        except Exception as error:
            if len(jobs) > 1:
                return [outcome for job in jobs for outcome in self._together([job])]
            return [error]

    def _run(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        first = jobs[0]
        if isinstance(first, ScoreJob):
            return [self._score(first)]
        queries = [job.query for job in jobs if isinstance(job, SearchJob)]
        words = [query for query in queries if isinstance(query, str)]
        if words:
            return self.searcher.search_texts(words, k=first.k, policy=first.policy)
        photos = [query for query in queries if isinstance(query, Image.Image)]
        return self.searcher.search_images(photos, k=first.k, policy=first.policy)

    def _score(self, job: ScoreJob) -> ScoreTable:
        scorer = self.searcher.scorer
        scores = scorer.score_all(list(job.images), list(job.texts))
        shape = (len(job.texts), len(job.images))
        rows = torch.arange(shape[1]).repeat(shape[0])
        cols = torch.arange(shape[0]).repeat_interleave(shape[1])
        found = scorer.score_at(scores, rows=rows, cols=cols)
        score, grade = (value.double().view(shape).tolist() for value in (found.score, found.grade))
        sigma = None if found.uncertainty is None else found.uncertainty.double().view(shape).tolist()
        return ScoreTable(score, grade, sigma)

    def _refresh(self) -> None:
        """See what other processes have added, now and then; an index that cannot be read again stays as it is."""
        index = self.searcher.index
        if not isinstance(index, ExactIndex) or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        try:
            index.refresh()
        except (VacsrError, OSError) as error:
            log.warning("the index could not be read again: %s", error)


def _alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Places of jobs that one call of the searcher can do."""
    groups: dict[object, list[int]] = {}
    for place, job in enumerate(jobs):
        key = (isinstance(job.query, str), job.k, job.policy) if isinstance(job, SearchJob) else place
        groups.setdefault(key, []).append(place)
    return list(groups.values())
