"""`vacsr audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Device, RunFolder, Skip, load_scorer


def audit(
    run: RunFolder,
    pairs: Annotated[str, typer.Option(metavar="SPEC", help="The data to check; see docs/data.md.")],
    out: Annotated[Path, typer.Option(help="Folder for wrong.csv, missing.csv and index.html.")],
    split: Annotated[str | None, typer.Option(help="Split to check; default: the SPEC's, train or all.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many suspects of each kind to list.")] = 200,
    min_grade: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Lowest grade of a missing match; default: that of 3 in 4 labelled pairs."),
    ] = None,
    photos: Annotated[str | None, typer.Option(metavar="DIR|SPEC", help="Photos for the page of embeddings.")] = None,
    skip: Skip = False,
    device: Device = "auto",
) -> None:
    """Find wrong captions and missing matches in your data."""
    from vacsr.data import read_named
    from vacsr.data.formats import OnError, parse_spec, spec_files
    from vacsr.data.tables import caption_lines
    from vacsr.files import check_output
    from vacsr.progress import PhotoProgress
    from vacsr.search.audit import audit as audit_pairs
    from vacsr.search.audit_page import MISSING, PAGE, WRONG, load_pictures, short_spec, write_audit

    for name in (WRONG, MISSING, PAGE):
        check_output("--out", out / name, inputs=spec_files(pairs))
    on_error: OnError = "skip" if skip else "fail"
    data = read_named(pairs, split, default="train", on_error=on_error)
    pictures = None if photos is None else load_pictures(photos, data.image_ids, on_error=on_error)
    scorer = load_scorer(run, device=device)
    with PhotoProgress("comparing", show=True) as bar:
        report = audit_pairs(scorer, data, top=top, min_grade=min_grade, progress=bar)
    least, usual = report.min_grade, report.usual_grade
    if not report.missing and least is not None and usual is not None and least > usual:
        reached = f"three of four labelled pairs reach {usual:.2g}"
        typer.echo(f"no missing match reaches grade {least:g}; {reached} — lower --min-grade", err=True)
    if report.estimated_wrong is not None:
        typer.echo(f"about {report.estimated_wrong:,} of {report.labelled:,} captions are wrong, by estimate", err=True)
    title, lines = f"{short_spec(pairs)}, {data.split}", caption_lines(parse_spec(pairs))
    write_audit(out, report, data, title=title, photos=pictures, lines=lines)
    typer.echo(f"wrong\t{len(report.wrong)}\t{out / WRONG}")
    typer.echo(f"missing\t{len(report.missing)}\t{out / MISSING}")
    typer.echo(f"page\t{len(data)}\t{out / PAGE}")
