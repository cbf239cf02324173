"""`vacsr train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.memory import memory_told
from vacsr.cli.options import Overrides

_SMALLER = "try --set train.tile=auto, backbone.checkpointing=true or a smaller train.batch_size"


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/features.yaml.", metavar="RECIPE.yaml")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
) -> None:
    """Train by a recipe; leaves config.yaml, metrics.jsonl, checkpoint/, model/ and report.json in the run folder."""
    from vacsr.config.io import read_recipe
    from vacsr.train import run_recipe

    folder = out or Path("runs") / recipe.stem
    plan = read_recipe(recipe, overrides or [])
    with memory_told(_SMALLER):
        result = run_recipe(plan, folder, resume=resume)
    if result.run.interrupted:
        again = f"vacsr train {folder / 'config.yaml'} --out {folder} --resume"
        typer.echo(f"stopped after step {result.run.state.step}; go on with: {again}", err=True)
        raise typer.Exit(130)
    if result.report is not None:
        typer.echo(result.report.to_markdown())
