"""`vacsr bench roofline`: time, share of the best matrix product and memory, over d, sizes, decoders and precisions.

The ceiling is the best rate that ``torch.mm`` sustains in bfloat16 in the same run: the trunk's own products, and large
square ones. Below it are the kernel, folded scoring in plain torch, the same compiled, and the dot product alone.
"""

from __future__ import annotations

import io
import json
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vacsr.adapter import AdapterConfig
from vacsr.bench import BenchResult, Log, Prepared, Way, describe_device, measure
from vacsr.bench.scoring import Problem, bare_product, matrix, repeated_product
from vacsr.errors import UsageError
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
SIZES = {"small": ((4, 500), (16, 2500)), "coco": ((1000, 5000), (2500, 12_500), (5000, 25_000))}
DIMS = (256, 512, 1024)
TRUNK, SQUARES, DOT = "torch.mm: the trunk's products", "torch.mm: square products", "dot product alone"
COLUMNS = {
    "way": "way", "decoder": "decoder", "precision": "precision", "d": "d", "pairs": "pairs", "seconds": "seconds",
    "tflops": "TFLOP/s", "share": "share of the best torch.mm", "mib": "peak MiB", "error": "error / spread",
}  # fmt: skip
_TILE = (4, 2500)  # images and texts of a compiled tile; 2,500 divides the texts of every size on a GPU
_BF16 = torch.bfloat16


def run(
    device: torch.device, *, size: str | None = None, dims: Sequence[int] = DIMS, log: Log = lambda _: None
) -> Roofline:
    """Every way on random weights, all in turn; the default size is ``coco`` on a GPU, ``small`` elsewhere."""
    sizes = SIZES[size or ("coco" if device.type == "cuda" else "small")]
    with torch.inference_mode(), sampled(device) as samples:
        every = [_way(SQUARES, partial(square_products, 8192 if device.type == "cuda" else 1024, device))]
        every += [way for dim in dims for pair in sizes for way in ways(*pair, dim, device, first=pair == sizes[0])]
        rows = measure(every, device=device, log=log, rounds=3, statistic=statistics.median)
    best = max((row["tflops"] for row in rows if row["way"] in (TRUNK, SQUARES) and "tflops" in row), default=None)
    for row in rows:
        if best and "tflops" in row and row["way"] != DOT:
            row["share"] = row["tflops"] / best
    notes = ["Medians of three rounds, all ways in turn.", *(f"{name}: {value}." for name, value in samples.items())]
    return Roofline("roofline", describe_device(device), {"best TFLOP/s": best}, rows, COLUMNS, notes)


def ways(images: int, texts: int, dim: int, device: torch.device, *, first: bool) -> Iterator[Way]:
    """Of one size; float32 of the ``first`` only, where it is quick."""
    base = Problem(images, texts, dim, device=device)
    problems = {name: _like(base, dim, config) for name, config in DECODERS.items()}
    way = partial(_way, d=dim, images=images, texts=texts, pairs=images * texts, device=device)
    yield way(TRUNK, partial(bare_product, base, _BF16))
    yield way(DOT, partial(repeated_product, base.v.mean.to(_BF16), base.t.mean.to(_BF16).T, times=1))
    kernel = device.type == "cuda" and available(device)
    for name, problem in problems.items():
        engine = partial(matrix, problem, KernelScorer if kernel else BlockScorer)
        yield way("kernel" if kernel else "folded torch", partial(engine, _BF16), decoder=name)
        if kernel and name != LINEAR:
            yield way("kernel", partial(engine, FP8), decoder=name, precision="float8")
    plain, way = partial(matrix, problems[COSINE], BlockScorer), partial(way, decoder=COSINE)
    if kernel:
        yield way("folded torch", partial(plain, _BF16))
        yield way("torch.compile", partial(compiled, problems[COSINE]))
    if first:
        yield way("folded torch", partial(plain, torch.float32), precision="float32")
    if first and kernel:
        yield way("folded torch", lambda: _in_tf32(plain(torch.float32)), precision="tf32")


def _way(
    name: str, prepare: Callable[[], Prepared], *, decoder: str = "–", precision: str = "bfloat16",
    device: torch.device | None = None, **sizes: int,
) -> Way:  # fmt: skip
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


def _like(base: Problem, dim: int, config: AdapterConfig) -> Problem:
    """The same vectors with another decoder."""
    made = Problem(1, 1, dim, device=base.device, adapter=config)
    made.v, made.t, made.operations = base.v, base.t, base.operations
    return made


