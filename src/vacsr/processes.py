"""Worker processes that end with their parent: shielded from Ctrl-C, asked to stop, then killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from vacsr.errors import EnvironmentProblem


class Worker(NamedTuple):
    """A process and this side of the pipe to it."""

    process: BaseProcess
    channel: Connection


def start_worker(name: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> Worker:
    """Start ``function(channel, *arguments)`` in a spawned process; the function must be at the top of a module."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_begin, args=(function, there, arguments), name=name, daemon=True)
    with interrupts_held():
        process.start()
    there.close()  # the worker holds the other end: however it ends, this end then reads an end of file
    return Worker(process, here)


def _begin(function: Callable[..., None], channel: Connection, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    function(channel, *arguments)


def _die_with_parent() -> None:
    """A killed parent cannot stop its workers, and two workers in one run folder would corrupt it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def stop_workers(workers: Sequence[Worker], *, patience: float) -> None:
    """Terminate workers, which stops a training run after its step; kill those that need over ``patience`` seconds."""
    for worker in workers:
        worker.channel.close()
        worker.process.terminate()
    for worker in workers:
        worker.process.join(patience)
        worker.process.kill()
        worker.process.join()


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
