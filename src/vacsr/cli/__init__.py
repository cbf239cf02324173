"""The command line: parses, calls the library, prints. stdout is data, stderr is progress and messages."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, TextIO

import typer
from rich.console import Console

from vacsr import __version__
from vacsr.cli import (
    audit,
    bench,
    calibrate,
    compare,
    demo,
    doctor,
    embed,
    evaluate,
    fewshot,
    index,
    score,
    search,
    serve,
    train,
)
from vacsr.cli.stdout import checked_stdout
from vacsr.errors import VacsrError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Image-text similarity with a grade and an uncertainty.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vacsr {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and leave.")
    ] = False,
) -> None:
    """Image-text similarity with a grade and an uncertainty."""


for _command in (
    doctor.doctor,
    demo.demo,
    embed.embed,
    train.train,
    fewshot.fewshot,
    evaluate.evaluate,
    score.score,
    audit.audit,
    search.search,
    calibrate.calibrate,
    serve.serve,
    compare.compare,
    bench.bench,
):
    app.command()(_command)
app.add_typer(index.index, name="index")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One plain line on stderr, without Python's source line."""
    print("warning:", " ".join(str(message).splitlines()), file=sys.stderr)


def main() -> None:
    """Entry point: a VacsrError becomes one message and its exit code, a warning one line, Ctrl-C becomes 130."""
    try:
        with warnings.catch_warnings(), checked_stdout():
            warnings.showwarning = _show_warning
            app()
    except VacsrError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
