"""Work in several processes at once: each tells how it goes, and all stop when one fails, or on Ctrl-C."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from vacsr.errors import VacsrError
from vacsr.processes import Worker, died, interrupts_held, start_worker, stop_workers

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
    workers: list[Worker] = []
    try:
        with interrupts_held():
            workers.extend(start_worker(job.name, _work, (job,)) for job in jobs)
        _listen(workers, listen)
    finally:
        stop_workers(workers, patience=_PATIENCE)


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


def _listen(workers: Sequence[Worker], listen: Callable[[str, Any], None]) -> None:
    """Until the last is done."""
    busy = {worker.channel: worker for worker in workers}
    while busy:
        for channel in wait(list(busy)):
            assert isinstance(channel, Connection), "only pipes were waited for"
            worker = busy[channel]
            try:
                said = channel.recv()
            except EOFError as error:
                raise died(worker, at=worker.process.name) from error
            if isinstance(said, _Done):
                del busy[channel]
            elif isinstance(said, _Failed):
                raise said.error or RuntimeError(f"{worker.process.name} failed in its worker process:\n{said.trace}")
            else:
                listen(worker.process.name, said.message)
