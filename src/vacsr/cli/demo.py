"""`vacsr demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Where the models, the table and the page go.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="World and training seed.")] = 0,
) -> None:
    """Train infonce, sigmoid and vacsr on generated pictures whose every truth is known; print a table, draw a page.

    Takes some minutes on two cores. OUT/index.html shows the figures and some queries with their answers.
    """
    from vacsr.demo import run_demo

    typer.echo(run_demo(out, seed=seed))
