"""`vacsr audit` and `vacsr filter`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from vacsr import __version__
from vacsr.cli.options import Device, Ray, RunFolder, Skip, load_scorer, over_parts
from vacsr.errors import UsageError


def audit(
    run: RunFolder,
    pairs: Annotated[str, typer.Option(metavar="SPEC", help="The data to check; see docs/data.md.")],
    out: Annotated[Path, typer.Option(help="Folder for the lists and the page, index.html.")],
    split: Annotated[str | None, typer.Option(help="Split to check; default: the SPEC's, train or all.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many suspects of each kind to list.")] = 200,
    min_grade: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Lowest grade of a missing match; default: that of 3 in 4 labelled pairs."),
    ] = None,
    photos: Annotated[str | None, typer.Option(metavar="DIR|SPEC", help="Photos for the page of embeddings.")] = None,
    format: Annotated[Literal["csv", "parquet"], typer.Option(help="Of the table of all captions, rows.csv.")] = "csv",
    skip: Skip = False,
    device: Device = "auto",
    ray: Ray = None,
) -> None:
    """Find wrong captions, missing matches and near-duplicate photos in your data, and estimate how many are wrong."""
    from vacsr.data import read_named
    from vacsr.data.formats import OnError, parse_spec, spec_files
    from vacsr.data.tables import caption_lines
    from vacsr.files import check_output
    from vacsr.progress import PhotoProgress
    from vacsr.search.audit import audit as audit_pairs
    from vacsr.search.audit_page import DUPLICATES, MISSING, PAGE, WRONG, load_pictures, short_spec, write_audit

    on_error: OnError = "skip" if skip else "fail"
    if ray is not None:
        from vacsr.scale import audit_task, parts_of
        from vacsr.search.wrong_share import CONFIDENCE, WrongCount

        if photos is not None or format != "csv":
            raise UsageError(
                "with --ray, pages have no other photos and tables are Parquet — leave out --photos, --format"
            )
        task = partial(audit_task, run, split, on_error, device, top=top, min_grade=min_grade)
        done = over_parts(task, parts_of(pairs, out), out, ray=ray, device=device)
        count = WrongCount(done["value"], done["low"], done["high"], CONFIDENCE, at_least=done["at_least"] > 0)
        typer.echo(f"wrong captions of {done['captions']:,}: {count}", err=True)
        for name in ("wrong", "missing", "duplicates"):
            typer.echo(f"{name}\t{done[name]}\t{out}/*/{name}.csv")
        return
    rows = f"rows.{format}"
    for name in (WRONG, MISSING, DUPLICATES, rows, PAGE):
        check_output("--out", out / name, inputs=spec_files(pairs))
    data = read_named(pairs, split, default="train", on_error=on_error)
    pictures = None if photos is None else load_pictures(photos, data.image_ids, on_error=on_error)
    scorer = load_scorer(run, device=device)
    with PhotoProgress("comparing", show=True) as bar:
        report = audit_pairs(scorer, data, top=top, min_grade=min_grade, progress=bar)
    least, usual = report.min_grade, report.usual_grade
    if not report.missing and least is not None and usual is not None and least > usual:
        reached = f"three of four labelled pairs reach {usual:.2g}"
        typer.echo(f"no missing match reaches grade {least:g}; {reached} — lower --min-grade", err=True)
    if report.wrong_count is not None:
        typer.echo(f"wrong captions of {report.labelled:,}: {report.wrong_count}", err=True)
    title, lines = f"{short_spec(pairs)}, {data.split}", caption_lines(parse_spec(pairs))
    model = f"{run.name}, vacsr {__version__}"
    write_audit(out, report, data, title=title, photos=pictures, lines=lines, model=model, table=format)
    lists = {WRONG: report.wrong, MISSING: report.missing, DUPLICATES: report.duplicates, rows: data, PAGE: data}
    for name, listed in lists.items():
        typer.echo(f"{'page' if name == PAGE else Path(name).stem}\t{len(listed)}\t{out / name}")


def filter(
    run: RunFolder,
    pairs: Annotated[str, typer.Option(metavar="SPEC", help="The data to clean; see docs/data.md.")],
    out: Annotated[
        Path, typer.Option(help="FILE.csv, FILE.parquet, a folder for shards; embeddings: FILE.safetensors.")
    ],
    keep: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Keep this share of the captions, the least suspected: 0.3 or 30%."),
    ] = None,
    max_wrong: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Keep as many as leave at most this share wrong: 5% or 0.05.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split to clean; default: the SPEC's, train or all.")] = None,
    skip: Skip = False,
    device: Device = "auto",
    ray: Ray = None,
) -> None:
    """Write your data without the captions that are probably wrong."""
    from vacsr.data import read_named
    from vacsr.data.formats import OnError, spec_files
    from vacsr.files import check_output
    from vacsr.progress import PhotoProgress
    from vacsr.search.audit import audit as audit_pairs
    from vacsr.search.filter import check_share, check_target, choose_captions, parse_share, write_pairs

    share = None if keep is None else parse_share("--keep", keep)
    most = None if max_wrong is None else parse_share("--max-wrong", max_wrong)
    check_share(share, most)
    on_error: OnError = "skip" if skip else "fail"
    if ray is not None:
        from vacsr.scale import audit_task, connected, cut_parts, keep_task, parts_of

        parts, task = parts_of(pairs, out), partial(audit_task, run, split, on_error, device, top=1, min_grade=None)
        with connected(ray):
            over_parts(task, parts, out / "audit", ray=ray, device=device)
            parts = cut_parts(parts, out, keep=share, max_wrong=most)
            done = over_parts(partial(keep_task, split, on_error), parts, out, ray=ray, device="cpu")
        typer.echo(f"about {done['wrong']:,.0f} of the {done['captions']:,} captions are wrong", err=True)
        typer.echo(f"kept\t{done['captions']}\t{f'features:{out}' if 'features:' in pairs else f'shards:{out}/*.tar'}")
        return
    if out.suffix:
        check_output("--out", out, inputs=spec_files(pairs))
    data = read_named(pairs, split, default="train", on_error=on_error)
    check_target(data, out)
    scorer = load_scorer(run, device=device)
    with PhotoProgress("comparing", show=True) as bar:
        report = audit_pairs(scorer, data, top=1, progress=bar)
    kept = choose_captions(report.rows, keep=share, max_wrong=most)
    wrong = float(report.rows.wrong_probability[kept].sum())
    spec = write_pairs(data.subset_captions(kept), out)
    if wrong == wrong:
        typer.echo(
            f"about {wrong:,.0f} of the {len(kept):,} captions are wrong; {report.labelled:,} were checked", err=True
        )
    typer.echo(f"kept\t{len(kept)}\t{spec}")
