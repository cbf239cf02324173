"""`vacsr train` and `vacsr fewshot`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from vacsr.cli.options import OutRun, Overrides, Recipe, Resume
from vacsr.errors import EnvironmentProblem

_LESS_MEMORY = "try --set train.tile=auto, backbone.checkpointing=true or a smaller train.batch_size"
_LESS_FEWSHOT_MEMORY = (
    "try --set backbone.checkpointing=true, a smaller chunk of the method (vacsr: method.text_chunk=100, "
    "method.pair_chunk=4096; cocoop: method.chunk), or a smaller train.batch_size, which changes the result; while "
    "testing, a smaller evaluate.batch_size"
)


def train(recipe: Recipe, overrides: Overrides = None, out: OutRun = None, resume: Resume = False) -> None:
    """Train a model from a recipe.

    Writes config.yaml, metrics.jsonl, checkpoint/, model/ and report.json to the run folder.

    Ctrl-C is safe: it saves the current step, and --resume continues from there.
    """
    from vacsr.config.io import read_recipe
    from vacsr.train import run_recipe

    folder = out or Path("runs") / recipe.stem
    plan = read_recipe(recipe, overrides or [])
    _note_resume(folder, resume=resume)
    with _memory_errors(_LESS_MEMORY):
        run = run_recipe(plan, folder, resume=resume)
    if run.interrupted:
        _stopped("train", folder, run.state.step)
    if run.report is not None:
        typer.echo(run.report.to_markdown(details=False))
        takes = "score, audit, index and search" if run.model.backbone.reads_photos else "score, audit and index"
        typer.echo(f"the model is in {folder / 'model'}; {takes} take {folder} as RUN", err=True)


def fewshot(
    recipe: Recipe,
    overrides: Overrides = None,
    out: OutRun = None,
    resume: Resume = False,
) -> None:
    """Learn classes from a few photos each, then test.

    Writes config.yaml, shots.json, model/ and report.json to the run folder.

    Ctrl-C is safe: it saves the current step, and --resume continues from there.
    """
    from vacsr.evaluate.fewshot import fewshot_table
    from vacsr.fewshot import read_fewshot, run_fewshot

    folder = out or Path("runs") / recipe.stem
    plan = read_fewshot(recipe, overrides or [])
    _note_resume(folder, resume=resume)
    with _memory_errors(_LESS_FEWSHOT_MEMORY):
        run = run_fewshot(plan, folder, resume=resume)
    if run.interrupted:
        _stopped("fewshot", folder, run.state.step)
    typer.echo(fewshot_table(run.report))


def _note_resume(folder: Path, *, resume: bool) -> None:
    """Say so where --resume has nothing to continue."""
    from vacsr.train.checkpoint import holds_run

    if resume and not holds_run(folder):
        typer.echo(f"nothing is saved in {folder} yet, so this run starts at step 0", err=True)


def _stopped(command: str, folder: Path, step: int) -> NoReturn:
    """Ctrl-C: say how to continue."""
    again = f"vacsr {command} {folder / 'config.yaml'} --out {folder} --resume"
    typer.echo(f"stopped after step {step}; continue with: {again}", err=True)
    raise typer.Exit(130)


@contextmanager
def _memory_errors(advice: str) -> Iterator[None]:
    """Turn "out of memory", on a GPU or a CPU, into an :class:`EnvironmentProblem` that ends in ``advice``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            message = str(error).split(". ")[0]
        elif isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
            message = "out of memory"  # torch has no class of its own for it on a CPU
        else:
            raise
        raise EnvironmentProblem(f"{message} — {advice}") from error
