"""The model's thread: queries that come at the same time are collected, and run together."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from PIL import Image

from vacsr.search.searcher import Results, Searcher
from vacsr.serve.index_watch import IndexWatch
from vacsr.serve.schemas import ClientGone, busy, stale_index

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
T = TypeVar("T")
Gone = Callable[[int], bool]  # has the client of the job at this position of the batch left? Any thread may ask


class Batcher(Generic[Item, Outcome]):
    """Collects jobs until they weigh ``size`` or the first has waited ``wait`` seconds, then runs them.

    ``weigh`` says what a job costs; one that alone is over ``size`` makes a batch of its own. ``run`` gives one outcome
    or one exception per job, in order; it may ask which jobs nobody waits for any more. While it works, the next batch
    gathers. ``done`` is called with the size and the seconds of each batch. A cancelled ``submit`` takes its job out,
    if it has not begun.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item], Gone], Sequence[Outcome | Exception]],
        *,
        size: int,
        wait: float,
        weigh: Callable[[Item], int] = lambda _job: 1,
        done: Callable[[int, float], None] = lambda _size, _seconds: None,
    ) -> None:
        self._run, self._size, self._wait, self._weigh, self._done = run, size, wait, weigh, done
        self._waiting: deque[tuple[Item, asyncio.Future[Outcome]]] = deque()
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vacsr-model")
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def submit(self, job: Item) -> Outcome:
        if self._closing:
            raise busy("the service is stopping", status=503, code="stopping")
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        self._signal()
        return await future

    async def between(self, work: Callable[[], T]) -> T:
        """Run something between two batches, in their thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self, *, seconds: float | None = None) -> bool:
        """Finish what waits, take nothing new. False where that takes more than so many ``seconds``."""
        self._closing = True
        self._signal()
        try:
            async with asyncio.timeout(seconds):
                if self._task is not None:
                    await asyncio.shield(self._task)
                await self.between(lambda: None)
        except TimeoutError:
            return False
        finally:
            self._thread.shutdown(wait=False)
        return True

    def _signal(self) -> None:
        full = sum(self._weigh(job) for job, _ in self._waiting) >= self._size
        for event, true in ((self._arrived, bool(self._waiting)), (self._full, full)):
            event.set() if true or self._closing else event.clear()

    async def _work(self) -> None:
        while self._waiting or not self._closing:
            await self._arrived.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait):
                    await self._full.wait()
            if batch := self._take():
                await self._finish(batch)

    def _take(self) -> list[tuple[Item, asyncio.Future[Outcome]]]:
        """The next batch, without jobs that nobody waits for any more."""
        batch, weight = list[tuple[Item, asyncio.Future[Outcome]]](), 0
        while self._waiting:
            job, future = self._waiting[0]
            if not future.done():
                weight += self._weigh(job)
                if batch and weight > self._size:
                    break
                batch.append((job, future))
            self._waiting.popleft()
        self._signal()
        return batch

    async def _finish(self, batch: Sequence[tuple[Item, asyncio.Future[Outcome]]]) -> None:
        started = time.perf_counter()
        jobs, futures = zip(*batch, strict=True)
        outcomes: Sequence[Outcome | Exception]
        try:
            outcomes = await self.between(lambda: self._run(jobs, lambda position: futures[position].done()))
        except Exception as error:
            outcomes = [error] * len(batch)
        for future, outcome in zip(futures, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        self._done(len(batch), time.perf_counter() - started)


class SearchJob(NamedTuple):
    query: str | Image.Image
    k: int
    policy: str
    min_grade: float = 0.0


class ScoreJob(NamedTuple):
    texts: tuple[str, ...]
    images: tuple[Image.Image, ...]


Job = SearchJob | ScoreJob
Answer = Results | dict[str, Any]


def weight(job: Job) -> int:
    """Texts and images that the model has to embed."""
    return len(job.texts) + len(job.images) if isinstance(job, ScoreJob) else 1


class Worker:
    """Runs jobs with a searcher; equal kinds of queries go through the model together."""

    def __init__(self, searcher: Searcher, watch: IndexWatch) -> None:
        self._searcher, self._watch = searcher, watch

    def __call__(self, jobs: Sequence[Job], gone: Gone = lambda _position: False) -> list[Answer | Exception]:
        """One outcome or one exception per job; jobs whose clients have ``gone`` are skipped."""
        groups: dict[object, dict[int, Job]] = {}
        for position, job in enumerate(jobs):
            alike = (isinstance(job.query, str), *job[1:]) if isinstance(job, SearchJob) else position
            groups.setdefault(alike, {})[position] = job
        outcomes: dict[int, Answer | Exception] = {}
        for group in groups.values():
            outcomes |= self._run_group(group, gone)
        return [outcomes.get(position, ClientGone()) for position in range(len(jobs))]

    def _run_group(self, jobs: Mapping[int, Job], gone: Gone) -> dict[int, Answer | Exception]:
        """By position. If they fail, each is tried alone: one query must not cost another its answer."""
        waiting = {position: job for position, job in jobs.items() if not gone(position)}
        try:
            return dict(zip(waiting, self._run(list(waiting.values())), strict=True)) if waiting else {}
        except Exception as error:
            if len(waiting) == 1:
                return dict.fromkeys(waiting, error)
        outcomes: dict[int, Answer | Exception] = {}
        for position, job in waiting.items():
            outcomes |= self._run_group({position: job}, gone)
        return outcomes

    def _run(self, jobs: Sequence[Job]) -> Sequence[Answer]:
        first = jobs[0]
        if isinstance(first, ScoreJob):
            return [self._score(first)]
        if self._watch.foreign:
            raise stale_index()
        if not self._watch.size and not len(self._searcher.index):
            message = "the index is empty — fill it: vacsr index add INDEX --run RUN --pairs SPEC"
            raise busy(message, status=503, code="empty_index")
        queries: list[Any] = [job.query for job in jobs if isinstance(job, SearchJob)]  # of one kind
        search = self._searcher.search_texts if isinstance(first.query, str) else self._searcher.search_images
        return search(queries, k=first.k, policy=first.policy, min_grade=first.min_grade)

    def _score(self, job: ScoreJob) -> dict[str, Any]:
        scores = self._searcher.scorer.score_all(list(job.images), list(job.texts))
        shape = (len(job.texts), len(job.images))
        cols, rows = (index.flatten() for index in torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
        score, grade, sigma, _ = scores.at(rows, cols)
        values = {"score": score, "grade": grade, "uncertainty": sigma}
        tables = {name: None if one is None else one.double().view(shape).tolist() for name, one in values.items()}
        return {"schema": 1, **tables}
