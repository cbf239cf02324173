"""`vacsr bench roofline`: time, share of the best matrix product and memory, over d, sizes, decoders and precisions.

The ceiling is the best rate that ``torch.mm`` sustains in bfloat16 in the same run. Below it are the kernel, folded
scoring in plain torch, the same compiled, and the dot product alone.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vacsr.adapter import AdapterConfig
from vacsr.bench import BenchResult, Log, Prepared, Way, describe_device, measure, svg_drawing
from vacsr.bench.scoring import Problem, bare_product, matrix, repeated_product
from vacsr.scoring import BlockScorer
from vacsr.scoring.folded import FP8
from vacsr.scoring.kernel import KernelScorer, available
from vacsr.train.step import matmul_precision

LINEAR, WIDE, COSINE = "linear", "16-wide", "16-wide + cosine"
DECODERS = {
    LINEAR: AdapterConfig(decoder_hidden=0, residual="none"),
    WIDE: AdapterConfig(decoder_hidden=16, residual="none"),
    COSINE: AdapterConfig(decoder_hidden=16, residual="cosine"),
}
SIZES = {"small": ((4, 500), (16, 5000)), "coco": ((1000, 5000), (2500, 10_000), (5000, 25_000))}
DIMS = (256, 512, 1024)
TRUNK, SQUARES, DOT = "torch.mm: the trunk's products", "torch.mm: square products", "dot product alone"
COLUMNS = {
    "way": "way", "decoder": "decoder", "precision": "precision", "d": "d", "pairs": "pairs", "seconds": "seconds",
    "tflops": "TFLOP/s", "share": "share of the best torch.mm", "mib": "peak MiB", "error": "error / spread",
}  # fmt: skip
_TILE = (4, 5000)  # images and texts of a compiled tile; 5,000 divides the texts of every size on a GPU
_BF16 = torch.bfloat16


def run(
    device: torch.device, *, size: str | None = None, dims: Sequence[int] = DIMS, log: Log = lambda _: None
) -> Roofline:
    """Every way on random weights, all in turn; the default size is ``coco`` on a GPU, ``small`` elsewhere."""
    gpu = device.type == "cuda"
    sizes = SIZES[size or ("coco" if gpu else "small")]
    squares = partial(square_products, device, edge=8192 if gpu else 1024, times=100 if gpu else 20)
    with torch.inference_mode():
        every = [_way(SQUARES, squares), *(way for dim in dims for pair in sizes for way in ways(*pair, dim, device))]
        rows = measure(every, device=device, log=log, rounds=3, statistic=statistics.median if gpu else min)
        notes = [
            "Three rounds, all ways in turn: the fastest, on a GPU the median.",
            *(gpu_state(squares(), f"GPU-{torch.cuda.get_device_properties(device).uuid}") if gpu else []),
        ]
    best = max((row["tflops"] for row in rows if row["way"] in (TRUNK, SQUARES) and "tflops" in row), default=None)
    for row in rows:
        if best and "tflops" in row and row["way"] != DOT:
            row["share"] = row["tflops"] / best
    return Roofline("roofline", describe_device(device), {"best TFLOP/s": best}, rows, COLUMNS, notes)


def ways(images: int, texts: int, dim: int, device: torch.device) -> Iterator[Way]:
    """Of one size. float32 only where it is quick."""
    problems = {name: Problem(images, texts, dim, device=device, adapter=config) for name, config in DECODERS.items()}
    last, kernel = problems[COSINE], device.type == "cuda" and available(device)
    way = partial(_way, d=dim, images=images, texts=texts, pairs=images * texts, device=device)
    yield way(TRUNK, partial(bare_product, last, _BF16))
    yield way(DOT, partial(repeated_product, last.v.mean.to(_BF16), last.t.mean.to(_BF16).T, times=1))
    for name, problem in problems.items():
        if kernel:
            yield way("kernel", partial(matrix, problem, KernelScorer, _BF16), decoder=name)
        if kernel and name != LINEAR:
            yield way("kernel", partial(matrix, problem, KernelScorer, FP8), decoder=name, precision="float8")
        if not kernel or name == COSINE:
            yield way("folded torch", partial(matrix, problem, BlockScorer, _BF16), decoder=name)
    if kernel:
        yield way("torch.compile", partial(compiled, last), decoder=COSINE)
    if images * texts <= SIZES["coco"][0][0] * SIZES["coco"][0][1]:
        for precision in ("fp32", "tf32") if kernel else ("fp32",):
            prepare = partial(matrix, last, BlockScorer, torch.float32)
            yield way("folded torch", partial(_with, precision, prepare), decoder=COSINE, precision=precision)


def _way(
    name: str, prepare: Callable[[], Prepared], *, decoder: str = "–", precision: str = "bf16",
    device: torch.device | None = None, **sizes: int,
) -> Way:  # fmt: skip
    """On a GPU with the memory that it allocates."""

    def prepared() -> Prepared:
        ready = prepare()
        if device is None or device.type != "cuda":
            return ready
        ready.run()  # compiles, and loads what stays
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        ready.run()
        peak = torch.cuda.max_memory_allocated(device) - before
        return ready._replace(cells={**(ready.cells or {}), "mib": peak / 2**20})

    return Way({"way": name, "decoder": decoder, "precision": precision, **sizes}, prepared)


def _with(precision: str, prepare: Callable[[], Prepared]) -> Prepared:
    ready = prepare()
    return ready._replace(run=matmul_precision(precision)(ready.run))


def square_products(device: torch.device, *, edge: int, times: int) -> Prepared:
    """Products of edge³ in bfloat16, back to back: the rate that the machine sustains."""
    left, right = (torch.randn(edge, edge, device=device).to(_BF16) for _ in range(2))
    return repeated_product(left, right, times=times)


def compiled(problem: Problem) -> Prepared:
    """The folded logits of tiles, compiled."""
    v, t, (rows, columns) = problem.v.mean, problem.t.mean, _TILE
    tile = torch.compile(problem.method.adapter.fold().to(problem.device, _BF16).logits, dynamic=False)

    def run() -> Tensor:
        out = torch.empty(len(v), len(t), device=problem.device)
        for i in range(0, len(v), rows):
            for j in range(0, len(t), columns):
                out[i : i + rows, j : j + columns] = tile(v[i : i + rows], t[j : j + columns])
        return out

    return Prepared(run, operations=problem.operations)


def gpu_state(busy: Prepared, uuid: str) -> Iterator[str]:
    """Clock and power of a GPU while it multiplies; nothing without nvidia-smi."""
    command = [
        "nvidia-smi",
        f"--id={uuid}",
        "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit",
        "--format=csv",
    ]
    for _ in range(10):
        busy.run()  # returns at once: the GPU has work for two seconds
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        names, values = answer.stdout.strip().splitlines()
        yield f"While it multiplies squares: {names}: {values}."
    except (OSError, ValueError, subprocess.SubprocessError):
        yield "Clock and power are unknown: nvidia-smi does not answer."


class Roofline(BenchResult):
    """Drawn over d and over the number of pairs."""

    def to_svg(self) -> str:
        """Three plots, one above the other: share of the best torch.mm over d, time and memory over pairs."""
        pairs, dim = (max((row.get(key) or 0 for row in self.rows), default=0) for key in ("pairs", "d"))
        plots = [
            ("d", "share", f"share of the best torch.mm, {pairs:,} pairs", {"pairs": pairs}),
            ("pairs", "seconds", f"seconds, d={dim:,}", {"d": dim}),
            ("pairs", "mib", f"peak memory in MiB, d={dim:,}", {"d": dim}),
        ]
        shown = [plot for plot in plots if any(row.get(plot[1]) for row in self.rows)]
        with svg_drawing((4.8, 2.9 * len(shown) + 1.2)) as (figure, done):
            every = figure.subplots(len(shown) or 1, squeeze=False)[:, 0]
            for axes, (x, y, title, chosen) in zip(every, shown, strict=False):
                axes.set(xscale="log", yscale="linear" if y == "share" else "log", title=title, xlabel=x)
                self._draw(axes, x, y, [row for row in self.rows if chosen.items() <= row.items()])
            names = {name: line for axes in every for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
            figure.legend(names.values(), names.keys(), loc="outside lower left", fontsize=8, frameon=False)
        return done.getvalue()

    def _draw(self, axes: Any, x: str, y: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A line per way, decoder and precision, in the same colour in every plot."""
        from vacsr.pages.plots import palette

        hues = [palette()[name] for name in ("vacsr", "infonce", "sigmoid", *(f"hue-{n}" for n in range(1, 9)))]
        for number, name in enumerate(dict.fromkeys(map(_name, self.rows))):
            if points := sorted((row[x], row[y]) for row in rows if _name(row) == name and row.get(y)):
                style = {"color": hues[number % len(hues)], "linestyle": "-" if name.endswith("bf16") else "--"}
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
        axes.set_xticks(ticks := sorted({row[x] for row in rows if row.get(y)}), [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if y == "share":
            axes.set_ylim(bottom=0)


def _name(row: Mapping[str, Any]) -> str:
    return ", ".join(str(row[key]) for key in ("way", "decoder", "precision") if row[key] != "–")
