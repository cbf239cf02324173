"""Queries that come at the same time go through the model together, in one thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from vacsr.search.service.problems import busy, stopping

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")
Gone = Callable[[int], bool]
"""Has the asker of the job at this place of the batch left? Any thread may ask."""


class Batch(NamedTuple):
    """What was done at once."""

    size: int
    seconds: float


class Batcher(Generic[Job, Outcome]):
    """Gathers jobs until they weigh ``size`` or the first has waited ``wait`` seconds, then runs them.

    ``weigh`` says what a job costs, 1 unless told; one that alone is over ``size`` makes a batch of its own. ``run``
    gives one outcome or one exception for each job, in order; it may ask which jobs nobody waits for any more. While it
    works, the next batch gathers; more than ``room`` waiting jobs are refused. Who stops waiting for an answer takes
    the job out, if it has not begun.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job], Gone], Sequence[Outcome | Exception]],
        *,
        size: int,
        wait: float,
        room: int,
        weigh: Callable[[Job], int] = lambda _job: 1,
        done: Callable[[Batch], None] = lambda _batch: None,
    ) -> None:
        self._run, self._size, self._wait, self._room, self._done = run, size, wait, room, done
        self._weigh = weigh
        self._waiting: deque[tuple[Job, asyncio.Future[Outcome]]] = deque()
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    async def submit(self, job: Job) -> Outcome:
        """The outcome of a job, when its batch is done."""
        if self._closing:
            raise stopping()
        if len(self._waiting) >= self._room:
            raise busy("too many queries wait for the model")
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        self._arrived.set()
        if self._enough():
            self._full.set()
        return await future

    async def aside(self, work: Callable[[], None]) -> None:
        """Run something between two batches, in their thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Finish what waits, take nothing new."""
        self._closing = True
        self._arrived.set()
        self._full.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown(wait=True)

    async def _work(self) -> None:
        while self._waiting or not self._closing:
            batch = await self._gather()
            if batch:
                await self._finish(batch)

    async def _gather(self) -> list[tuple[Job, asyncio.Future[Outcome]]]:
        """The next batch, without jobs that nobody waits for any more."""
        await self._arrived.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait):
                await self._full.wait()
        batch = self._taken()
        if not self._closing:
            if not self._waiting:
                self._arrived.clear()
            if not self._enough():
                self._full.clear()
        return batch

    def _taken(self) -> list[tuple[Job, asyncio.Future[Outcome]]]:
        """As many of the first as may go together."""
        batch: list[tuple[Job, asyncio.Future[Outcome]]] = []
        weight = 0
        while self._waiting:
            job, future = self._waiting[0]
            if not future.done():
                weight += self._weigh(job)
                if batch and weight > self._size:
                    break
                batch.append((job, future))
            self._waiting.popleft()
        return batch

    def _enough(self) -> bool:
        """Is there a whole batch?"""
        return sum(self._weigh(job) for job, _ in self._waiting) >= self._size

    async def _finish(self, batch: Sequence[tuple[Job, asyncio.Future[Outcome]]]) -> None:
        started = time.perf_counter()
        jobs = [job for job, _ in batch]
        outcomes: Sequence[Outcome | Exception]
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._run, jobs, lambda place: batch[place][1].done()
            )
        except Exception as error:
            outcomes = [error] * len(batch)
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        self._done(Batch(len(batch), time.perf_counter() - started))
