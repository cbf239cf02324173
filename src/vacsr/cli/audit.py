"""`vacsr audit`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import spec_files
from vacsr.errors import NoSuchSplit

if TYPE_CHECKING:
    from vacsr.data import PairSet, PhotoSet
    from vacsr.search.audit_page import Pictures


def audit(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    pairs: Annotated[str, typer.Option(metavar="SPEC", help="The data to look through; see docs/data.md.")],
    out: Annotated[Path, typer.Option(help="Folder for wrong.csv, missing.csv and index.html.")],
    split: Annotated[
        str | None,
        typer.Option(
            help="Only this split, or all; default: the SPEC's, else train, all where the data have no train."
        ),
    ] = None,
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
    skip: Annotated[bool, typer.Option("--skip", help="Leave out what cannot be read instead of stopping.")] = False,
    device: Device = "auto",
) -> None:
    """Find labelled pairs that are probably wrong, and matches that are probably missing."""
    from vacsr.files import check_output
    from vacsr.progress import PhotoProgress
    from vacsr.scoring import PairScorer
    from vacsr.search.audit import audit as audit_pairs
    from vacsr.search.audit_files import MISSING, PAGE, WRONG, write_audit

    for name in (WRONG, MISSING, PAGE):
        check_output("--out", out / name, inputs=spec_files(pairs))
    data = _read(pairs, split, skip=skip)
    shown = None if photos is None else _pictures(photos, data.image_ids, skip=skip)
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


def _read(pairs: str, split: str | None, *, skip: bool) -> PairSet | PhotoSet:
    """The split asked for; without one train, or everything where there is no train: labels may be wrong anywhere."""
    from vacsr.config import DataConfig
    from vacsr.data import parse_spec
    from vacsr.train.data import read_split

    config = DataConfig(pairs=pairs, on_error="skip" if skip else "fail")
    chosen = split or parse_spec(pairs).options.get("split")
    try:
        return read_split(config, chosen or "train")
    except NoSuchSplit as error:
        if chosen:
            given = str(error).rpartition(" — ")[0]
            raise NoSuchSplit(
                f"{given} — name a split that is there, or look through everything: --split all"
            ) from error
    data = read_split(config, "all")
    count = f"all {len(data.image_ids):,} images"
    typer.echo(f"the data have no split 'train': looking through {count} — choose with --split", err=True)
    return data


def _pictures(source: str, image_ids: Sequence[str], *, skip: bool) -> Pictures:
    """A folder of files, or the photos of a data set."""
    from vacsr.data import PhotoSet, load_images
    from vacsr.errors import UsageError
    from vacsr.search.audit_page import Pictures

    if Path(source).is_dir():
        found = Pictures.lying_in(Path(source), image_ids)
    else:
        pairs = load_images(source, on_error="skip" if skip else "fail")
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
