"""`vacsr compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Overrides
from vacsr.errors import UsageError


def compare(
    table: Annotated[Path, typer.Argument(help="A table, e.g. tables/retrieval.yaml.", metavar="TABLE.yaml")],
    overrides: Overrides = None,
    layers: Annotated[
        list[Path] | None,
        typer.Option(
            "--with", metavar="FILE", help="Lay a file's fields over the table's, e.g. tables/parts/coco.yaml."
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N", help="Comma-separated, instead of the table's; e.g. 0,1,2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the table; default runs/TABLE.")] = None,
    runs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of run folders, which tables may share; default --out.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Worker processes; several may share a GPU.")] = 1,
    row: Annotated[
        list[str] | None, typer.Option(metavar="ROW", help="Run only these rows; repeatable. All finished are shown.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="ROW", help="Also print every row's difference from this one, in standard errors too."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete runs of another recipe and start them again.")] = False,
    only_collect: Annotated[bool, typer.Option("--only-collect", help="Run nothing; take what is finished.")] = False,
    stored: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Draw the table from a results.json, without runs.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Also write page.html: figures, and photos with answers.")
    ] = False,
    form: Annotated[str, typer.Option("--format", help="What is printed: md, csv, latex or html.")] = "md",
) -> None:
    """Run methods × settings × seeds; finished cells are kept, so the same command goes on where it stopped."""
    from vacsr.compare import compare as run_table
    from vacsr.compare import read_table, redraw
    from vacsr.report.formats import FORMATS

    if form not in FORMATS:
        raise UsageError(f"--format {form} — choose one of: {', '.join(FORMATS)}")
    folder = out or Path("runs") / table.stem
    chosen = _numbers(seeds) if seeds is not None else []
    plan = read_table(table, overrides or [], layers=layers or [])
    if against is not None and against not in {variant.name for variant in plan.rows}:
        raise UsageError(f"no row '{against}' — the table has: {', '.join(variant.name for variant in plan.rows)}")
    if stored is not None:
        if chosen or runs or row or fresh or only_collect or jobs > 1:
            raise UsageError(
                "--from draws stored figures and runs nothing — leave out --seeds, --runs, --jobs, --row, --fresh "
                "and --only-collect"
            )
        result = redraw(plan, stored, out, page=page)
    else:
        result = run_table(
            plan, folder,
            runs=runs, seeds=chosen, jobs=jobs, rows=row or [], fresh=fresh, only_collect=only_collect, page=page,
        )  # fmt: skip
    typer.echo(FORMATS[form](result))
    if against is not None:
        typer.echo(result.differences(against))


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds '{text}', expected whole numbers — type e.g. --seeds 0,1,2") from error
