"""`vacsr search`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import run_files
from vacsr.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from vacsr.search.engine import Searcher
    from vacsr.search.results import Hit, Results


class PolicyChoice(StrEnum):
    """How hits are ordered, and whether there is an answer."""

    SCORE = "score"
    LCB = "lcb"
    ABSTAIN = "abstain"
    MISSED = "missed"


def search(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    index: Annotated[
        str, typer.Option(metavar="INDEX", help="exact:FOLDER, milvus:FILE.db or milvus:http://HOST:PORT.")
    ],
    text: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Finds images; in an index of texts, similar texts.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Finds texts; in an index of images, similar images.")
    ] = None,
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

    E.g. vacsr search runs/mine --index exact:photos-index --text "a dog"

    An index of images asked with a photo gives similar images, one of texts
    asked with words similar texts: by cosine alone, without a grade.

    Policies other than score need `vacsr calibrate` first. Where there is no
    answer, the output says so; the exit code is 0.
    """
    from vacsr.files import check_output, write_json
    from vacsr.search import open_index
    from vacsr.search.engine import Searcher

    if (text is None) == (image is None):
        raise UsageError('search takes either --text or --image — e.g. --text "a dog on a beach"')
    if text is not None and not text.strip():
        raise UsageError('--text is blank — give words, e.g. --text "a dog on a beach"')
    if json is not None:
        place = Path(index.partition(":")[2])
        check_output("--json", json, inputs=[*run_files(run), place, *([] if image is None else [image])])
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
    wrong = f"at most {100 * rule.risk:.4g}% of such answers are wrong, with {100 * rule.confidence:.4g}% confidence"
    return f"the first hit is vouched for: {wrong}, if a match is in the index"


def _show(result: Results, promise: str) -> None:
    """The table on stdout; what is not data on stderr."""
    from rich.console import Console

    if not result.graded:
        typer.echo(result.note)
    elif result.note:
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
    figures = ("grade", "σ", "score", "cosine") if result.graded else ("cosine",)
    table = Table("rank", "id", *figures, "", title=title, title_justify="left", box=None)
    for hit in result.hits:
        values = (hit.grade, hit.uncertainty, hit.score, hit.cosine) if result.graded else (hit.cosine,)
        shown = ("–" if value is None else f"{value:.3f}" for value in values)
        table.add_row(str(hit.rank), escape(hit.id), *shown, escape(_remark(hit)))
    return table


def _remark(hit: Hit) -> str:
    """What a text says, and whether the hit may be a match beside the first."""
    words = hit.metadata.get("text")
    also = "probably also a match" if hit.probably_also else ""
    return ": ".join(part for part in (also, words) if isinstance(part, str) and part)
