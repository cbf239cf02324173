"""Runs in a process of its own (see conftest.py): does a JOB, and dies on command.

JOB: ``argv`` for the command line, or ``task`` for one of the functions below; ``env``, ``output`` (where stdout and
stderr go), ``kill`` (name and number of a moment), ``limit`` (largest file in bytes).
"""

import functools
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import vacsr.embed
import vacsr.files
import vacsr.train.trainer
from vacsr.cli import main
from vacsr.config.io import read_yaml, recipe_from
from vacsr.train.callbacks import JsonlTracker
from vacsr.train.data import Batch, batch_order, training_data
from vacsr.train.distributed import sum_gradients
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.run import run_recipe
from vacsr.train.step import TrainStep
from vacsr.train.trainer import Trainer

JOB: dict[str, Any] = globals().get("JOB", {})


def die(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def nth_call(owner: Any, name: str, number: int, action: Callable[..., None], *, before: bool) -> None:
    """Do ``action`` at the ``number``-th call (from 1) of ``owner.name``."""
    original, seen = getattr(owner, name), [0]

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if before and seen[0] == number:
            action(*args)
        result = original(*args, **kwargs)
        if not before and seen[0] == number:
            action(*args)
        return result

    setattr(owner, name, wrapped)


def tear_file(number: int) -> None:
    """Write half of the ``number``-th safetensors checkpoint, then die."""
    seen = [0]

    def save_half(tensors: Any, path: Path, metadata: Any = None) -> None:
        save_file(tensors, path, metadata=metadata)
        seen[0] += "state.safetensors" in str(path)
        if "state.safetensors" in str(path) and seen[0] == number:
            whole = Path(path).read_bytes()
            Path(path).write_bytes(whole[: len(whole) // 2])
            die()

    setattr(vacsr.files, "save_file", save_half)  # noqa: B010


def tear_line(tracker: JsonlTracker, _: Trainer, row: dict[str, Any]) -> None:
    with tracker.path.open("a", encoding="utf-8") as file:
        file.write(f'{{"step": {row["step"]}, "lo')
    die()


def arm(moment: str, number: int) -> None:
    """Choose the moment to die."""
    if moment == "after step":
        nth_call(TrainStep, "__call__", number, lambda *_: die(), before=False)
    elif moment == "after checkpoint":
        nth_call(vacsr.train.trainer, "save_checkpoint", number, lambda *_: die(), before=False)
    elif moment == "before checkpoint":
        nth_call(vacsr.train.trainer, "save_checkpoint", number, lambda *_: die(), before=True)
    elif moment == "in checkpoint":
        tear_file(number)
    elif moment == "in log":
        nth_call(JsonlTracker, "on_log", number, tear_line, before=True)
    elif moment == "ctrl-c":
        nth_call(TrainStep, "__call__", number, lambda *_: die(signal.SIGINT), before=False)
    elif moment == "after part":
        setattr(vacsr.embed, "embed_pairs", functools.partial(vacsr.embed.embed_pairs, part_size=4))  # noqa: B010
        nth_call(vacsr.embed, "write_tensors", number, lambda *_: die(), before=False)
    else:
        raise AssertionError(moment)


def trainer() -> Trainer:
    recipe = recipe_from(read_yaml(Path(JOB["recipe"])))
    pairs = training_data(recipe.data).train
    return Trainer(RetrievalTask(recipe.method, pairs, recipe.train, backbone=recipe.backbone), recipe.train)


def gradients() -> None:
    """The loss terms and the summed gradient of the first batch, before any update."""
    run = trainer()
    task = run.task
    rows = next(iter(batch_order(len(task.pairs), batch=task.config.batch_size, seed=task.config.seed, epoch=0)))
    values = run.step.run(Batch(rows), torch.tensor(0), last=False)
    sum_gradients(run.step.params, task.world)
    named = {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}
    torch.save({"values": values, "grad": named}, Path(JOB["result"]) / f"rank-{task.world.rank}.pt")


def twice() -> None:
    """Two whole runs, one after the other."""
    for number in range(2):
        run_recipe(recipe_from(read_yaml(Path(JOB["recipe"]))), Path(JOB["result"]) / f"run-{number}", progress=False)


def run() -> None:
    torch.set_num_threads(1)
    os.environ.update(JOB.get("env", {}))
    for number, stream in enumerate((sys.stdout, sys.stderr), start=1):
        stream.flush()
        os.dup2(os.open(f"{JOB['output']}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if "limit" in JOB:
        resource.setrlimit(resource.RLIMIT_FSIZE, (JOB["limit"], resource.RLIM_INFINITY))
    if "kill" in JOB:
        arm(*JOB["kill"])
    if "argv" in JOB:
        sys.argv = ["vacsr", *JOB["argv"]]
        main()
    else:
        {"gradients": gradients, "twice": twice}[JOB["task"]]()


if __name__ == "__main__" and JOB:
    run()
