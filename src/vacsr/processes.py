"""Worker processes that end with their parent and never see Ctrl-C, and a pool that kills what is over its time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from vacsr.errors import EnvironmentProblem

T = TypeVar("T")


class Worker(NamedTuple):
    """A process and this side of the pipe to it."""

    process: BaseProcess
    channel: Connection


def start_worker(
    name: str, function: Callable[..., None], arguments: tuple[Any, ...], *, preload: str | None = None
) -> Worker:
    """Start ``function(channel, *arguments)`` in a spawned process; the function must be at the top of a module.

    ``preload``: a module that one process imports and then forks into workers, so that later ones start at once.
    """
    context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
    if preload is not None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
    here, there = context.Pipe()
    process = context.Process(target=_begin, args=(function, there, arguments), name=name, daemon=True)
    with interrupts_held():
        process.start()
    there.close()  # the worker holds the other end: however it ends, this end then reads an end of file
    return Worker(process, here)


def _begin(function: Callable[..., None], channel: Connection, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=die_with_parent, daemon=True).start()
    function(channel, *arguments)


def die_with_parent() -> None:
    """Runs in a thread of a worker: a killed parent cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


class KillablePool:
    """Runs functions in a few processes, started when needed. One that is over its time is killed, as no thread can be.

    ``preload``: the module of the functions, see :func:`start_worker`.
    """

    def __init__(self, name: str, workers: int, *, preload: str) -> None:
        self._name, self._preload, self._closed = name, preload, False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"vacsr-{name}")  # each waits for one process
        self._workers, self._idle = set[Worker](), list[Worker]()

    def submit(self, function: Callable[..., T], *arguments: object, seconds: float) -> Future[T]:
        """The result of ``function(*arguments)``. TimeoutError: it was killed. EnvironmentProblem: its process died."""
        return self._threads.submit(self._run, function, arguments, seconds)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        self._closed = True
        for worker in list(self._workers):
            worker.process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, function: Callable[..., T], arguments: tuple[object, ...], seconds: float) -> T:
        worker = self._idle.pop() if self._idle else start_worker(self._name, _serve, (), preload=self._preload)
        self._workers.add(worker)
        deadline = threading.Timer(0 if self._closed else seconds, worker.process.kill)
        deadline.start()
        try:
            worker.channel.send((function, arguments))
            outcome = worker.channel.recv()
        except (EOFError, OSError) as error:
            self._workers.discard(worker)
            worker.channel.close()
            if not deadline.is_alive():
                raise TimeoutError(f"{self._name}: killed after {seconds:g} seconds") from error
            raise died(worker, at=self._name) from error
        finally:
            deadline.cancel()
        self._idle.append(worker)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]


def _serve(channel: Connection) -> None:
    """Run functions until killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all; the parent ends its workers
    while True:
        function, arguments = channel.recv()
        outcome: object
        try:
            outcome = function(*arguments)
        except Exception as error:
            outcome = error
        channel.send(outcome)


def died(worker: Worker, *, at: str) -> EnvironmentProblem:
    """The error for a worker that ended without a result while it worked on ``at``."""
    worker.process.join(10.0)
    code = worker.process.exitcode
    return EnvironmentProblem(
        f"{at}: its worker process ended unexpectedly (exit code {code}), perhaps out of memory — "
        "close other programs or use fewer jobs, and run the same command again"
    )


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes started within never see Ctrl-C, which a terminal sends to all: only the parent handles it.

    They inherit the blocked signal; the parent unblocks it at the end, so that none is lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