def _in_tf32(ready: Prepared) -> Prepared:
    def run() -> object:
        with matmul_precision("tf32"):
            return ready.run()

    return ready._replace(run=run)


def square_products(edge: int, device: torch.device) -> Prepared:
    """Products of edge³ in bfloat16, back to back for about a fifth of a second: the rate that the machine sustains."""
    left, right = (torch.randn(edge, edge, device=device).to(_BF16) for _ in range(2))
    return repeated_product(left, right, times=100 if device.type == "cuda" else 20)


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


@contextmanager
def sampled(device: torch.device) -> Iterator[dict[str, str]]:
    """Clocks and power of the GPU once a second meanwhile: lowest to median to highest. Empty without nvidia-smi."""
    result: dict[str, str] = {}
    command = ["nvidia-smi", f"--id={device.index or 0}", "--query-gpu=clocks.sm,power.draw", "-lms", "1000"]
    try:
        watch = subprocess.Popen([*command, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True)
    except OSError:
        watch = None
    try:
        yield result
    finally:
        if watch is not None:
            watch.terminate()
            found = re.findall(r"^([\d.]+), ([\d.]+)$", watch.communicate()[0], re.MULTILINE)
            for name, column in zip(("SM clock, MHz", "power, W"), zip(*found, strict=True), strict=False):
                values = [float(value) for value in column]
                result[name] = " to ".join(f"{x:.0f}" for x in (min(values), statistics.median(values), max(values)))


def read(path: Path) -> Roofline:
    """A result that was written as JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        known = {key: data[key] for key in ("bench", "where", "settings", "rows", "notes")}
    except (OSError, ValueError, KeyError) as error:
        message = f"{path} is no result of a bench: {error!r}"
        raise UsageError(f"{message} — give a file written by: vacsr bench roofline --json FILE") from error
    return Roofline(**known, columns=COLUMNS)


class Roofline(BenchResult):
    """Drawn over d and over the number of pairs."""

    def to_svg(self) -> str:
        """Three plots, one above the other: share of the best torch.mm over d, time and memory over pairs."""
        import matplotlib
        from matplotlib.figure import Figure

        largest = max((row.get("pairs") or 0 for row in self.rows), default=0)
        wide = max((row.get("d") or 0 for row in self.rows), default=0)
        plots = [
            ("d", "share", f"share of the best torch.mm, {largest:,} pairs", {"pairs": largest}, "linear"),
            ("pairs", "seconds", f"seconds, d={wide:,}", {"d": wide}, "log"),
            ("pairs", "mib", f"peak memory in MiB, d={wide:,}", {"d": wide}, "log"),
        ]
        shown = [plot for plot in plots if any(row.get(plot[1]) for row in self.rows)]
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "vacsr", "font.size": 9}):
            figure = Figure(figsize=(4.8, 2.9 * len(shown) + 1), layout="constrained")
            every = figure.subplots(len(shown) or 1, squeeze=False)[:, 0]
            for axes, (x, y, title, chosen, scale) in zip(every, shown, strict=False):
                axes.set(xscale="log", yscale=scale, title=title, xlabel=x)
                self._draw(axes, x, y, [row for row in self.rows if chosen.items() <= row.items()])
                axes.set_ylim(bottom=0 if scale == "linear" else None)
            names = {name: line for axes in every for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
            figure.legend(names.values(), names.keys(), loc="outside lower left", fontsize=8, frameon=False)
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()

    def _draw(self, axes: Any, x: str, y: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A line per way, decoder and precision; colours by name, so that they are the same in every plot."""
        from vacsr.pages.plots import palette

        names = list(dict.fromkeys(_name(row) for row in self.rows))
        hues = [palette()[name] for name in ("vacsr", "infonce", "sigmoid", *(f"hue-{n}" for n in range(1, 9)))]
        for name in names:
            points = sorted((row[x], row[y]) for row in rows if _name(row) == name and row.get(y))
            if points:
                colour, dashes = hues[names.index(name) % len(hues)], "-" if name.endswith("bfloat16") else "--"
                axes.plot(*zip(*points, strict=True), dashes, marker="o", markersize=4, color=colour, label=name)
        axes.set_xticks(ticks := sorted({row[x] for row in rows if row.get(y)}), [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)


def _name(row: Mapping[str, Any]) -> str:
    return ", ".join(str(row[key]) for key in ("way", "decoder", "precision") if row[key] != "–")
