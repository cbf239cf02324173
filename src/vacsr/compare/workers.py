"""Running cells: one after the other, or in worker processes that each take the longest cell left when they are free.

A cell that fails does not stop the others. Every worker is an executor with one process, so that a process that dies
fails only its cell; it is replaced.
"""

import gc
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import NamedTuple

import torch
from rich.console import Console

from vacsr.compare.cells import Cell, run_cell
from vacsr.errors import EnvironmentProblem, FolderInUse, MissingExtra, VacsrError

RunCell = Callable[..., None]  # ``run(cell, progress=…, fresh=…)``, at the top of a module


class Finished(NamedTuple):
    error: Exception | None
    seconds: float
    replace: bool = False
    """A fresh worker runs the next cell: after an unexpected error, or where clean memory is part of a measurement."""


def run_cells(
    missing: Sequence[Cell],
    *,
    jobs: int,
    console: Console,
    fresh: bool,
    run: RunCell = run_cell,
    patience: float = 30.0,
) -> Iterator[Exception]:
    """Run every cell and yield the errors. Steps are timed in a fresh process each.

    Ctrl-C or SIGTERM ends it when each cell in progress has saved its step, or after ``patience`` seconds; a second
    one ends it at once.
    """
    with _sigterm_as_interrupt():
        if jobs > 1 or any(cell.task == "efficiency" for cell in missing):
            yield from _Pool(missing, jobs=jobs, console=console, fresh=fresh, run=run).run_all(patience)
            return
        for number, cell in enumerate(missing, start=1):
            console.print(f"{number} of {len(missing)}: {cell.name}", highlight=False)
            error = _attempt(run, cell, progress=True, fresh=fresh)
            if isinstance(error, FolderInUse):
                console.print(f"left: {error}", highlight=False, markup=False)
            if error is not None:
                yield error


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM as Ctrl-C: it may reach the parent alone, which has to be alive to pass it on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _attempt(run: RunCell, cell: Cell, *, progress: bool, fresh: bool) -> VacsrError | None:
    """Run a cell; return its error with the cell's name."""
    try:
        run(cell, progress=progress, fresh=fresh)
    except VacsrError as error:
        # MissingExtra has its own constructor, so its parent carries this message.
        kind = EnvironmentProblem if isinstance(error, MissingExtra) else type(error)
        return kind(f"{cell.name}: {error}")
    except torch.OutOfMemoryError as error:
        first = str(error).split(". ")[0]
        return EnvironmentProblem(f"{cell.name}: {first} — use fewer --jobs; finished cells are kept")
    return None


class _Pool:
    """Workers, and the cells that wait for them."""

    def __init__(self, missing: Sequence[Cell], *, jobs: int, console: Console, fresh: bool, run: RunCell) -> None:
        self.waiting, self.jobs, self.console = list(missing), min(jobs, len(missing)), console
        self.call = (run, fresh)
        self.total, self.done = len(missing), 0
        self.busy: dict[Future[Finished], tuple[ProcessPoolExecutor, Cell]] = {}
        self.idle: list[ProcessPoolExecutor] = []
        self.seconds: dict[str, list[float]] = {}
        self.others = set(multiprocessing.active_children())

    def run_all(self, patience: float) -> Iterator[Exception]:
        try:
            while self.waiting or self.busy:
                while self.waiting and len(self.busy) < self.jobs:
                    self._start()
                for future in wait(self.busy, return_when=FIRST_COMPLETED).done:
                    error = self._finish(future)
                    if error is not None:
                        yield error
        finally:
            self._stop(patience)

    def _start(self) -> None:
        """The longest cell left, in a free worker or a new one."""
        cell = max(self.waiting, key=self._expected)  # the first of equals
        self.waiting.remove(cell)
        executor = self.idle.pop() if self.idle else ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), _begin, (max(1, (os.cpu_count() or 1) // self.jobs),)
        )  # fmt: skip
        with _interrupts_held():  # a new process starts within submit
            self.busy[executor.submit(_work, *self.call, cell)] = (executor, cell)

    def _finish(self, future: Future[Finished]) -> Exception | None:
        executor, cell = self.busy.pop(future)
        try:
            finished = future.result()
        except BrokenProcessPool:
            error = EnvironmentProblem(
                f"{cell.name}: its worker process ended unexpectedly, perhaps out of memory — "
                "close other programs or use fewer jobs, and run the same command again"
            )
            finished = Finished(error, 0.0, replace=True)
        if finished.replace:
            executor.shutdown()
        else:
            self.idle.append(executor)
        self.done += 1
        if finished.error is None:
            self.seconds.setdefault(cell.row, []).append(finished.seconds)
        self._print(cell, finished)
        return finished.error

    def _print(self, cell: Cell, finished: Finished) -> None:
        end = "failed" if finished.error is not None else f"{finished.seconds:.0f} s"
        end = "left: another process is training it" if isinstance(finished.error, FolderInUse) else end
        left = sum(map(self._expected, [*self.waiting, *(cell for _, cell in self.busy.values())])) / self.jobs
        more = f", about {left / 60:.0f} min left" if self.seconds and left >= 60 else ""
        self.console.print(f"{self.done} of {self.total}: {cell.name}, {end}{more}", highlight=False)

    def _expected(self, cell: Cell) -> float:
        """Seconds that its row took, or the mean of all rows; before any was timed, its epochs."""
        known = self.seconds.get(cell.row) or [second for row in self.seconds.values() for second in row]
        return statistics.fmean(known) if known else float(cell.recipe.train.epochs)

    def _stop(self, patience: float) -> None:
        """End all workers. Those with a cell are asked first, and save their step."""
        for executor in self.idle:
            executor.shutdown()
        workers = set(multiprocessing.active_children()) - self.others
        for worker in workers:
            worker.terminate()
        try:
            wait(self.busy, timeout=patience)
        finally:  # also when interrupted again
            for worker in workers:
                worker.kill()
            for executor, _ in self.busy.values():
                executor.shutdown(wait=False, cancel_futures=True)


def _begin(threads: int) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()  # or two runs would write to one folder
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each worker starts a compiler for every core
    torch.set_num_threads(threads)


def _die_with_parent() -> None:
    """Runs in a thread of a worker: a killed parent cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started within never see Ctrl-C, which a terminal sends to all: only the parent handles it.

    They inherit the blocked signal; the parent unblocks it at the end, so that none is lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(run: RunCell, fresh: bool, cell: Cell) -> Finished:
    started = time.perf_counter()
    try:
        error = _attempt(run, cell, progress=False, fresh=fresh)
    except KeyboardInterrupt:  # asked to stop; the step is saved
        os._exit(130)
    except Exception:
        message = f"{cell.name} failed in its worker process:\n{traceback.format_exc()}"
        return Finished(RuntimeError(message), time.perf_counter() - started, replace=True)
    # Leave nothing of the cell behind: others share the GPU, and compiled steps of dead models only fill tables.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Finished(error, time.perf_counter() - started, replace=cell.task == "efficiency")
