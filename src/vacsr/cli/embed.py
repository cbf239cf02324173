"""`vacsr embed`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from vacsr.cli.options import Device, Ray, Skip, Workers, over_parts, resumable
from vacsr.errors import UsageError


def embed(
    backbone: Annotated[str, typer.Option(metavar="SPEC", help="clip:ID_OR_FOLDER or towers:IMAGE,TEXT.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The .safetensors file to write; with --ray, a folder.")],
    pairs: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Photos and captions, e.g. folder:DIR or csv:FILE.")
    ] = None,
    captions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Captions alone: lines of a .txt file, or a table of pairs.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Only this split; default: all, with each image's split.")] = None,
    pooling: Annotated[
        Literal["auto", "cls", "mean"], typer.Option(help="From tokens to a vector; auto: as the model was trained.")
    ] = "auto",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A=B", help="Change a backbone field, e.g. resize=center.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write float32 instead of float16.")] = False,
    skip: Skip = False,
    workers: Workers = 0,
    device: Device = "auto",
    ray: Ray = None,
) -> None:
    """Embed photos and captions once, to train on the cached features.

    Ctrl-C is safe: run the same command again to continue.

    With --captions instead of --pairs, texts alone are embedded, for `vacsr evaluate --captions`.
    """
    import torch

    from vacsr.config import BackboneConfig
    from vacsr.config.io import merge, parse, parse_overrides
    from vacsr.data.formats import OnError, spec_files
    from vacsr.embed import captions_path, embed_captions, embed_pairs, embedding_config
    from vacsr.evaluate.pair_files import read_caption_list
    from vacsr.files import check_output
    from vacsr.progress import PhotoProgress

    if (pairs is None) == (captions is None) or (ray and captions):
        raise UsageError(
            "embed takes either --pairs or --captions, and --ray with --pairs — e.g. --pairs folder:photos"
        )
    towers = [Path(text).expanduser() for text in backbone.partition(":")[2].split(",") if text]
    for path in () if ray else (out, captions_path(out)):
        check_output("--out", path, inputs=[*spec_files(pairs), *towers, *([captions] if captions else [])])
    base = embedding_config(backbone, pooling=pooling)
    config = parse(BackboneConfig, merge(base.model_dump(mode="json"), parse_overrides(overrides or [])))
    dtype = torch.float32 if full else torch.float16
    on_error: OnError = "skip" if skip else "fail"
    if ray is not None and pairs is not None:
        from vacsr.scale import embed_task, parts_of

        task = partial(embed_task, config, split, on_error, device, pooling=pooling, dtype=dtype, workers=workers)
        over_parts(task, parts_of(pairs, out), out, ray=ray, device=device)
        typer.echo(f"features:{out}")
        return
    if pairs is None:
        assert captions is not None, "checked above"
        words = read_caption_list(captions)
        with resumable(PhotoProgress("reading", show=True)) as bar:
            embed_captions(config, words, out, pooling=pooling, dtype=dtype, device=device, progress=bar.named)
        typer.echo(f"embedded {len(words):,} captions", err=True)
        typer.echo(out)
        return
    with resumable(PhotoProgress("reading", show=True)) as bar:
        result = embed_pairs(
            config, pairs, out,
            split=split, pooling=pooling, dtype=dtype, device=device,
            workers=workers, on_error=on_error, progress=bar.named,
        )  # fmt: skip
    skipped = f", skipped {len(result.skipped):,}" if result.skipped else ""
    typer.echo(f"embedded {result.images:,} photos and {result.captions:,} captions{skipped}", err=True)
    typer.echo(result.spec)
