"""`vacsr search`, and `vacsr calibrate`, which fits its grades and its policy abstain."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device, Index, JsonFile, RunFolder, Skip, note_untrained, one_line
from vacsr.errors import UsageError
from vacsr.search.policies import POLICIES

if TYPE_CHECKING:
    from vacsr.search.searcher import Results, Searcher

_MEANINGS = " ".join(f"{name}: {policy.meaning}" for name, policy in POLICIES.items())


def search(
    run: RunFolder,
    index: Index,
    text: Annotated[str | None, typer.Option(metavar="WORDS", help="Query: finds images, or similar texts.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="Query: finds texts, or similar images.")] = None,
    k: Annotated[int, typer.Option("-k", help="Number of hits.")] = 10,
    policy: Annotated[str, typer.Option(metavar="|".join(POLICIES), help=_MEANINGS)] = "score",
    json: JsonFile = None,
    device: Device = "auto",
) -> None:
    """Find photos for words, or texts for a photo.

    A photo finds similar photos in an index of images, and a text finds
    similar texts in an index of texts: by cosine alone, without a grade.

    A grade is the probability of a match. It is "–" for a model that only
    ranks and is not calibrated. Piped, hits are tab-separated lines.

    The policy abstain needs `vacsr calibrate` first. Without an answer the
    output says why, and the exit code is 0.
    """
    from vacsr.files import check_output, write_json
    from vacsr.search.index import open_index
    from vacsr.search.searcher import Searcher
    from vacsr.train.checkpoint import run_files

    if (text is None) == (image is None):
        raise UsageError('search takes either --text or --image — e.g. --text "a dog on a beach"')
    if json is not None:
        folder = Path(index.partition(":")[2] or index)
        check_output("--json", json, inputs=[*run_files(run), folder, *([] if image is None else [image])])
    with closing(open_index(index)) as opened:
        searcher = Searcher.from_pretrained(run, opened, device=device)
        note_untrained(searcher.scorer)
        if not searcher.scorer.model.backbone.reads_photos:
            message = "the model was trained on features whose encoders it does not know"
            action = "train on features that `vacsr embed` wrote, or use Searcher.search_texts(features) in Python"
            raise UsageError(f"{message}, so it can embed neither words nor photos — {action}")
        result = searcher.search(text=text, image=image, k=k, policy=policy)
    if json is not None:
        write_json(json, result.to_dict())
    _show(result, _guarantee(searcher) if result.promised else "")


def _guarantee(searcher: Searcher) -> str:
    assert searcher.fitted is not None, "nothing is guaranteed without it"
    rule = searcher.fitted.answer
    wrong = f"at most {100 * rule.risk:.4g}% of such answers are wrong, with {100 * rule.confidence:.4g}% confidence"
    return f"risk bound of the first hit: {wrong}, if a match is in the index"


def _show(result: Results, guarantee: str) -> None:
    """Hits on stdout, one whole line each: columns on a terminal, elsewhere tab-separated with other lines after #."""
    terminal = sys.stdout.isatty()
    if result.scored and result.note:
        typer.echo(f"warning: {result.note}", err=True)
    sure = "" if result.confidence is None else f"confidence that the first hit is right: {result.confidence:.3f}"
    for line in (result.note if not result.scored else "", result.reason, guarantee, sure):
        if line:
            typer.echo(line if terminal else f"# {line}")
    rows = [["rank", "id", *(("grade", "σ", "score", "cosine") if result.scored else ("cosine",)), "note"]]
    for hit in result.hits:
        values = (hit.grade, hit.uncertainty, hit.score, hit.cosine) if result.scored else (hit.cosine,)
        shown = ["–" if value is None else f"{value:.3f}" for value in values]
        remarks = ["probably also a match"] if hit.probably_also else []
        remarks += [hit.metadata["text"]] if isinstance(hit.metadata.get("text"), str) else []
        rows.append([str(hit.rank), one_line(hit.id), *shown, one_line(": ".join(remarks))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        typer.echo(padded if terminal else "\t".join(row))


def calibrate(
    run: RunFolder,
    pairs: Annotated[str | None, typer.Option(metavar="SPEC", help="Labelled pairs; default: the run's data.")] = None,
    split: Annotated[str, typer.Option(metavar="S", help="Split to calibrate on; not the training split.")] = "dev",
    check: Annotated[str | None, typer.Option(metavar="S", help="Another split, to check the guarantee on.")] = None,
    risk: Annotated[float, typer.Option(help="Risk bound: largest share of wrong answers under abstain.")] = 0.1,
    confidence: Annotated[float, typer.Option(help="Confidence level of the risk bound, 0.5 to 0.9999.")] = 0.9,
    gallery: Annotated[int | None, typer.Option(metavar="N", help="Images per index; default: the split's.")] = None,
    candidates: Annotated[int, typer.Option(help="Nearest items by cosine that the method scores.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the galleries. Choosing the best seed voids the guarantee.")] = 0,
    skip: Skip = False,
    device: Device = "auto",
) -> None:
    """Calibrate grades and the threshold of abstain on a dev split.

    The result is stored in the model folder, as search.json.
    """
    from vacsr.search.calibrate import CalibrateSettings
    from vacsr.search.calibrate_run import calibrate_run

    settings = CalibrateSettings(
        risk=risk, confidence=confidence, gallery=gallery, candidates=candidates, depth=min(20, candidates), seed=seed
    )
    result = calibrate_run(
        run, settings, pairs=pairs, split=split, check=check, on_error="skip" if skip else "fail", device=device
    )
    typer.echo(f"wrote {result.path}", err=True)
    typer.echo(result.to_markdown())
