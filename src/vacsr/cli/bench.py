"""`vacsr doctor` and `vacsr bench`: what this machine has, and how fast it is."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from vacsr.cli.options import Device
from vacsr.errors import UsageError


def doctor() -> None:
    """Check this machine: Python, torch, GPU, optional extras and known problems."""
    from vacsr.doctor import run_checks

    findings = run_checks()
    for finding in findings:
        typer.echo(finding.line())
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(3)


def bench(
    what: Annotated[Literal["scoring", "roofline"], typer.Argument(help="What to time.", show_default=False)],
    size: Annotated[Literal["small", "coco"] | None, typer.Option(help="Default: coco on a GPU, else small.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the numbers as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", help="Also plot them, as SVG.")] = None,
    dims: Annotated[list[int] | None, typer.Option("--dim", min=1, help="d of roofline, as often as you like.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads on a CPU; default: torch's own number.")] = None,
    device: Device = "auto",
) -> None:
    """Time several ways to compute the same result, side by side, on random data.

    scoring: a bare matrix product, the paper's way, folded scoring, the kernel. roofline: time, share of the best
    matrix product and memory over d, sizes, decoders and precisions. Scripts for training steps and much else are
    in benchmarks/.
    """
    import torch

    from vacsr.bench import roofline, scoring
    from vacsr.files import check_output, write_json, write_text
    from vacsr.model import choose_device

    for option, path in (("--json", json), ("--figure", figure)):
        if path is not None:
            check_output(option, path)
    if figure is not None and figure.suffix.lower() != ".svg":
        raise UsageError(f"--figure {figure}: plots are SVG files — name it {figure.with_suffix('.svg')}")
    if json is not None and figure is not None and os.path.realpath(json) == os.path.realpath(figure):
        raise UsageError(f"--json and --figure both name {json} — give each its own file")
    if dims and what != "roofline":
        raise UsageError("--dim belongs to roofline — leave it out, or type: vacsr bench roofline")
    if threads is not None:
        torch.set_num_threads(threads)
    log = lambda name: typer.echo(f"timing {name}", err=True)  # noqa: E731
    run = partial(roofline.run, dims=dims or roofline.DIMS) if what == "roofline" else scoring.run
    result = run(choose_device(device), size=size, log=log)
    typer.echo(result.to_markdown())
    if json is not None:
        write_json(json, result.to_dict())
    if figure is not None:
        write_text(figure, result.to_svg())
