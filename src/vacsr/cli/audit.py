"""`vacsr audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Device


def audit(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    pairs: Annotated[str, typer.Option(metavar="SPEC", help="The data to look through; see docs/data.md.")],
    out: Annotated[Path, typer.Option(help="Folder for wrong.csv, missing.csv and index.html.")],
    split: Annotated[str, typer.Option(help="Only this split; all for everything.")] = "train",
    top: Annotated[int, typer.Option(min=1, help="Suspects of each kind.")] = 200,
    min_grade: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Least grade of a missing match; default: what 3 of 4 labelled pairs reach."
        ),
    ] = None,
    photos: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Pictures for the page where the data are embeddings.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Find labelled pairs that are probably wrong, and matches that are probably missing."""
    from vacsr.data import PhotoSet, load_pairs
    from vacsr.errors import UsageError
    from vacsr.scoring import PairScorer
    from vacsr.search.audit import audit as audit_pairs
    from vacsr.search.audit_files import write_audit
    from vacsr.train.progress import PhotoProgress

    data = load_pairs(pairs, split=split)
    shown = None if photos is None else load_pairs(photos, split=split)
    if shown is not None and not isinstance(shown, PhotoSet):
        raise UsageError(f"--photos {photos} are embeddings, expected photos — give e.g. folder:DIR")
    scorer = PairScorer.from_pretrained(run, device=device)
    with PhotoProgress("comparing", show=True) as bar:
        report = audit_pairs(scorer, data, top=top, min_grade=min_grade, progress=bar)
    write_audit(out, report, data, title=f"{pairs}, {data.split}", photos=shown)
    typer.echo(f"wrong\t{len(report.wrong)}\t{out / 'wrong.csv'}")
    typer.echo(f"missing\t{len(report.missing)}\t{out / 'missing.csv'}")
    typer.echo(f"page\t{len(data)}\t{out / 'index.html'}")
