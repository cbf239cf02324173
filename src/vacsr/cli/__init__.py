"""The command line: parses, calls the library, prints. stdout is data, stderr is progress and messages."""

from __future__ import annotations

import errno
import io
import sys
import warnings
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from vacsr import __version__
from vacsr.cli import audit, bench, compare, embed, evaluate, index, search, serve, train
from vacsr.errors import EnvironmentProblem, VacsrError

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
    bench.doctor, compare.demo, embed.embed, train.train, train.fewshot, evaluate.evaluate, evaluate.score,
    audit.audit, search.search, search.calibrate, serve.serve, compare.compare, bench.bench,
):  # fmt: skip
    app.command()(_command)
app.add_typer(index.index, name="index")


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    """One plain line on stderr, without Python's source line."""
    print("warning:", " ".join(str(message).splitlines()), file=sys.stderr)


def main() -> None:
    """Entry point: a VacsrError becomes one message and its exit code, a warning one line, Ctrl-C becomes 130."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            app()
    except VacsrError as error:
        _fail(error)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # of another file than stdout
        sys.stdout = io.StringIO()  # Python would flush again when it exits, and complain
        message = f"cannot write everything to stdout: {error.strerror or error}"
        _fail(EnvironmentProblem(f"{message} — redirect it to a disk with free space, then run it again"))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: VacsrError) -> NoReturn:
    Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
