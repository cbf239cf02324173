"""Time and peak memory of the adapter's step, dense and in strips, over batch sizes; the sigmoid loss for comparison.

    python benchmarks/strip_training.py [--dim 1024] [--batches 128,512,...] [--tile auto] [--precision bf16]
                                        [--compile] [--graph] [--ways plain,fused] [--json FILE]

Adapter only: the embeddings are random leaves, there are no towers and no optimiser. A step is loss and backward.
``ratio`` is the step's time over that of its matrix products at the rate of one large product in the same run. Where a
batch does not fit, or by the memory of a smaller one cannot, its row says so. Memory is CUDA's peak of allocated bytes
above what was held before the step. The last lines compare strips with the dense loss: at the largest batch where it
fits, and the largest batch in strips with that one, its time by the pair. The way ``fused`` has what lies between heads
and decoder in hand-written kernels; what these have to move at least is told too, at the rate of a copy in the same
run. Without a GPU a small run shows that it works (with TRITON_INTERPRET=1 also ``fused``, very slowly).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from _gpu import adapter_flops, captured, copy_rate, latent_bytes, product_rate
from vacsr import kernels
from vacsr.bench import Step, describe_device, time_in_turn
from vacsr.bench.training import GIB, MIB, loss_step, peak_mib
from vacsr.files import write_json
from vacsr.methods.base import Method
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.objective import ObjectiveConfig
from vacsr.strips import PairLoss, StripLoss, compile_pairs, strip_rows
from vacsr.train.step import matmul_precision

BATCHES = {"cuda": [128, 512, 1024, 2048, 4096], "cpu": [16, 32, 64]}
SECONDS = 2.0  # spent on timing one row
FUSED = ", fused"  # how the names of its rows end
ITEM = {"fp32": 4, "tf32": 4, "bf16": 2}  # bytes


def measure(step: Step, *, device: torch.device, graph: bool) -> dict[str, float | None]:
    """Peak memory as it is, time as it is or replayed; after a step that has compiled."""
    gpu = device.type == "cuda"
    try:
        step()
        if gpu:
            torch.cuda.empty_cache()
        peak = peak_mib(step, device=device) * MIB / GIB if gpu else None
        replayed = captured(step) if graph else step
        timing = time_in_turn({"step": replayed}, device=device, rounds=100, budget=SECONDS)["step"]
        if timing.error not in (None, "out of memory"):
            raise RuntimeError(timing.error)
        return {"ms": None, "peak_gib": None} if timing.error else {"ms": 1e3 * timing.median, "peak_gib": peak}
    except torch.OutOfMemoryError:
        return {"ms": None, "peak_gib": None}
    finally:
        if gpu:
            torch.cuda.empty_cache()


def losses(args: argparse.Namespace, batch: int, *, device: str) -> dict[str, tuple[Method, PairLoss]]:
    """By name; one compilation serves one batch size."""
    sigmoid = Sigmoid(SigmoidConfig(), dim=8).to(device)
    found: dict[str, tuple[Method, PairLoss]] = {"sigmoid": (sigmoid, sigmoid.loss)}
    for with_kernels in (way == "fused" for way in args.ways):
        torch.manual_seed(0)
        vacsr = Vacsr(VacsrConfig(objective=ObjectiveConfig(fused=with_kernels)), dim=args.dim).to(device)
        way = FUSED if with_kernels else ""
        found["dense" + way] = vacsr, vacsr.loss
        rows = strip_rows(
            vacsr, args.tile, rows=batch, columns=batch, itemsize=ITEM[args.precision], graphed=args.graph
        )
        if rows < batch:
            found[f"strips {rows}×{batch}{way}"] = vacsr, StripLoss(vacsr.loss, vacsr, rows)
    if not args.compile:
        return found
    torch._dynamo.reset()

    def compiled(loss: PairLoss) -> PairLoss:
        return loss.compiled() if isinstance(loss, StripLoss) else compile_pairs(loss)

    return {name: (method, compiled(loss)) for name, (method, loss) in found.items()}


def sweep(args: argparse.Namespace, *, device: str) -> list[dict[str, Any]]:
    """One row a batch size and loss."""
    half, rows = args.precision == "bf16", []
    rate = product_rate(args.precision) if device == "cuda" else None
    dense: dict[str, float] = {}  # GiB of a pair of a dense loss
    for batch in args.batches:
        for name, (method, loss) in losses(args, batch, device=device).items():
            row: dict[str, Any] = {"batch": batch, "loss": name, "ms": None, "peak_gib": None}
            if device == "cpu" or dense.get(name, 0.0) * batch**2 < torch.cuda.mem_get_info()[1] / GIB:
                step = loss_step(method, loss, dim=args.dim, batch=batch, device=torch.device(device), half=half)
                row |= measure(step, device=torch.device(device), graph=args.graph)
            if name.startswith("dense") and row["peak_gib"]:
                dense[name] = row["peak_gib"] / batch**2
            if isinstance(method, Vacsr) and row["ms"] and rate:
                row["ratio"] = 1e-3 * row["ms"] * rate / adapter_flops(method.adapter, batch**2)
            rows.append(row)
            print(line(row), flush=True)
    return rows


def compared(rows: list[dict[str, Any]], *, way: str = "") -> list[str]:
    """Strips beside the dense loss of the largest batch where it fits; empty where there is no such pair."""
    timed = [row for row in rows if row["ms"] is not None and row["loss"].endswith(FUSED) == bool(way)]
    dense = [row for row in timed if row["loss"] == "dense" + way]
    strips = [row for row in timed if row["loss"].startswith("strips")]
    if not dense or not strips:
        return []
    base, found = dense[-1], []
    for row in [row for row in strips if row["batch"] == base["batch"]] + strips[-1:]:
        share = row["batch"] ** 2 / base["batch"] ** 2
        text = f"{row['loss']}, B={row['batch']:,} beside {base['loss']}, B={base['batch']:,}: "
        text += f"{row['ms'] / base['ms'] / share:.3f} × the time of a pair"
        if row["peak_gib"] and base["peak_gib"]:
            text += f", 1/{base['peak_gib'] / row['peak_gib']:.1f} of its peak memory"
        found.append(text)
    return list(dict.fromkeys(found))


def gains(rows: list[dict[str, Any]]) -> list[str]:
    """Each fused row beside the same loss written with torch."""
    plain = {(row["batch"], row["loss"]): row["ms"] for row in rows if row["ms"] is not None}
    found = []
    for row in rows:
        slow = plain.get((row["batch"], row["loss"].removesuffix(FUSED)))
        if row["loss"].endswith(FUSED) and row["ms"] and slow:
            found.append(f"{row['loss']}, B={row['batch']:,}: {row['ms'] / slow:.3f} × the time without kernels")
    return found


def least(args: argparse.Namespace) -> list[str]:
    """What a step must compute and, with fused kernels, move, in time at the rates of this run."""
    adapter, found = Vacsr(VacsrConfig(), dim=args.dim).adapter, []
    products, copies = product_rate(args.precision), copy_rate()
    for batch in args.batches:
        flops, moved = adapter_flops(adapter, batch**2), latent_bytes(adapter, batch**2, ITEM[args.precision])
        found.append(
            f"B={batch:,}: {flops / 1e9:.0f} GFLOP of products, {1e3 * flops / products:.3f} ms at "
            f"{products / 1e12:.0f} TFLOP/s; {moved / 2**20:.0f} MiB between heads and decoder, "
            f"{1e3 * moved / copies:.3f} ms at {copies / 1e12:.2f} TB/s"
        )
    return found


def line(row: dict[str, Any]) -> str:
    """As a row of the table."""
    ms = "does not fit" if row["ms"] is None else f"{row['ms']:.2f}"
    peak, ratio = row["peak_gib"], row.get("ratio")
    figures = ["–" if x is None else f"{x:.3f}" for x in (peak, ratio)]
    return f"| {row['batch']} | {row['loss']} | {ms} | {figures[0]} | {figures[1]} |"


def main() -> None:
    """Print a Markdown table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=1024 if device == "cuda" else 64)
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=BATCHES[device])
    parser.add_argument("--tile", type=lambda text: text if text == "auto" else int(text), default=None)
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="bf16" if device == "cuda" else "fp32")
    parser.add_argument("--compile", action="store_true", help="torch.compile the loss, or its strip")
    parser.add_argument("--graph", action="store_true", help="time the step replayed as a CUDA graph")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["plain"], help="some of plain,fused")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if set(args.ways) - {"plain", "fused"}:
        parser.error(f"--ways {','.join(args.ways)}: expected some of plain,fused")
    if "fused" in args.ways and not kernels.available(torch.device(device)):
        parser.error("the way 'fused' needs Triton and a CUDA GPU — leave it out")
    if device == "cpu":
        print("no CUDA GPU: a small run in place of the real one, without memory\n")
        args.graph = False
    args.tile = args.tile or ("auto" if device == "cuda" else 16)
    where = describe_device(torch.device(device))
    print(f"{where}, d={args.dim}, {args.precision}\n")
    print("| B | loss | ms a step | peak GiB | ratio |\n|---|---|---|---|---|")
    with matmul_precision(args.precision):
        rows = sweep(args, device=device)
        texts = least(args) if device == "cuda" else []
    texts += compared(rows) + compared(rows, way=FUSED) + gains(rows)
    print("\n" + "\n".join(f"- {text}" for text in texts))
    if args.json:
        ways = {"dim": args.dim, "precision": args.precision, "compile": args.compile, "graph": args.graph}
        write_json(args.json, {"where": where, **ways, "rows": rows, "compared": texts})


if __name__ == "__main__":
    main()
