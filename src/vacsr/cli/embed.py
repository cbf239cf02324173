"""`vacsr embed`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import spec_files


class PoolingChoice(StrEnum):
    """How tokens become one vector."""

    AUTO = "auto"
    CLS = "cls"
    MEAN = "mean"


def embed(
    backbone: Annotated[str, typer.Option(help="clip:ID_OR_FOLDER or towers:IMAGE,TEXT.", metavar="SPEC")],
    pairs: Annotated[
        str, typer.Option(help="Photos and captions: folder:DIR, csv:FILE, flickr8k:DIR, coco:DIR, …", metavar="SPEC")
    ],
    out: Annotated[Path, typer.Option(help="Where the features go, a .safetensors file.", metavar="FILE")],
    split: Annotated[str | None, typer.Option(help="Only this split; default: all, with the splits noted.")] = None,
    pooling: Annotated[
        PoolingChoice, typer.Option(help="Tokens to one vector: class token or mean; auto as the towers are used to.")
    ] = PoolingChoice.AUTO,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="Change a field of the backbone, e.g. --set resize=center."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write float32 instead of float16.")] = False,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out what cannot be read instead of stopping.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Threads that decode photos; 0 for one per core.")] = 0,
    device: Device = "auto",
) -> None:
    """Embed photos and captions once, with ids and provenance; the same command goes on where it stopped."""
    import torch

    from vacsr.config import BackboneConfig
    from vacsr.config.io import merge, parse, parse_overrides
    from vacsr.embed import captions_path, embed_pairs, embedding_config
    from vacsr.files import check_output
    from vacsr.progress import PhotoProgress

    towers = [Path(text).expanduser() for text in backbone.partition(":")[2].split(",") if text]
    for path in (out, captions_path(out)):
        check_output("--out", path, inputs=[*spec_files(pairs), *towers])
    base = embedding_config(backbone, pooling=pooling.value)
    config = parse(BackboneConfig, merge(base.model_dump(mode="json"), parse_overrides(overrides or [])))
    with PhotoProgress("reading", show=True) as bar:
        result = embed_pairs(
            config, pairs, out,
            split=split, pooling=pooling.value, dtype=torch.float32 if full else torch.float16, device=device,
            workers=workers, on_error="skip" if skip else "fail", progress=bar.named,
        )  # fmt: skip
    skipped = f", {len(result.skipped):,} left out" if result.skipped else ""
    typer.echo(f"embedded {result.images:,} photos and {result.captions:,} captions{skipped}", err=True)
    typer.echo(result.spec)
