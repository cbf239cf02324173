"""`vacsr bench training`: forward and backward of the loss alone, over batch sizes.

The adapter's loss over the whole matrix of pairs and in strips, and the sigmoid loss beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from vacsr.bench import BenchResult, Cell
from vacsr.bench.stopwatch import Prepared, Step, Way, describe_device, measure, peak_mib
from vacsr.methods.base import Embedding, Method
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.pairwise import batch_block
from vacsr.strips import PairLoss, StripLoss, strip_rows


class Sizes(NamedTuple):
    """Width of the embeddings, and the batch sizes."""

    dim: int
    batches: tuple[int, ...]


SIZES = {"small": Sizes(256, (32, 64, 128)), "coco": Sizes(1024, (128, 256, 512, 1024, 2048, 4096))}
COLUMNS = {
    "way": "loss", "batch": "batch", "ms": "ms a step", "peak_mib": "peak MiB", "of_dense_ms": "time / dense",
    "of_dense_mib": "memory / dense",
}  # fmt: skip
SIGMOID, DENSE, STRIPS, ONE_STRIP = "sigmoid", "adapter, dense", "adapter in strips", "adapter in one strip: dense"
_NOTE = "Forward and backward of the loss alone; the fastest round, and the most memory held beyond weights and inputs."


def run(
    sizes: Sizes, device: torch.device, log: Callable[[str], None] = lambda _: None, *, tile: int | None = None
) -> BenchResult:
    """Random embeddings; a loss that does not fit in memory says so and the others go on.

    A strip has as many pairs as a square tile of edge ``tile``, by default 128 on a GPU and 32 on a CPU.
    """
    rows: list[dict[str, Cell]] = []
    tile = tile or (128 if device.type == "cuda" else 32)
    for batch in sizes.batches:
        strip = ONE_STRIP if batch <= tile else STRIPS
        ways = [
            Way({"way": SIGMOID, "batch": batch}, partial(_sigmoid, sizes.dim, batch, device)),
            Way({"way": DENSE, "batch": batch}, partial(_adapter, sizes.dim, batch, device, rows=batch)),
            Way({"way": strip, "batch": batch}, partial(_adapter, sizes.dim, batch, device, rows=tile**2 // batch)),
        ]
        rows += _with_ratios(measure(ways, device=device, log=log))
    settings = {"d": sizes.dim, "tile": tile}
    return BenchResult(
        "training", describe_device(device), settings, rows, COLUMNS, ("ms", "peak_mib"), (_NOTE,), label="bar"
    )


def _with_ratios(rows: list[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """Times in milliseconds, and ratios to the dense loss of the same batch size."""
    for row in rows:
        row["bar"] = f"{row['way']}, B={row['batch']}"
        for key, name in (("seconds", "ms"), ("median", "median_ms")):
            if isinstance(value := row.pop(key, None), float):
                row[name] = 1e3 * value
    dense = next(row for row in rows if row["way"] == DENSE)
    for row in rows:
        for key in ("ms", "peak_mib"):
            value, reference = row.get(key), dense.get(key)
            if isinstance(value, float) and isinstance(reference, float) and reference > 0:
                row[f"of_dense_{key.removeprefix('peak_')}"] = value / reference
    return rows


def _sigmoid(dim: int, batch: int, device: torch.device) -> Prepared:
    method = Sigmoid(SigmoidConfig(), dim=dim)
    return _prepared(method, method.loss, dim=dim, batch=batch, device=device)


def _adapter(dim: int, batch: int, device: torch.device, *, rows: int) -> Prepared:
    """In strips of so many rows; all rows are the dense loss."""
    method = Vacsr(VacsrConfig(), dim=dim)
    rows = batch if rows >= batch else strip_rows(method, max(1, rows), rows=batch, columns=batch)
    loss = method.loss if rows == batch else StripLoss(method.loss, method, rows)
    return _prepared(method, loss, dim=dim, batch=batch, device=device)


def _prepared(method: Method, loss: PairLoss, *, dim: int, batch: int, device: torch.device) -> Prepared:
    """With its peak memory, which also shows whether it fits."""
    step = loss_step(method, loss, dim=dim, batch=batch, device=device)
    step()
    return Prepared(step, {"peak_mib": peak_mib(step, device=device)})


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
