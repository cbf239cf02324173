"""Work in several processes at once: each tells how it goes, and all stop when one fails, or on Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from vacsr.errors import EnvironmentProblem, VacsrError

Tell = Callable[[Any], None]
_NICE = 5  # a third of the others' share of a core
_PATIENCE = 10.0  # seconds to finish the step in hand before a worker is killed


class Job(NamedTuple):
    """``function(*arguments, tell=…)``, in a process of its own."""

    name: str
    function: Callable[..., None]
    """At the top of a module, so that it can be named to the other process."""
    arguments: tuple[Any, ...]
    gives_way: bool = False
    """Where cores are short, others go first."""
    threads: int = 1
    """More only for a job that runs alone: small steps on several threads mostly wait for each other."""


class _Worker(NamedTuple):
    name: str
    process: BaseProcess
    channel: Connection


class _Told(NamedTuple):
    message: Any


class _Failed(NamedTuple):
    error: VacsrError | None
    """None where it was not one of ours; then the trace says what happened."""
    trace: str


class _Done(NamedTuple):
    pass


def run_jobs(jobs: Sequence[Job], *, listen: Callable[[str, Any], None]) -> None:
    """Run all at once until all are done; ``listen(name, message)`` hears what a job tells.

    The first error is raised here, once the other workers have stopped; so is KeyboardInterrupt.
    """
    workers: list[_Worker] = []
    try:
        with _interrupts_held():
            workers.extend(_start(job) for job in jobs)
        _listen(workers, listen)
    finally:
        _stop(workers)


def _start(job: Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, job), name=job.name, daemon=True)
    process.start()
    there.close()  # the worker holds the other end: when it ends, however it does, this one reads an end of file
    return _Worker(job.name, process, here)


def _work(channel: Connection, job: Job) -> None:
    """What a worker does."""
    torch.set_num_threads(min(job.threads, os.cpu_count() or 1))
    if job.gives_way and hasattr(os, "nice"):
        os.nice(_NICE)
    try:
        job.function(*job.arguments, tell=lambda message: channel.send(_Told(message)))
        channel.send(_Done())
    except VacsrError as error:
        channel.send(_Failed(error, ""))
    except (KeyboardInterrupt, BrokenPipeError):
        return  # asked to stop, or nobody is left to hear
    except Exception:
        channel.send(_Failed(None, traceback.format_exc()))


def _listen(workers: Sequence[_Worker], listen: Callable[[str, Any], None]) -> None:
    """Until the last is done."""
    busy = {worker.channel: worker for worker in workers}
    while busy:
        for channel in wait(list(busy)):
            assert isinstance(channel, Connection), "only pipes were waited for"
            worker = busy[channel]
            try:
                said = channel.recv()
            except EOFError as error:
                raise _died(worker) from error
            if isinstance(said, _Done):
                del busy[channel]
            elif isinstance(said, _Failed):
                raise said.error or RuntimeError(f"{worker.name} failed in its worker process:\n{said.trace}")
            else:
                listen(worker.name, said.message)


def _died(worker: _Worker) -> EnvironmentProblem:
    worker.process.join(_PATIENCE)
    code = worker.process.exitcode
    return EnvironmentProblem(
        f"the worker process of {worker.name} ended without a word (exit code {code}) — "
        "was memory short? Close other programs and run the same command again"
    )


def _stop(workers: Sequence[_Worker]) -> None:
    """End what still runs: a training run asked to terminate stops after its step."""
    for worker in workers:
        worker.channel.close()
        if worker.process.is_alive():
            worker.process.terminate()
    for worker in workers:
        worker.process.join(_PATIENCE)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
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
