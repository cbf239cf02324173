"""`vacsr search`, and `vacsr calibrate`, which fits its grades, cutoffs and answer sets."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import CalibrationFile, Device, Index, JsonFile, RunFolder, Skip, note_untrained, one_line
from vacsr.errors import UsageError
from vacsr.search.policies import POLICIES

if TYPE_CHECKING:
    from vacsr.search.searcher import Results

_MEANINGS = " ".join(f"{name}: {policy.meaning}" for name, policy in POLICIES.items())


def search(
    run: RunFolder,
    index: Index,
    text: Annotated[str | None, typer.Option(metavar="WORDS", help="Query: finds images, or similar texts.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="Query: finds texts, or similar images.")] = None,
    k: Annotated[int, typer.Option("-k", help="Number of hits.")] = 10,
    policy: Annotated[str, typer.Option(metavar="|".join(POLICIES), help=_MEANINGS)] = "score",
    min_grade: Annotated[
        float, typer.Option(metavar="G", min=0, max=1, help="Leave out hits with a lower grade, 0 to 1.")
    ] = 0.0,
    calibration: CalibrationFile = None,
    json: JsonFile = None,
    device: Device = "auto",
) -> None:
    """Find photos for words, or texts for a photo.

    A photo finds similar photos in an index of images, and a text finds
    similar texts in an index of texts: by cosine alone, without a grade.

    A grade is the probability that a hit is right. It is "–" for a model
    that only ranks and is not calibrated. σ is the uncertainty of the pair.
    Piped, hits are tab-separated lines.

    After `vacsr calibrate` the output says which hits are confident, or how
    many of the first hold the right one. Without an answer the exit code is 0.
    """
    from vacsr.files import check_output, write_json
    from vacsr.search.index import open_index
    from vacsr.search.searcher import Searcher
    from vacsr.train.checkpoint import run_files

    if (text is None) == (image is None):
        raise UsageError('search takes either --text or --image — e.g. --text "a dog on a beach"')
    if text is not None and not text.strip():
        raise UsageError('--text is blank — give some words, e.g. --text "a dog on a beach"')
    if json is not None:
        folder = Path(index.partition(":")[2] or index)
        check_output("--json", json, inputs=[*run_files(run), folder, *([] if image is None else [image])])
    with closing(open_index(index)) as opened:
        searcher = Searcher.from_pretrained(run, opened, calibration=calibration, device=device)
        if searcher.fitted is None:
            note_untrained(searcher.scorer)
        if not searcher.scorer.model.backbone.reads_photos:
            message = "the model reads features of unknown encoders, so it can embed neither words nor photos"
            action = "use features that `vacsr embed` wrote, or Searcher.search_texts(features) in Python"
            raise UsageError(f"{message} — {action}")
        result = searcher.search(text=text, image=image, k=k, policy=policy, min_grade=min_grade)
    if json is not None:
        write_json(json, result.to_dict())
    _show(result, min_grade)


def _guarantee(result: Results) -> str:
    """What holds for confident hits, where it does."""
    if not (result.guaranteed and result.confident and result.precision and result.confidence):
        return ""
    right, sure = 100 * result.precision, 100 * result.confidence
    return f"of such hits at least {right:.4g}% are right, with {sure:.4g}% confidence, if a match is in the index"


def _show(result: Results, min_grade: float) -> None:
    """Hits on stdout, one whole line each: columns on a terminal, elsewhere tab-separated with other lines after #."""
    terminal = sys.stdout.isatty()
    if result.scored and result.note:
        typer.echo(f"warning: {result.note}", err=True)
    missing = f"no hit has a grade of {min_grade:g} or more" if result.answered and not result.hits else ""
    note = "" if result.scored else result.note
    guarantee = _guarantee(result)
    presumes = result.calibrated and result.hits and not guarantee
    presumed = "grades presume that a match is in the index" if presumes else ""
    for line in (note, result.summary or result.reason, guarantee, presumed, missing):
        if line:
            typer.echo(line if terminal else f"# {line}")
    if not result.hits:
        return
    rows = [["rank", "id", *(("grade", "σ", "score", "cosine") if result.scored else ("cosine",)), "note"]]
    for hit in result.hits:
        values = (hit.grade, hit.uncertainty, hit.score, hit.cosine) if result.scored else (hit.cosine,)
        shown = ["–" if value is None else f"{value:.3f}" for value in values]
        remarks = ["confident"] if hit.confident else []
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
    index: Annotated[
        str | None, typer.Option(metavar="INDEX", help="Calibrate for this index: search it with the labelled pairs.")
    ] = None,
    check: Annotated[str | None, typer.Option(metavar="S", help="Another split, to check the result on.")] = None,
    precision: Annotated[float, typer.Option(help="Share of confident hits that must be right.")] = 0.9,
    confidence: Annotated[float, typer.Option(help="Confidence with which that must hold, 0.5 to 1.")] = 0.9,
    coverage: Annotated[float, typer.Option(help="Share of answer sets that must hold the right hit.")] = 0.9,
    candidates: Annotated[int, typer.Option(help="Nearest items by cosine that the method scores.")] = 200,
    seed: Annotated[
        int, typer.Option(help="Seed of the galleries. Keeping the best of several would lose the guarantee.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to store it; default: with the index or the model.")
    ] = None,
    skip: Skip = False,
    device: Device = "auto",
) -> None:
    """Calibrate grades, confident hits and answer sets for an index of any size.

    It takes a few hundred labelled pairs that the model was not trained on.
    RUN may be pretrained: clip:ID_OR_FOLDER with --index or --out. Without
    labels, use the captions of the indexed photos: --split all --index INDEX.
    """
    from vacsr.search.calibrate import CalibrateSettings
    from vacsr.search.calibrate_run import calibrate_run
    from vacsr.search.index import open_index

    settings = CalibrateSettings(
        precision=precision, confidence=confidence, coverage=coverage, candidates=candidates, seed=seed
    )
    with ExitStack() as stack:
        opened = None if index is None else stack.enter_context(closing(open_index(index)))
        result = calibrate_run(
            run, settings, index=opened, pairs=pairs, split=split, check=check, out=out,
            on_error="skip" if skip else "fail", device=device,
        )  # fmt: skip
    typer.echo(f"wrote {result.path}", err=True)
    typer.echo(result.to_markdown())
