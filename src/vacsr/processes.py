"""Worker processes that end with the one that started them: started apart from Ctrl-C, asked to stop, then made to."""

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

    name: str
    process: BaseProcess
    channel: Connection


def start_worker(name: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> Worker:
    """Start ``function(channel, *arguments)`` in a fresh process; the function stands at the top of a module."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_begin, args=(function, there, arguments), name=name, daemon=True)
    with interrupts_held():
        process.start()
    there.close()  # the worker holds the other end: when it ends, however it does, this one reads an end of file
    return Worker(name, process, here)


def _begin(function: Callable[..., None], channel: Connection, arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    function(channel, *arguments)


def _die_with_parent() -> None:
    """A parent that was killed cannot stop its workers, and two workers of one run folder would spoil it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def stop_workers(workers: Sequence[Worker], *, patience: float) -> None:
    """End what still runs: a training run asked to terminate stops after its step. ``patience`` in seconds."""
    for worker in workers:
        worker.channel.close()
        if worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.process.join(patience)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def died(worker: Worker, *, at: str) -> EnvironmentProblem:
    """What to say of a worker that ended without a word, at the work named ``at``."""
    worker.process.join(10.0)
    code = worker.process.exitcode
    return EnvironmentProblem(
        f"{at}: its worker process ended without a word (exit code {code}) — was memory short? "
        "Close other programs or use fewer jobs, and run the same command again"
    )


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Processes started in here never see Ctrl-C, which a terminal sends to all: the parent alone answers it.

    They inherit that it is held back; here it is let go again at the end, so that none is lost.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
