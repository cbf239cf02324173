"""The command line: parses, calls the library, prints. stdout is data, stderr is progress and messages."""

import errno
import io
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from vacsr import __version__
from vacsr.cli import audit, bench, compare, embed, evaluate, export, index, search, serve, train
from vacsr.cli.options import Command, Group
from vacsr.errors import EnvironmentProblem, VacsrError

__all__ = ["app", "main"]

_ABOUT = "Image-text similarity with a grade and an uncertainty."

app = typer.Typer(
    cls=Group,
    help=f"{_ABOUT}\n\nStart here: vacsr demo. The guides are in docs/, first docs/get-started/photos.md.",
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Image-text similarity with a grade and an uncertainty."""


_GROUPS: dict[str, dict[Callable[..., None], str]] = {
    "Data": {
        embed.embed: "vacsr embed --backbone clip:./clip-vit-base-patch32 --pairs folder:photos --out all.safetensors",
        audit.audit: "vacsr audit runs/mine --pairs csv:captions.csv --out audit",
        audit.filter: "vacsr filter runs/mine --pairs csv:captions.csv --max-wrong 5% --out cleaned.csv",
    },
    "Training": {
        train.train: "vacsr train mine.yaml --out runs/mine --set train.epochs=5",
        train.fewshot: "vacsr fewshot recipes/scenes-base2novel.yaml --out runs/few",
    },
    "Evaluation": {
        evaluate.evaluate: "vacsr evaluate runs/mine --split test --json report.json",
        evaluate.score: 'vacsr score runs/mine --image photo.jpg --text "a dog on a beach"',
        compare.compare: "vacsr compare tables/retrieval.yaml --seeds 0,1,2 --page",
    },
    "Search": {
        search.search: 'vacsr search runs/mine --index exact:photos-index --text "a dog on a beach" -k 5',
        search.calibrate: "vacsr calibrate runs/mine --split dev --check test",
        serve.serve: "vacsr serve runs/mine --index exact:photos-index",
    },
    "Tools": {
        compare.demo: "vacsr demo --out demo",
        bench.doctor: "vacsr doctor",
        bench.bench: "vacsr bench scoring --size small",
        export.export: "vacsr export runs/mine --onnx mine.onnx",
    },
}
"""The commands by what they are for, each with the example that ends its help."""
for _group, _commands in _GROUPS.items():
    for _command, _example in _commands.items():
        app.command(cls=Command, rich_help_panel=_group, epilog=f"Example: {_example}")(_command)
    if _group == "Search":
        app.add_typer(index.index, name="index", rich_help_panel=_group)


def _show_warning(message: Warning | str, *_where: object, **_more: object) -> None:
    """One plain line on stderr, without Python's source line."""
    print("warning:", " ".join(str(message).splitlines()), file=sys.stderr)


def main() -> None:
    """Entry point: a VacsrError becomes a message and its exit code, a warning a line, Ctrl-C or SIGTERM 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
