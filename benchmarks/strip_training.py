"""Time and peak memory of the adapter's step, dense and in strips, over batch sizes; the sigmoid loss for comparison.

    python benchmarks/strip_training.py [--dim 1024] [--batches 128,512,...] [--tile auto] [--precision bf16]
                                        [--compile] [--graph] [--ways plain,fused] [--json FILE]

Adapter only: the embeddings are random leaves, there are no towers and no optimiser. A step is loss and backward.
``ratio`` is the step's time over that of its matrix products at the rate of one large product in the same run. A batch
that does not fit, or by the memory of a smaller one cannot, says so. Memory is CUDA's peak of allocated bytes above
what was held before the step. The notes compare strips with the dense loss, at the largest batch where it fits and for
the largest batch in strips, and the way ``fused``, which has hand-written kernels between heads and decoder, with plain
torch. Without a GPU a small run shows that it works (with TRITON_INTERPRET=1 also ``fused``, very slowly).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from _common import adapter_flops, captured, finish, log, parser, peak_gib, product_rate
from vacsr import kernels
from vacsr.bench import BenchResult, Prepared, Step, Way, describe_device, measure
from vacsr.bench.training import GIB
from vacsr.methods.base import Embedding, Method
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.objective import ObjectiveConfig, batch_block
from vacsr.strips import PairLoss, StripLoss, compile_pairs
from vacsr.train.step import matmul_precision

Row = dict[str, Any]
BATCHES = {"cuda": [128, 512, 1024, 2048, 4096], "cpu": [16, 32, 64]}
FUSED = ", fused"  # how the names of its rows end
ITEM = {"fp32": 4, "tf32": 4, "bf16": 2}  # bytes
COLUMNS = {"batch": "B", "way": "loss", "ms": "ms a step", "peak_gib": "peak GiB", "ratio": "time / products"}


def loss_step(
    method: Method, loss: PairLoss, *, dim: int, batch: int, device: torch.device, half: bool = False
) -> Step:
    """Forward and backward from fixed unit vectors, without an optimiser; five captions share an image.

    Seed and step are tensors, so that the step can be captured as a CUDA graph.
    """
    method.to(device).train()
    generator = torch.Generator().manual_seed(0)
    unit = functional.normalize(torch.randn(2, batch, dim, generator=generator), dim=-1).to(device)
    v, t = (side.clone().requires_grad_() for side in unit)
    images = (torch.arange(batch) // 5)[torch.randperm(batch, generator=generator)].to(device)
    trained = [v, t, *(p for p in method.parameters() if p.requires_grad)]
    seed, number = (torch.tensor(value, device=device) for value in (0, 1))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            terms = loss(Embedding(v), Embedding(t), batch_block(images, seed=seed, step=number))
        torch.autograd.grad(terms.total, trained)

    return step


def prepare(step: Step, *, device: torch.device, graph: bool) -> Prepared:
    """Peak memory as it is, time as it is or replayed; after a step that has compiled."""
    step()
    if device.type != "cuda":
        return Prepared(step)
    peak = peak_gib(step, before=torch.cuda.memory_allocated())
    return Prepared(captured(step) if graph else step, {"peak_gib": peak})


def losses(args: argparse.Namespace, batch: int, *, device: torch.device) -> Iterator[tuple[str, Method, PairLoss]]:
    """Name, method and loss; one compilation serves one batch size."""
    compiled = compile_pairs if args.compile else lambda loss: loss
    torch._dynamo.reset()
    sigmoid = Sigmoid(SigmoidConfig(), dim=8).to(device)
    yield "sigmoid", sigmoid, compiled(sigmoid.loss)
    for with_kernels in (way == "fused" for way in args.ways):
        torch.manual_seed(0)
        vacsr = Vacsr(VacsrConfig(objective=ObjectiveConfig(fused=with_kernels)), dim=args.dim).to(device)
        way, itemsize = FUSED if with_kernels else "", ITEM[args.precision]
        yield f"dense{way}", vacsr, compiled(vacsr.loss)
        rows = vacsr.strip_rows(args.tile, rows=batch, columns=batch, itemsize=itemsize)
        if rows < batch:
            yield f"strips {rows}×{batch}{way}", vacsr, compiled(StripLoss(vacsr.loss, vacsr, rows))


def sweep(args: argparse.Namespace, *, device: torch.device) -> Iterator[Row]:
    """One row per batch size and loss; each is measured alone, since graphs hold memory."""
    gpu, half = device.type == "cuda", args.precision == "bf16"
    rate = product_rate(args.precision) if gpu else None
    dense: dict[str, float] = {}  # GiB of a pair of a dense loss
    for batch in args.batches:
        for name, method, loss in losses(args, batch, device=device):
            row: Row = {"batch": batch, "way": name}
            if gpu and dense.get(name, 0.0) * batch**2 >= torch.cuda.mem_get_info()[1] / GIB:
                yield row | {"problem": "out of memory"}
                continue
            step = loss_step(method, loss, dim=args.dim, batch=batch, device=device, half=half)
            way = Way(row, lambda step=step: prepare(step, device=device, graph=args.graph))
            (row,) = measure([way], device=device, log=log, rounds=100, budget=2.0, statistic=statistics.median)
            if "seconds" in row:
                row["ms"] = 1e3 * row["seconds"]
                if name.startswith("dense") and gpu:
                    dense[name] = row["peak_gib"] / batch**2
                if isinstance(method, Vacsr) and rate:
                    row["ratio"] = row["seconds"] * rate / adapter_flops(method.adapter, batch**2)
            yield row
            if gpu:
                torch.cuda.empty_cache()


def compared(rows: list[Row]) -> Iterator[str]:
    """Strips beside the dense loss of the largest batch where it fits; fused losses beside the same in plain torch."""
    timed = [row for row in rows if "ms" in row]
    for way in ("", FUSED):
        same = [row for row in timed if row["way"].endswith(FUSED) == bool(way)]
        dense = [row for row in same if row["way"] == f"dense{way}"][-1:]
        strips = [row for row in same if row["way"].startswith("strips")]
        for base in dense:
            chosen = [row for row in strips if row["batch"] == base["batch"]] + strips[-1:]
            for row in {row["batch"]: row for row in chosen}.values():
                time = row["ms"] / base["ms"] * base["batch"] ** 2 / row["batch"] ** 2
                text = f"{row['way']} beside {base['way']}, B={base['batch']:,}: {time:.3f} × the time of a pair"
                memory = f", 1/{base['peak_gib'] / row['peak_gib']:.1f} of its peak memory" if "peak_gib" in row else ""
                yield f"- {text}{memory}"
    plain = {(row["batch"], row["way"]): row["ms"] for row in timed}
    for row in timed:
        slow = plain.get((row["batch"], row["way"].removesuffix(FUSED)))
        if row["way"].endswith(FUSED) and slow:
            yield f"- {row['way']}, B={row['batch']:,}: {row['ms'] / slow:.3f} × the time without kernels"


def main() -> None:
    """Sweep the batch sizes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu, options = device.type == "cuda", parser(__doc__)
    options.add_argument("--dim", type=int, default=1024 if gpu else 64)
    options.add_argument("--batches", type=lambda text: [*map(int, text.split(","))], default=BATCHES[device.type])
    options.add_argument("--tile", type=lambda text: text if text == "auto" else int(text), default=None)
    options.add_argument("--precision", choices=list(ITEM), default="bf16" if gpu else "fp32")
    options.add_argument("--compile", action="store_true", help="torch.compile the loss, or its strip")
    options.add_argument("--graph", action="store_true", help="time the step replayed as a CUDA graph")
    options.add_argument("--ways", type=lambda text: text.split(","), default=["plain"], help="some of plain,fused")
    args = options.parse_args()
    if "fused" in args.ways and not kernels.available(device):
        options.error("the way 'fused' needs Triton and a CUDA GPU — leave it out")
    args.graph = args.graph and gpu
    args.tile = args.tile or ("auto" if gpu else 16)
    with matmul_precision(args.precision):
        rows = list(sweep(args, device=device))
    settings = {"d": args.dim, "precision": args.precision, "compile": args.compile, "graph": args.graph}
    notes = tuple(compared(rows))
    finish(BenchResult("strips", describe_device(device), settings, rows, COLUMNS, notes=notes), args.json)


if __name__ == "__main__":
    main()
