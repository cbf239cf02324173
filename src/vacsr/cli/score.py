"""`vacsr score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import run_pairs

_ONE_CELL = str.maketrans(dict.fromkeys("\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))
"""Tabs and line breaks as spaces, so that a cell of a table stays one."""


def score(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    image: Annotated[str, typer.Option(help="A photo's path; an image id where the model reads embeddings.")],
    text: Annotated[
        list[str], typer.Option(help="Any words; a caption id or exact words where it reads embeddings. Repeatable.")
    ],
    pairs: Annotated[
        str | None, typer.Option(help="SPEC in which image and text are ids; default for embeddings: the run's.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Grade image-text pairs: score, grade in 0–1 and uncertainty, tab-separated.

    A model with towers takes any photo and any words; one on embeddings takes those of its data.
    """
    from vacsr.cli.lookup import score_named, score_photo
    from vacsr.data import load_pairs
    from vacsr.scoring import PairScorer

    scorer = PairScorer.from_pretrained(run, device=device)
    if scorer.model.has_towers and pairs is None:
        found = score_photo(scorer, image=image, texts=text)
    else:
        found = score_named(scorer, load_pairs(pairs or run_pairs(run), split="all"), image=image, texts=text)
    lines = [("image", "text", "score", "grade", "uncertainty"), *found]
    typer.echo("\n".join("\t".join(cell.translate(_ONE_CELL) for cell in line) for line in lines))
