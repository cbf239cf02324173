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
from multiprocessing.process import BaseProcess
from typing import NamedTuple, TypeVar

from vacsr.errors import EnvironmentProblem

T = TypeVar("T")


class _Worker(NamedTuple):
    """A process and this side of the pipe to it."""

    process: BaseProcess
    channel: Connection


class KillablePool:
    """Runs functions in a few processes, started when needed. One that is over its time is killed, as no thread can be.

    ``preload``: the module of the functions, which one process imports and then forks, so that workers start at once.
    """

    def __init__(self, name: str, workers: int, *, preload: str) -> None:
        self._name, self._closed = name, False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"vacsr-{name}")  # each waits for one process
        self._workers, self._idle = set[_Worker](), list[_Worker]()

    def submit(self, function: Callable[..., T], *arguments: object, seconds: float) -> Future[T]:
        """The result of ``function(*arguments)``. TimeoutError: it was killed. EnvironmentProblem: its process died."""
        return self._threads.submit(self._run, function, arguments, seconds)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        self._closed = True
        for worker in list(self._workers):
            worker.process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), name=self._name, daemon=True)
        with interrupts_held():
            process.start()
        there.close()  # the worker holds the other end: however it ends, this end then reads an end of file
        worker = _Worker(process, here)
        self._workers.add(worker)
        return worker

    def _run(self, function: Callable[..., T], arguments: tuple[object, ...], seconds: float) -> T:
        worker = self._idle.pop() if self._idle else self._start()
        try:
            worker.channel.send((function, arguments))
            if not worker.channel.poll(0 if self._closed else seconds):
                raise TimeoutError(f"{self._name}: killed after {seconds:g} seconds")
            outcome = worker.channel.recv()
        except (EOFError, OSError) as error:
            worker.process.kill()
            worker.channel.close()
            self._workers.discard(worker)
            if isinstance(error, TimeoutError):
                raise
            message = f"{self._name}: its worker process died, perhaps out of memory"
            raise EnvironmentProblem(f"{message} — close other programs and try again") from error
        self._idle.append(worker)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]


def _serve(channel: Connection) -> None:
    """Run functions until killed."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all; the parent ends its workers
    while True:
        function, arguments = channel.recv()
        outcome: object
        try:
            outcome = function(*arguments)
        except Exception as error:
            outcome = error
        channel.send(outcome)


def die_with_parent() -> None:
    """Runs in a thread of a worker: a killed parent cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


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
