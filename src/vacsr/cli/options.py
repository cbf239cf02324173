"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a field, e.g. --set train.epochs=5. Repeatable."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
