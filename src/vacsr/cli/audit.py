"""`vacsr audit`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device

if TYPE_CHECKING:
    from vacsr.search.audit_page import Pictures


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
        str | None,
        typer.Option(metavar="DIR|SPEC", help="Pictures for the page where the data are embeddings, by image id."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Find labelled pairs that are probably wrong, and matches that are probably missing."""
    from vacsr.data import load_pairs
    from vacsr.scoring import PairScorer
    from vacsr.search.audit import audit as audit_pairs
    from vacsr.search.audit_files import write_audit
    from vacsr.train.progress import PhotoProgress

    data = load_pairs(pairs, split=split)
    shown = None if photos is None else _pictures(photos, data.image_ids)
    scorer = PairScorer.from_pretrained(run, device=device)
    with PhotoProgress("comparing", show=True) as bar:
        report = audit_pairs(scorer, data, top=top, min_grade=min_grade, progress=bar)
    if not report.missing and report.min_grade > report.usual_grade:
        reached = f"three of four labelled pairs reach {report.usual_grade:.2g}"
        typer.echo(f"no missing match is graded {report.min_grade:g}; {reached} — lower --min-grade", err=True)
    write_audit(out, report, data, title=f"{_short(pairs)}, {data.split}", photos=shown)
    typer.echo(f"wrong\t{len(report.wrong)}\t{out / 'wrong.csv'}")
    typer.echo(f"missing\t{len(report.missing)}\t{out / 'missing.csv'}")
    typer.echo(f"page\t{len(data)}\t{out / 'index.html'}")


def _pictures(source: str, image_ids: Sequence[str]) -> Pictures:
    """A folder of files, or the photos of a data set."""
    from vacsr.data import PhotoSet, load_pairs
    from vacsr.errors import UsageError
    from vacsr.search.audit_page import Pictures

    if Path(source).is_dir():
        found = Pictures.lying_in(Path(source), image_ids)
    else:
        pairs = load_pairs(source)
        if not isinstance(pairs, PhotoSet):
            raise UsageError(f"--photos {source} are embeddings, expected photos — give the folder they lie in")
        found = Pictures.of(pairs)
    found.check(image_ids, source=source)
    return found


def _short(spec: str) -> str:
    """File names without their folders, for a page that others may see.

    >>> _short("features:data/mine/vectors.safetensors,captions=/data/captions.json")
    'features:vectors.safetensors,captions=captions.json'
    """
    return re.sub(r"[^:,=]*/(?=[^/,])", "", spec)
