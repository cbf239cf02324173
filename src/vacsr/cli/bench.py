"""`vacsr bench`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vacsr.cli.options import Device


class Bench(StrEnum):
    """What is timed."""

    SCORING = "scoring"
    TRAINING = "training"
    METRICS = "metrics"


class BenchSize(StrEnum):
    """How much of it."""

    SMALL = "small"
    COCO = "coco"


def bench(
    what: Annotated[
        Bench, typer.Argument(metavar="scoring|training|metrics", help="What to time.", show_default=False)
    ],
    size: Annotated[
        BenchSize | None,
        typer.Option(help="small, or coco for the size of COCO's test list; default: coco on a GPU, except metrics."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the numbers as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Also plot them, as SVG.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's threads on a CPU; default: torch's own.")] = None,
    device: Device = "auto",
) -> None:
    """Time several ways to the same result, side by side in one run, on random data.

    scoring: the bare product, the paper's way, folded scoring, the kernel. training: the loss dense, in strips, and the
    sigmoid loss, over batch sizes. metrics: vacsr, eccv_caption and torchmetrics.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, which counts memory, talks on stderr
    import torch

    from vacsr.bench import run_bench
    from vacsr.files import write_json, write_text
    from vacsr.scoring import choose_device

    _check_files(json, figure)
    if threads is not None:
        torch.set_num_threads(threads)
    result = run_bench(
        what.value,
        device=choose_device(device),
        size=None if size is None else size.value,
        log=lambda what: typer.echo(f"timing {what}", err=True),
    )
    typer.echo(result.to_markdown())
    if json is not None:
        write_json(json, result.to_json())
    if figure is not None:
        write_text(figure, result.to_svg())


def _check_files(json: Path | None, figure: Path | None) -> None:
    """Before minutes of timing: can both files be written?"""
    from vacsr.errors import UsageError
    from vacsr.files import check_output

    for option, path in (("--json", json), ("--figure", figure)):
        if path is None:
            continue
        check_output(option, path)
        if option == "--figure" and path.suffix.lower() != ".svg":
            raise UsageError(f"--figure {path}: plots are SVG files — name it {path.with_suffix('.svg')}")
    if json is not None and figure is not None and os.path.realpath(json) == os.path.realpath(figure):
        raise UsageError(f"--json and --figure both name {json} — give each its own file")
