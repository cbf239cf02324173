"""Running cells: one after the other, or by worker processes that each take the longest cell left when they are free.

A cell that fails does not stop the others. A worker that dies, or that met an error not ours, is replaced.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import NamedTuple

import torch
from rich.console import Console

from vacsr.compare.cell import Cell, run_cell
from vacsr.errors import EnvironmentProblem, FolderInUse, MissingExtra, VacsrError
from vacsr.processes import Worker, died, start_worker, stop_workers

_PATIENCE = 30.0  # seconds to finish the step in hand and save before a worker is killed
_WORK = {
    "vacsr": 6.0, "npc": 5.0, "ncr": 3.0, "bicro": 3.0, "pcme": 2.0, "pcmepp": 2.0, "daa": 2.0,
    "zeroshot": 0.0, "cocoop": 8.0, "coprompt": 4.0, "mmrl": 4.0, "maple": 3.0, "mma": 3.0, "clipood": 3.0,
}  # fmt: skip
"""Time of a cell relative to a cosine's, until one of its row has been timed; only the order depends on it."""


class Finished(NamedTuple):
    """What a worker says of a cell."""

    error: Exception | None
    seconds: float
    leaves: bool = False
    """The worker ends: after an error that is not ours, which may have broken more, or to leave clean memory."""


def run_cells(missing: Sequence[Cell], *, jobs: int, console: Console, fresh: bool) -> Iterator[Exception]:
    """Run every cell; errors come out, the other cells go on. Steps are timed in a fresh process each.

    Ctrl-C or SIGTERM ends it when each cell in progress has saved its step; a second one ends it at once.
    """
    with _terminated_as_interrupted():
        yield from _run_cells(missing, jobs=jobs, console=console, fresh=fresh)


def _run_cells(missing: Sequence[Cell], *, jobs: int, console: Console, fresh: bool) -> Iterator[Exception]:
    if jobs <= 1 and all(cell.task != "efficiency" for cell in missing):
        for number, cell in enumerate(missing, start=1):
            console.print(f"{number} of {len(missing)}: {cell.name}", highlight=False)
            error = _attempt(cell, progress=True, fresh=fresh)
            if isinstance(error, FolderInUse):
                console.print(f"left: {error}", highlight=False, markup=False)
            if error is not None:
                yield error
        return
    pool = _Pool(missing, jobs=min(jobs, len(missing)), console=console, fresh=fresh)
    try:
        yield from pool.run()
    finally:
        pool.stop()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM as Ctrl-C: workers never get it from who sends it to the parent, which has to be alive to pass it on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _attempt(cell: Cell, *, progress: bool, fresh: bool) -> VacsrError | None:
    """Run a cell; what it refuses is returned with the cell's name."""
    try:
        run_cell(cell, progress=progress, fresh=fresh)
    except VacsrError as error:
        # MissingExtra words its own message, so its parent carries this one.
        kind = EnvironmentProblem if isinstance(error, MissingExtra) else type(error)
        return kind(f"{cell.name}: {error}")
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        return EnvironmentProblem(f"{cell.name}: {first} — use fewer --jobs; finished cells are kept")
    return None


class _Pool:
    """Workers and the cells that wait for them."""

    def __init__(self, missing: Sequence[Cell], *, jobs: int, console: Console, fresh: bool) -> None:
        self.waiting, self.jobs, self.console, self.fresh = list(missing), jobs, console, fresh
        self.total, self.done = len(missing), 0
        self.busy: dict[Connection, tuple[Worker, Cell]] = {}
        self.idle: list[Worker] = []
        self.timed: dict[str, list[float]] = {}
        self.guess = {c.row: _WORK.get(c.recipe.method.name, 1.0) * c.recipe.train.epochs for c in missing}

    def run(self) -> Iterator[Exception]:
        while self.waiting or self.busy:
            while self.waiting and len(self.busy) < self.jobs:
                self._give()
            for channel in wait(list(self.busy)):
                assert isinstance(channel, Connection), "only pipes were waited for"
                error = self._hear(channel)
                if error is not None:
                    yield error

    def stop(self) -> None:
        """Ask all workers to save and end; who is asked again meanwhile does not wait for them."""
        workers = [worker for worker, _ in self.busy.values()] + self.idle
        try:
            stop_workers(workers, patience=_PATIENCE)
        except KeyboardInterrupt:
            for worker in workers:
                worker.process.kill()
            raise

    def _give(self) -> None:
        """The longest cell left to a worker that is free, or to a new one."""
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        worker = self.idle.pop() if self.idle else start_worker("cells", _work, (threads, self.fresh))
        cell = max(self.waiting, key=self._expected)  # of equals the first
        self.waiting.remove(cell)
        self.busy[worker.channel] = (worker, cell)
        with suppress(BrokenPipeError):  # it died; the channel says so when it is heard
            worker.channel.send(cell)

    def _hear(self, channel: Connection) -> Exception | None:
        worker, cell = self.busy.pop(channel)
        try:
            said: Finished = channel.recv()
        except (EOFError, ConnectionResetError):
            said = Finished(died(worker, at=cell.name), 0.0, leaves=True)
        if said.leaves:
            stop_workers([worker], patience=_PATIENCE)
        else:
            self.idle.append(worker)
        self.done += 1
        if said.error is None:
            self.timed.setdefault(cell.row, []).append(said.seconds)
        self._tell(cell, said)
        return said.error

    def _tell(self, cell: Cell, said: Finished) -> None:
        end = "failed" if said.error is not None else f"{said.seconds:.0f} s"
        end = "left: another process is training it" if isinstance(said.error, FolderInUse) else end
        left = sum(map(self._expected, [*self.waiting, *(cell for _, cell in self.busy.values())])) / self.jobs
        more = f", about {left / 60:.0f} min left" if self.timed and left >= 60 else ""
        self.console.print(f"{self.done} of {self.total}: {cell.name}, {end}{more}", highlight=False)

    def _expected(self, cell: Cell) -> float:
        """Seconds that its row took, or a guess scaled by what other rows took."""
        if cell.row in self.timed:
            return statistics.fmean(self.timed[cell.row])
        guessed = sum(self.guess[row] for row in self.timed)
        took = sum(map(statistics.fmean, self.timed.values()))
        return self.guess[cell.row] * (took / guessed if guessed else 1.0)


def _work(channel: Connection, threads: int, fresh: bool) -> None:
    """What a worker does: cell after cell, until it is told no more."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each worker starts a compiler for every core
    torch.set_num_threads(threads)
    while True:
        try:
            cell = channel.recv()
            said = _finish(cell, fresh=fresh)
            channel.send(said)
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return  # no more cells, nobody left to hear, or asked to stop
        if said.leaves:
            return
        _let_go()


def _finish(cell: Cell, *, fresh: bool) -> Finished:
    started = time.perf_counter()
    try:
        error: Exception | None = _attempt(cell, progress=False, fresh=fresh)
    except Exception:
        error = RuntimeError(f"{cell.name} failed in its worker process:\n{traceback.format_exc()}")
        return Finished(error, time.perf_counter() - started, leaves=True)
    return Finished(error, time.perf_counter() - started, leaves=cell.task == "efficiency")


def _let_go() -> None:
    """Leave nothing of a cell behind: others share the GPU, and compiled steps of dead models only fill tables."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
