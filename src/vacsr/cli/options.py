"""Options and arguments that several commands share."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from vacsr.progress import PhotoProgress
    from vacsr.scale import Part, Task
    from vacsr.scoring import PairScorer

_INDEX = "exact:FOLDER (or just FOLDER), or faiss:, milvus:, qdrant: or pgvector:, see docs/cli.md."

RUN_HELP = (
    "A run or model folder, a Hub id, or pretrained encoders: clip:ID_OR_FOLDER, towers:IMAGE,TEXT, or features:FILE, "
    "which holds vectors of both."
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)]
RunOption = Annotated[Path, typer.Option("--run", metavar="RUN", help=RUN_HELP)]
Recipe = Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A recipe, such as those in recipes/.")]
OutRun = Annotated[Path | None, typer.Option("--out", help="Run folder; default: runs/RECIPE.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in this folder.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Change a field, e.g. --set train.epochs=5. Repeatable."),
]
Index = Annotated[str, typer.Option(metavar="INDEX", help=_INDEX)]
IndexName = Annotated[str, typer.Argument(metavar="INDEX", help=_INDEX)]
CalibrationFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="From `vacsr calibrate --out`; default: the index's or the model's.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")]
Skip = Annotated[bool, typer.Option("--skip", help="Skip unreadable photos and captions instead of stopping.")]
Workers = Annotated[int, typer.Option(min=0, help="Threads that decode photos; 0: one per core.")]
Ray = Annotated[
    str | None,
    typer.Option(metavar="N|ADDRESS", help="Shard by shard in N processes, or on a Ray cluster; --out is a folder."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def load_scorer(run: Path, *, device: str) -> PairScorer:
    """The model of a run, ready to score; says so if nothing was trained."""
    from vacsr.scoring import PairScorer

    scorer = PairScorer.from_pretrained(run, device=device)
    note_untrained(scorer)
    return scorer


def note_untrained(scorer: PairScorer) -> None:
    """What cosine scores lack, in one line, for a model that is only its encoders."""
    if scorer.model.untrained:
        say_untrained(scorer.model.backbone.name or scorer.model.provenance.backbone or "this encoder")


def say_untrained(name: str) -> None:
    message = f"{name} is used without training, so scores are cosines"
    typer.echo(f"{message}; `vacsr calibrate` adds grades, `vacsr train` on your own captions uncertainty", err=True)


@contextmanager
def resumable(bar: PhotoProgress) -> Iterator[PhotoProgress]:
    """Work that is stored batch by batch: Ctrl-C says how much is stored, and how to continue."""
    try:
        with bar:
            yield bar
    except KeyboardInterrupt:
        stored = f"{bar.done} are stored — run the same command again to continue"
        typer.echo(f"stopped: {stored if bar.done else 'nothing is stored yet — run the same command again'}", err=True)
        raise typer.Exit(130) from None


def over_parts(make: Callable[[], Task], parts: Sequence[Part], out: Path, *, ray: str, device: str) -> Counter[str]:
    """All parts with Ray; says how much was done, and refuses to have found nothing."""
    from vacsr.errors import NoSuchSplit
    from vacsr.progress import PhotoProgress
    from vacsr.scale import run_parts

    with resumable(PhotoProgress("parts", show=True)) as bar:
        done = run_parts(make, parts, out, ray=ray, device=device, progress=bar)
    if not done["captions"]:
        raise NoSuchSplit("no part has captions of this split — choose another one with --split")
    before = f", {done['done before']:,} of them before" if done["done before"] else ""
    typer.echo(f"{done['parts']:,} parts with {done['captions']:,} captions{before}", err=True)
    return done


def one_line(text: str) -> str:
    """Text of others for a table: without tabs, line breaks and what a terminal would act on.

    >>> one_line("a\\n dog\\x1b[2J")
    'a dog [2J'
    """
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip()


class _PlainHelp:
    """Help wraps at the width of the terminal, and shows a flag without `<bool>`, which looks as if it took a value."""

    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(self.help or ""))
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag:
                param.metavar = ""
        return params


class Command(_PlainHelp, TyperCommand):
    """Of every command. Ctrl-C is never silent, not even while libraries load."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
            raise typer.Exit(130) from None


class Group(_PlainHelp, TyperGroup):
    """Of ``vacsr`` and ``vacsr index``."""
