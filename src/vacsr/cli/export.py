"""`vacsr export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from vacsr.cli.options import RunFolder
from vacsr.errors import UsageError


def export(
    run: RunFolder,
    onnx: Annotated[Path | None, typer.Option("--onnx", metavar="FILE", help="The .onnx file to write.")] = None,
    torch_export: Annotated[
        Path | None, typer.Option("--torch-export", metavar="FILE", help="The .pt2 file to write.")
    ] = None,
    part: Annotated[
        Literal["pairs", "images", "texts", "scores"],
        typer.Option(help="pairs: inputs to scores; images, texts: inputs to vectors; scores: vectors to scores."),
    ] = "pairs",
) -> None:
    """Write a model as a graph that runs without vacsr, in onnxruntime or with torch.export.

    It takes features, or pixels (uint8 squares) and token ids (−1 after the end), and gives score, grade and
    uncertainty of all pairs. An ONNX file is checked with onnxruntime before it is written.
    """
    from vacsr.export import export_onnx, export_torch
    from vacsr.files import check_output
    from vacsr.model import load_model
    from vacsr.train.checkpoint import run_files

    wanted = (("--onnx", onnx, export_onnx), ("--torch-export", torch_export, export_torch))
    files = [(option, path, write) for option, path, write in wanted if path is not None]
    if not files:
        raise UsageError("nothing to write — add --onnx FILE or --torch-export FILE")
    for option, path, _ in files:
        check_output(option, path, inputs=run_files(run))
    model = load_model(run)
    for _, path, write in files:
        graph = write(model, path, part=part)
        takes = ", ".join(f"{name}: {one}" for name, one in graph.inputs(2, 3).items())
        typer.echo(f"{path} takes {takes}; gives {', '.join(graph.outputs)}", err=True)
        typer.echo(path)
