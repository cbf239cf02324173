"""`vacsr index add|rm|info`."""

import time
from contextlib import closing
from typing import Annotated, Any, Literal

import typer

from vacsr.cli.options import Command, Device, Group, IndexName, RunOption, Skip, Workers, load_scorer, resumable
from vacsr.errors import DataError, UsageError

index = typer.Typer(
    cls=Group, help="Fill an index with images or captions, remove items, show info.", no_args_is_help=True
)


@index.command(cls=Command, epilog="Example: vacsr index add exact:photos-index --run runs/mine --pairs photos/")
def add(
    name: IndexName,
    run: RunOption,
    pairs: Annotated[str, typer.Option(metavar="DIR|SPEC", help="A folder of photos, or a SPEC; see docs/data.md.")],
    split: Annotated[str | None, typer.Option(help="Only this split; default: all.")] = None,
    texts: Annotated[bool, typer.Option("--texts", help="Index the captions instead of the images.")] = False,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Items embedded and stored at a time; default: 128 photos, otherwise 1024."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Embed everything again, also unchanged items.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove items that are no longer in this SPEC.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Prune even if that removes more than half.")] = False,
    dtype: Annotated[
        Literal["float32", "float16"] | None, typer.Option(help="For a new exact index; float16 halves its size.")
    ] = None,
    skip: Skip = False,
    workers: Workers = 0,
    device: Device = "auto",
) -> None:
    """Embed images or captions into an index; create it if it is missing.

    A calibration that lies in the index is fitted again when the index has
    outgrown it.

    Ctrl-C is safe: run the same command again to continue.
    """
    from vacsr.data import PhotoSet, images_spec, load_images, load_pairs
    from vacsr.data.photos import without_unreadable
    from vacsr.progress import PhotoProgress
    from vacsr.search.fill import absolute_spec, fill_index
    from vacsr.search.index import calibration_paths, embedding_provenance, find_backend, open_index

    find_backend(name)  # before the model is loaded
    if yes and not prune:
        raise UsageError("--yes goes with --prune only — add --prune, or leave out --yes")
    pairs = pairs if texts else images_spec(pairs)
    data = (load_pairs if texts else load_images)(pairs, split=split, on_error="skip" if skip else "fail")
    scorer = load_scorer(run, device=device)
    scorer.check_set(data)
    if skip and not texts and isinstance(data, PhotoSet):
        data = without_unreadable(data, workers=workers)
    kind, source = "texts" if texts else "images", absolute_spec(pairs, split=split)
    opened = open_index(
        name, dim=scorer.model.dim, provenance=embedding_provenance(scorer.model, kind), create=True, dtype=dtype,
    )  # fmt: skip
    size = batch or (128 if isinstance(data, PhotoSet) and not texts else 1024)
    started = time.perf_counter()
    with closing(opened):
        with resumable(PhotoProgress(kind, show=True)) as bar:
            done = fill_index(
                opened, scorer, data,
                source=source, texts=texts, batch=size, replace=replace, prune=prune, sure=yes, workers=workers,
                committed=lambda done: bar(done.added + done.replaced + done.skipped, done.of),
            )  # fmt: skip
        total, seconds = len(opened), time.perf_counter() - started
        grown = ""
        if any(path.is_file() for path in calibration_paths(run, opened)):
            from vacsr.search.calibrate_run import follow_growth

            grown = follow_growth(run, scorer, opened)
    rate = (done.added + done.replaced) / max(seconds, 1e-9)
    counts = f"added {done.added:,}, replaced {done.replaced:,}, unchanged {done.skipped:,}"
    counts += f", removed {done.removed:,}" if prune else ""
    typer.echo(f"{counts}; {rate:,.0f} {kind}/s; {total:,} in the index", err=True)
    if grown:
        typer.echo(grown, err=True)
    typer.echo(name)


@index.command(cls=Command, epilog="Example: vacsr index rm exact:photos-index beach/0001.jpg")
def rm(name: IndexName, ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Ids to remove.")]) -> None:
    """Remove images or captions from an index by their ids."""
    from vacsr.search.index import open_index

    with closing(open_index(name)) as opened:
        absent = [name for name, known in zip(ids, opened.known(ids), strict=True) if not known]
        if len(absent) == len(ids):
            raise DataError(f"{name} holds none of these ids, first {absent[0]!r} — nothing was removed; check the ids")
        removed = opened.delete(ids)
        left = len(opened)
    unknown = f", {len(absent):,} were not found, first {absent[0]!r}" if absent else ""
    typer.echo(f"removed {removed:,}{unknown}; {left:,} in the index", err=True)


@index.command(cls=Command, epilog="Example: vacsr index info exact:photos-index")
def info(name: IndexName, json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show what an index holds: number of vectors, dimension, model and data."""
    from vacsr.files import json_text
    from vacsr.search.index import open_index

    with closing(open_index(name)) as opened:
        facts = opened.info()._asdict()
    if json:
        typer.echo(json_text({"schema": 1, **facts}), nl=False)
        return
    for key, value in facts.items():
        typer.echo(f"{key:<11}{_shown(value)}".rstrip())


def _shown(value: Any) -> str:
    """For a person: numbers with commas, one item of a list per line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return f"\n{'':<11}".join(value)
    return "elsewhere" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
