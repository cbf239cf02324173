"""Time and peak memory of the adapter's loss, dense and in strips of several heights, in and without CUDA graphs.

    python benchmarks/strip_training.py [--batches 1024,4096,16384:64] [--strips auto,16384] [--compile] [--check]
                                        [--modes graph,eager] [--ways fused] [--profile] [--json FILE]

Adapter only: the embeddings are random leaves, there are no towers and no optimiser. A step is loss and backward, and
``16384:64`` is one of the first 64 rows of 16,384 × 16,384 pairs, such as one rank has. The modes: ``graph``, the step
replayed as a CUDA graph; ``eager``, as it is. Strips of other sizes, in pairs, are timed for the first batch. All of a
batch are timed in turn. ``vs dense`` is the time of a pair over that of the first dense loss of the same way, ``ratio``
the time over that of the matrix products at the rate of one large product in the same run. Memory is CUDA's peak of
allocated bytes above what was held before the step.

``--check`` compares gradients with float64, ``--profile`` says where the time of the first batch goes. Clocks and power
are nvidia-smi's medians while the GPU is busy. Without a GPU a small run shows that it works.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from _common import adapter_flops, captured, log, parser, peak_gib, product_rate
from vacsr import kernels
from vacsr.bench import BenchResult, Prepared, Step, Way, describe_device, measure
from vacsr.files import write_json
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.objective import ObjectiveConfig, batch_block
from vacsr.strips import PairLoss, StripLoss, compile_pairs
from vacsr.train.step import matmul_precision

Row = dict[str, Any]
BATCHES = {"cuda": "1024,4096,16384:64", "cpu": "16,32:8"}
ITEM = {"fp32": 4, "tf32": 4, "bf16": 2}  # bytes
COLUMNS = {
    "batch": "B", "rows": "rows", "way": "loss", "mode": "mode", "ms": "ms a step", "ns": "ns a pair",
    "against": "vs dense", "peak_gib": "peak GiB", "ratio": "time / products",
}  # fmt: skip
SMI = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"]


class Case(NamedTuple):
    """One line of the table: a loss of the first rows of a batch."""

    batch: int
    rows: int
    way: str
    mode: str
    height: int
    fused: bool


def make(args: argparse.Namespace, *, fused: bool, device: torch.device) -> Vacsr:
    torch.manual_seed(0)
    return Vacsr(VacsrConfig(objective=ObjectiveConfig(fused=fused)), dim=args.dim).to(device).train()


def loss_step(
    method: Vacsr, loss: PairLoss, *, batch: int, rows: int, device: torch.device, half: bool = False
) -> Step:
    """Forward and backward from fixed unit vectors, without an optimiser; five captions share an image.

    Seed and step are tensors, so that the step can be captured as a CUDA graph.
    """
    generator = torch.Generator().manual_seed(0)
    unit = functional.normalize(torch.randn(2, batch, method.adapter.dim, generator=generator), dim=-1)
    like = {"device": device, "dtype": method.adapter.trunk.weight.dtype}
    v, t = unit[0, :rows].to(**like).requires_grad_(), unit[1].to(**like).requires_grad_()
    images = (torch.arange(batch) // 5)[torch.randperm(batch, generator=generator)].to(device)
    trained = [v, t, *(p for p in method.parameters() if p.requires_grad)]
    seed, number = (torch.tensor(value, device=device) for value in (0, 1))

    def step() -> tuple[Tensor, ...]:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            block = batch_block(images, seed=seed, step=number).rows(slice(0, rows))
            terms = loss(Embedding(v), Embedding(t), block)
        return torch.autograd.grad(terms.total, trained)

    return step


def cases(args: argparse.Namespace, batch: int, rows: int, *, device: torch.device) -> list[Case]:
    """The dense loss of a whole batch where it fits, and strips: the first size in every mode, others in the first.

    Graphs of strips share their memory, so those of a second size would seem to need none.
    """
    found: list[Case] = []
    room = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 1 << 32
    for fused in (way == "fused" for way in args.ways):
        method, itemsize = make(args, fused=fused, device=torch.device("meta")), ITEM[args.precision]
        bytes_needed = (5 if fused else 15) * itemsize * method.pair_width * batch * rows
        heights = [
            method.strip_rows(
                size if size == "auto" else max(1, int(size) // batch), rows=rows, columns=batch, itemsize=itemsize
            )
            for size in args.strips[: None if (batch, rows) == args.batches[0] else 1]
        ]
        dense = [rows] if rows == batch and bytes_needed < 0.5 * room else []
        for height in dict.fromkeys(dense + heights):
            name = ("dense" if height == rows else f"strips {height}×{batch}") + (", fused" if fused else "")
            modes = args.modes if height in (rows, heights[0]) else args.modes[:1]
            found += [Case(batch, rows, name, mode, height, fused) for mode in modes]
    return found


def losses(args: argparse.Namespace, chosen: list[Case], *, device: torch.device) -> Iterator[tuple[Case, Step]]:
    """A step for each case; cases that differ only in their mode share what is compiled."""
    made: dict[tuple[int, bool], Step] = {}
    for case in chosen:
        key = case.height, case.fused
        if key not in made:
            method = make(args, fused=case.fused, device=device)
            whole = case.height == case.rows
            loss: PairLoss = method.loss if whole else StripLoss(method.loss, method, case.height)
            loss = compile_pairs(loss) if args.compile else loss
            half = args.precision == "bf16"
            made[key] = loss_step(method, loss, batch=case.batch, rows=case.rows, device=device, half=half)
        yield case, made[key]


def prepare(step: Step, case: Case, *, device: torch.device) -> Prepared:
    """Peak memory as it is, time as it is or in a graph; after a step that compiles."""
    if device.type != "cuda":
        return Prepared(step)
    step()
    torch.cuda.empty_cache()
    peak = peak_gib(step, before=torch.cuda.memory_allocated())
    return Prepared(captured(step) if case.mode == "graph" else step, {"peak_gib": peak})


def sweep(args: argparse.Namespace, *, device: torch.device, rate: float | None) -> Iterator[Row]:
    """The rows of one batch after the other; graphs hold memory, so no batch keeps those of another."""
    dense: dict[bool, float] = {}
    flops = adapter_flops(make(args, fused=False, device=torch.device("meta")).adapter, 1)
    for batch, rows in args.batches:
        chosen = cases(args, batch, rows, device=device)
        ways = []
        for case, step in losses(args, chosen, device=device):
            cells = {"batch": batch, "rows": rows, "way": case.way, "mode": case.mode}
            ways.append(Way(cells, lambda step=step, case=case: prepare(step, case, device=device)))
        measured = measure(ways, device=device, log=log, rounds=9, budget=args.budget, statistic=statistics.median)
        for case, row in zip(chosen, measured, strict=True):
            if "seconds" in row:
                row["ms"], row["ns"] = 1e3 * row["seconds"], 1e9 * row["seconds"] / (batch * rows)
                if case.way.startswith("dense"):
                    dense.setdefault(case.fused, row["ns"])
                if case.fused in dense:
                    row["against"] = row["ns"] / dense[case.fused]
                if rate:
                    row["ratio"] = row["ns"] * 1e-9 * rate / flops
            log(" ".join(f"{key}={x:.4g}" if isinstance(x, float) else str(x) for key, x in row.items()))
            yield row
        del ways, measured
        if device.type == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()


def gradient_errors(
    args: argparse.Namespace, *, device: torch.device, batch: int = 96, height: int = 32
) -> dict[str, float]:
    """The largest relative error (L2) of a gradient against the dense loss in float64, written with torch."""
    seeds = {"batch": batch, "rows": batch, "device": device}
    reference = make(args, fused=False, device=device).double()
    with mock.patch.object(Tensor, "float", Tensor.double):
        exact = loss_step(reference, reference.loss, **seeds)()
    errors = {}
    for rows, half in ((batch, False), (height, False), (batch, True), (height, True)):
        method, name = make(args, fused="fused" in args.ways, device=device), "dense" if rows == batch else "strips"
        loss: PairLoss = method.loss if rows == batch else StripLoss(method.loss, method, rows)
        if half and rows < batch and args.compile:
            loss, name = compile_pairs(loss), "compiled strips"
        step = loss_step(method, loss, half=half, **seeds)
        grads = step()
        worst = max(
            float((g.double() - e).norm() / e.norm().clamp_min(1e-12)) for g, e in zip(grads, exact, strict=True)
        )
        errors[f"{name}, {'bf16' if half else 'fp32'}"] = worst
    return errors


def profiled(args: argparse.Namespace, *, device: torch.device) -> dict[str, list[Any]]:
    """Where the GPU's time goes in an eager step of the first batch: [kernel, microseconds, calls], longest first."""
    batch, rows = args.batches[0]
    shares = {}
    chosen = [case for case in cases(args, batch, rows, device=device) if case.mode == "eager"]
    for case, step in losses(args, chosen, device=device):
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
        shares[case.way] = [[e.key[:100], round(e.self_device_time_total), e.count] for e in events[:40]]
        log("\n".join([case.way, *(f"{us:>9} µs {count:>5} × {name}" for name, us, count in shares[case.way][:30])]))
    return shares


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """nvidia-smi's medians while the GPU is busy, known when the block ends."""
    known: dict[str, Any] = {}
    tool = shutil.which("nvidia-smi")
    if tool is None or not torch.cuda.is_available():
        yield known
        return
    query = f"--query-gpu=utilization.gpu,{','.join(SMI)}"
    command = [tool, query, "--format=csv,noheader,nounits", "--loop-ms=500", "--id=0"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield known
    finally:
        watcher.terminate()
        lines = [line.split(",") for line in (watcher.communicate()[0] or "").splitlines()]
        busy = [
            line[1:] for line in lines if len(line) == 1 + len(SMI) and line[0].strip().isdigit() and int(line[0]) > 80
        ]
        for name, values in zip(SMI, zip(*busy, strict=True), strict=False):
            numbers = [float(value) for value in values if value.strip().replace(".", "").isdigit()]
            known[name] = statistics.median(numbers) if numbers else None


def compared(rows: list[Row]) -> Iterator[str]:
    """How much longer a way takes without a graph of the step, and how its memory compares with the dense loss."""
    timed = [row for row in rows if "ms" in row]
    graphs = {(row["batch"], row["rows"], row["way"]): row for row in timed if row["mode"] == "graph"}
    for row in timed:
        graph = graphs.get((row["batch"], row["rows"], row["way"]))
        if graph and graph is not row:
            yield f"- B={row['batch']:,}, {row['way']}, {row['mode']}: {row['ms'] / graph['ms']:.3f} × the graph's time"


def parsed(*, gpu: bool) -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--dim", type=int, default=1024 if gpu else 64)
    options.add_argument(
        "--batches", default=BATCHES["cuda" if gpu else "cpu"], help="B or B:ROWS, separated by commas"
    )
    options.add_argument("--strips", default="auto" if gpu else "128", help="pairs of a strip, or auto")
    options.add_argument("--modes", default="graph,eager" if gpu else "eager")
    options.add_argument("--precision", choices=list(ITEM), default="bf16" if gpu else "fp32")
    options.add_argument("--compile", action="store_true", help="torch.compile the loss, or its strip")
    options.add_argument("--ways", default="fused" if gpu else "plain", help="plain,fused")
    options.add_argument("--budget", type=float, default=3.0, help="seconds of timing for each way")
    options.add_argument("--check", action="store_true", help="compare gradients with float64")
    options.add_argument("--profile", action="store_true", help="list the kernels of the first batch")
    args = options.parse_args()
    for name in ("strips", "modes", "ways"):
        setattr(args, name, getattr(args, name).split(","))
    sizes = [[int(number) for number in text.split(":")] for text in args.batches.split(",")]
    args.batches = [(size[0], size[-1]) for size in sizes]
    if "fused" in args.ways and not kernels.available(torch.device("cuda" if gpu else "cpu")):
        options.error("the way 'fused' needs Triton and a CUDA GPU — leave it out")
    if not gpu and args.modes != ["eager"]:
        options.error("CUDA graphs need a CUDA GPU — set --modes eager")
    return args


def main() -> None:
    """Sweep the batch sizes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    args = parsed(gpu=gpu)
    for limit in ("recompile_limit", "cache_size_limit"):  # every height is compiled, and they share their code
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 64)
    extra: dict[str, Any] = {}
    rows: list[Row] = []
    settings = {"d": args.dim, "precision": args.precision, "compile": args.compile}
    with watched() as known, matmul_precision(args.precision):
        rate = product_rate(args.precision) if gpu else None
        for row in sweep(args, device=device, rate=rate):
            rows.append(row)
            if args.json:  # a run that is stopped leaves what it has measured
                write_json(args.json, {"rows": rows})
        if args.check:
            extra["gradient_errors"] = gradient_errors(args, device=device)
        if args.profile and gpu:
            extra["kernels"] = profiled(args, device=device)
    notes = [*compared(rows), *(f"- gradients, {k}: {x:.2g}" for k, x in extra.get("gradient_errors", {}).items())]
    result = BenchResult("strips", describe_device(device), settings | known, rows, COLUMNS, notes=notes)
    print(result.to_markdown())
    if args.json:
        write_json(args.json, result.to_dict() | extra)


if __name__ == "__main__":
    main()
