"""`vacsr search`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device
from vacsr.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from vacsr.search.engine import Searcher
    from vacsr.search.results import Results


class PolicyChoice(StrEnum):
    """How hits are ordered, and whether there is an answer."""

    SCORE = "score"
    LCB = "lcb"
    ABSTAIN = "abstain"
    MISSED = "missed"


def search(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    index: Annotated[str, typer.Option(metavar="INDEX", help="exact:PATH or milvus:FILE_OR_URI.")],
    text: Annotated[str | None, typer.Option(help="Words, to find images.")] = None,
    image: Annotated[Path | None, typer.Option(help="A photo, to find texts.")] = None,
    k: Annotated[int, typer.Option("-k", help="How many hits.")] = 10,
    policy: Annotated[
        PolicyChoice,
        typer.Option(
            help="score: by the method's score. lcb: by score − λσ. abstain: answer only where the risk that was "
            "calibrated for holds. missed: likely unlabelled matches first."
        ),
    ] = PolicyChoice.SCORE,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")] = None,
    device: Device = "auto",
) -> None:
    """Find images for words, or texts for a photo, with grade and uncertainty.

    All policies but score need what `vacsr calibrate` writes. Exits with 0 also where there is no answer.
    """
    from vacsr.files import write_json
    from vacsr.search import open_index
    from vacsr.search.engine import Searcher

    if (text is None) == (image is None):
        raise UsageError('search takes either --text or --image — e.g. --text "a dog on a beach"')
    opened = open_index(index)
    try:
        searcher = Searcher.from_pretrained(run, opened, device=device)
        result = _ask(searcher, text, image, k=k, policy=policy.value)
    finally:
        opened.close()
    if json is not None:
        write_json(json, result.to_json())
    _show(result, _promise(searcher) if result.promised else "")


def _ask(searcher: Searcher, text: str | None, image: Path | None, *, k: int, policy: str) -> Results:
    if not searcher.scorer.model.has_towers:
        message = "the model reads cached features, so it can embed neither words nor photos"
        raise UsageError(f"{message} — train one with towers, or search from Python: Searcher.search_texts(features)")
    if text is not None:
        return searcher.search_texts([text], k=k, policy=policy)[0]
    assert image is not None, "one of the two is given"
    return searcher.search_images([image], k=k, policy=policy)[0]


def _promise(searcher: Searcher) -> str:
    assert searcher.fitted is not None, "nothing is promised without it"
    rule = searcher.fitted.answer
    wrong = f"at most {rule.risk:.0%} of such answers are wrong, with {rule.confidence:.0%} confidence"
    return f"the first hit is vouched for: {wrong}, if a match is in the index"


def _show(result: Results, promise: str) -> None:
    """The table on stdout; what is not data on stderr."""
    from rich.console import Console

    if result.note:
        typer.echo(f"warning: {result.note}", err=True)
    if not result.answered:
        typer.echo(result.reason)
    if promise:
        typer.echo(promise)
    Console(highlight=False).print(_table(result))


def _table(result: Results) -> Table:
    from rich.markup import escape
    from rich.table import Table

    title = None if result.answered else "not vouched for"
    table = Table("rank", "id", "grade", "σ", "score", "cosine", "", title=title, title_justify="left", box=None)
    for hit in result.hits:
        sigma = "–" if hit.uncertainty is None else f"{hit.uncertainty:.3f}"
        also = "probably also a match" if hit.probably_also else ""
        table.add_row(
            str(hit.rank), escape(hit.id), f"{hit.grade:.3f}", sigma, f"{hit.score:.3f}", f"{hit.cosine:.3f}", also
        )
    return table
