"""What the model is asked to do, many at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from PIL import Image

from vacsr.search.engine import Searcher
from vacsr.search.results import Results
from vacsr.search.service.batching import Gone
from vacsr.search.service.problems import ClientGone
from vacsr.search.service.upkeep import IndexWatch, empty_index, stale_index


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


def weight(job: Job) -> int:
    """Texts and images that the model has to embed."""
    return len(job.texts) + len(job.images) if isinstance(job, ScoreJob) else 1


class Worker:
    """Runs jobs with a searcher; queries that ask for the same go through the model together."""

    def __init__(self, searcher: Searcher, watch: IndexWatch) -> None:
        self.searcher, self._watch = searcher, watch

    def __call__(self, jobs: Sequence[Job], gone: Gone = lambda _place: False) -> list[Outcome | Exception]:
        """One outcome or one exception for each; jobs whose askers have ``gone`` are left out."""
        self._watch.look()
        outcomes: list[Outcome | Exception] = [ClientGone() for _ in jobs]
        for places in _alike(jobs):
            for place, outcome in self._together({place: jobs[place] for place in places}, gone).items():
                outcomes[place] = outcome
        return outcomes

    def _together(self, jobs: Mapping[int, Job], gone: Gone) -> dict[int, Outcome | Exception]:
        """Alike jobs by place. If they fail, each is tried alone: one query must not cost another its answer."""
        there = {place: job for place, job in jobs.items() if not gone(place)}
        if not there:
            return {}
        try:
            return dict(zip(there, self._run(list(there.values())), strict=True))
        except Exception as error:
            if len(there) == 1:
                return dict.fromkeys(there, error)
        alone: dict[int, Outcome | Exception] = {}
        for place, job in there.items():
            alone |= self._together({place: job}, gone)
        return alone

    def _run(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        first = jobs[0]
        if isinstance(first, ScoreJob):
            return [self._score(first)]
        if self._watch.foreign:
            raise stale_index()
        if not self._watch.size and not len(self.searcher.index):
            raise empty_index()
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


def _alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Places of jobs that one call of the searcher can do."""
    groups: dict[object, list[int]] = {}
    for place, job in enumerate(jobs):
        key = (isinstance(job.query, str), job.k, job.policy) if isinstance(job, SearchJob) else place
        groups.setdefault(key, []).append(place)
    return list(groups.values())
