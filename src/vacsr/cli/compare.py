"""`vacsr compare`, and `vacsr demo`, which is a comparison with a page."""

from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Overrides
from vacsr.errors import UsageError


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the models, the table and the page.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the pictures and of training.")] = 0,
) -> None:
    """Train infonce, sigmoid and vacsr on generated pictures, whose true matches are all known, and compare them.

    Takes about a minute of processor time. Prints a table; OUT/index.html shows search results, an audit and plots.
    """
    import torch

    from vacsr.demo import run_demo

    torch.set_num_threads(1)  # 70 s of processor time; two threads on busy cores took over six times as much
    typer.echo(run_demo(out, seed=seed))


TableFile = Annotated[Path, typer.Argument(help="A table, e.g. tables/retrieval.yaml.", metavar="TABLE.yaml")]
Layers = Annotated[
    list[Path] | None, typer.Option("--with", metavar="FILE", help="Override the table's fields with this file's.")
]
Seeds = Annotated[str | None, typer.Option(metavar="N,N", help="Seeds instead of the table's, e.g. 0,1,2.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the table; default: runs/TABLE.")]
Runs = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the runs, if tables share them.")]
Jobs = Annotated[int, typer.Option(min=1, help="Worker processes; several may share a GPU.")]
Rows = Annotated[list[str] | None, typer.Option(metavar="ROW", help="Run only this row, show all finished ones.")]
Settings = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Run only this setting, show all finished.")]
Against = Annotated[str | None, typer.Option(metavar="ROW", help="Also print every row's difference from this one.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete and rerun cells of another recipe or other data.")]
OnlyCollect = Annotated[bool, typer.Option("--only-collect", help="Run nothing; collect the finished cells.")]
Stored = Annotated[Path | None, typer.Option("--from", metavar="FILE", help="Use a results.json and run nothing.")]
Page = Annotated[bool, typer.Option("--page", help="Also write page.html, with plots and example answers.")]
Format = Annotated[str, typer.Option("--format", help="Output format: md, csv, latex or html.")]


def compare(
    table: TableFile,
    overrides: Overrides = None,
    layers: Layers = None,
    seeds: Seeds = None,
    out: Out = None,
    runs: Runs = None,
    jobs: Jobs = 1,
    row: Rows = None,
    setting: Settings = None,
    against: Against = None,
    fresh: Fresh = False,
    only_collect: OnlyCollect = False,
    stored: Stored = None,
    page: Page = False,
    form: Format = "md",
) -> None:
    """Compare methods: run rows × settings × seeds and collect one table.

    To continue after a stop, run the same command again: finished cells are kept.
    """
    from vacsr.compare import compare as run_table
    from vacsr.compare import read_table, redraw
    from vacsr.compare.formats import FORMATS, differences_to_markdown

    if form not in FORMATS:
        raise UsageError(f"--format {form} — choose one of: {', '.join(FORMATS)}")
    plan = read_table(table, overrides or [], layers=layers or [])
    names = [variant.name for variant in plan.rows]
    if against is not None and against not in names:
        raise UsageError(f"no row '{against}' — the table has: {', '.join(names)}")
    if stored is None:
        result = run_table(
            plan, out or Path("runs") / table.stem,
            seeds=_numbers(seeds), runs=runs, jobs=jobs, rows=tuple(row or ()),
            settings=tuple(setting or ()), fresh=fresh, only_collect=only_collect, page=page,
        )  # fmt: skip
    elif seeds is not None or runs or jobs > 1 or row or setting or fresh or only_collect:
        options = "--seeds, --runs, --jobs, --row, --setting, --fresh and --only-collect"
        raise UsageError(f"--from only reads stored results — leave out {options}")
    else:
        result = redraw(plan, stored, out, page=page)
    typer.echo(FORMATS[form](result), nl=False)
    if against is not None and form == "md":
        typer.echo(f"\n{differences_to_markdown(result, against)}", nl=False)
    elif against is not None:  # Markdown, which would spoil the table for a program that reads it
        typer.echo(differences_to_markdown(result, against), nl=False, err=True)
    if page and (folder := out or (Path("runs") / table.stem if stored is None else None)):
        typer.echo(f"{folder}/page.html", err=True)


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--seeds '{text}', expected whole numbers — type e.g. --seeds 0,1,2") from error
