"""`vacsr index add|rm|info`."""

from __future__ import annotations

import time
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Device
from vacsr.errors import DataError

index = typer.Typer(help="Fill an index with a data set's images, remove images, look at it.", no_args_is_help=True)

Index = Annotated[str, typer.Argument(metavar="INDEX", help="exact:FOLDER, milvus:FILE.db or milvus:http://HOST:PORT.")]


class Stored(StrEnum):
    """How an exact index keeps vectors."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


@index.command()
def add(
    name: Index,
    run: Annotated[Path, typer.Option(help="A run folder or a model folder: its model embeds the images.")],
    pairs: Annotated[
        str, typer.Option(metavar="SPEC", help="The images: folder:DIR, csv:FILE, features:FILE, …; see docs/data.md.")
    ],
    split: Annotated[str | None, typer.Option(help="Only this split; default: all.")] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Images that are embedded, then stored for good, at a time.")
    ] = 1024,
    replace: Annotated[
        bool, typer.Option("--replace", help="Embed images that are there again; default: leave them.")
    ] = False,
    dtype: Annotated[
        Stored | None, typer.Option(help="Of a new exact index: float32, or float16, which takes half the room.")
    ] = None,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out what cannot be read instead of stopping.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Threads that decode photos; 0 for one per core.")] = 0,
    device: Device = "auto",
) -> None:
    """Embed images and add them to an index, making it if need be; the same command goes on where it stopped."""
    from vacsr.data import PhotoSet, load_pairs
    from vacsr.data.photos import check_photos, without
    from vacsr.scoring import PairScorer
    from vacsr.search import embedding_provenance, open_index
    from vacsr.search.filling import fill_index
    from vacsr.search.progress import FillProgress

    scorer = PairScorer.from_pretrained(run, device=device)
    data = load_pairs(pairs, split=split, on_error="skip" if skip else "fail")
    scorer.check_set(data)
    if skip and isinstance(data, PhotoSet):
        data = without(data, check_photos(data, workers=workers))
    opened = open_index(
        name, dim=scorer.model.dim, provenance=embedding_provenance(scorer.model), create=True,
        dtype=None if dtype is None else dtype.value,
    )  # fmt: skip
    started = time.perf_counter()
    with closing(opened):
        with FillProgress(total=len(data.image_ids)) as bar:
            done = fill_index(
                opened, scorer, data,
                source=pairs, batch=batch, replace=replace, workers=workers, committed=bar.committed,
            )  # fmt: skip
        total = len(opened)
    rate = done.embedded / max(time.perf_counter() - started, 1e-9)
    counts = f"added {done.added:,}, replaced {done.replaced:,}, left {done.skipped:,} that were there"
    typer.echo(f"{counts}; {rate:,.0f} images/s; {total:,} in the index", err=True)
    typer.echo(name)


@index.command()
def rm(
    name: Index,
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Of the images to remove.")],
) -> None:
    """Remove images from an index by their ids."""
    from vacsr.search import open_index

    with closing(open_index(name)) as opened:
        there = opened.known(ids)
        absent = [identity for identity, found in zip(ids, there, strict=True) if not found]
        if len(absent) == len(ids):
            raise DataError(f"{name} holds none of these ids, first {absent[0]!r} — nothing was removed; check the ids")
        removed = opened.delete(ids)
        left = len(opened)
    not_there = f", {len(absent):,} were not there, first {absent[0]!r}" if absent else ""
    typer.echo(f"removed {removed:,}{not_there}; {left:,} in the index", err=True)


@index.command()
def info(
    name: Index,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what an index holds: how many vectors, of which dimension, from which model."""
    from vacsr.files import json_text
    from vacsr.search import open_index

    with closing(open_index(name)) as opened:
        facts = opened.info()._asdict()
    if json:
        typer.echo(json_text({"schema": 1, **facts}), nl=False)
        return
    shown = {"bytes": "elsewhere" if facts["bytes"] is None else f"{facts['bytes']:,}"}
    for key, value in facts.items():
        typer.echo(f"{key:<11}{shown.get(key, f'{value:,}' if isinstance(value, int) else value)}")
