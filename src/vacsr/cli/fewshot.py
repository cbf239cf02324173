"""`vacsr fewshot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.memory import memory_told
from vacsr.cli.options import Overrides
from vacsr.errors import UsageError

if TYPE_CHECKING:
    from vacsr.fewshot.config import FewshotRecipe


def fewshot(
    recipe: Annotated[
        Path, typer.Argument(help="A few-shot recipe, e.g. recipes/scenes-base2novel.yaml.", metavar="RECIPE.yaml")
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate-only", help="Test the trained model in the folder again; train nothing.")
    ] = False,
) -> None:
    """Learn classes from a few photos each and test them; leaves config.yaml, shots.json, model/ and report.json."""
    from vacsr.evaluate.fewshot import fewshot_table
    from vacsr.fewshot import evaluate_fewshot, read_fewshot, run_fewshot

    if resume and evaluate_only:
        raise UsageError("--resume trains on, --evaluate-only trains nothing — leave one out")
    folder = out or Path("runs") / recipe.stem
    plan = read_fewshot(recipe, overrides or [])
    with memory_told(_smaller(plan)):
        if evaluate_only:
            typer.echo(fewshot_table(evaluate_fewshot(plan, folder)))
            return
        result = run_fewshot(plan, folder, resume=resume)
    if result.report is None:
        again = f"vacsr fewshot {folder / 'config.yaml'} --out {folder} --resume"
        typer.echo(f"stopped after step {result.steps}; go on with: {again}", err=True)
        raise typer.Exit(130)
    typer.echo(fewshot_table(result.report))


def _smaller(plan: FewshotRecipe) -> str:
    """What takes less memory; only the batches of training change what is learned."""
    chunks = {"cocoop": ["a smaller method.chunk"], "vacsr": ["method.text_chunk=100", "method.pair_chunk=4096"]}
    ways = [*chunks.get(plan.method.name, []), "backbone.checkpointing=true"]
    if plan.train.batch_size > 1:
        ways.append(f"train.batch_size below {plan.train.batch_size}")
    return f"try --set {', '.join(ways)}; while testing, evaluate.batch_size below {plan.evaluate.batch_size}"
