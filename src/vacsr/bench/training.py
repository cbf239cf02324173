"""`vacsr bench training`: forward and backward of the loss alone, over batch sizes.

The adapter's loss over the whole matrix of pairs and in strips, and the sigmoid loss beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from vacsr.bench import BenchResult, Cell
from vacsr.bench.stopwatch import Step, describe_device, describe_error, peak_mib, time_in_turn
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
        ways = _ways(batch, strip_pairs=tile**2)
        log(f"batch {batch}: {', '.join(ways)}")
        rows += _measure(ways, sizes.dim, batch, device)
    settings = {"d": sizes.dim, "tile": tile}
    return BenchResult(
        "training", describe_device(device), settings, rows, COLUMNS, ("ms", "peak_mib"), (_NOTE,), label="bar"
    )


def _ways(batch: int, *, strip_pairs: int) -> dict[str, Callable[[int], tuple[Method, PairLoss]]]:
    """A batch that fits in one strip is the dense loss again."""

    def sigmoid(dim: int) -> tuple[Method, PairLoss]:
        method = Sigmoid(SigmoidConfig(), dim=dim)
        return method, method.loss

    def dense(dim: int) -> tuple[Method, PairLoss]:
        method = Vacsr(VacsrConfig(), dim=dim)
        return method, method.loss

    def strips(dim: int) -> tuple[Method, PairLoss]:
        method = Vacsr(VacsrConfig(), dim=dim)
        rows = strip_rows(method, max(1, strip_pairs // batch), rows=batch, columns=batch)
        return method, method.loss if rows == batch else StripLoss(method.loss, method, rows)

    return {SIGMOID: sigmoid, DENSE: dense, ONE_STRIP if batch**2 <= strip_pairs else STRIPS: strips}


def _measure(
    ways: dict[str, Callable[[int], tuple[Method, PairLoss]]], dim: int, batch: int, device: torch.device
) -> list[dict[str, Cell]]:
    """Every loss at one batch size: first its memory, which shows whether it fits, then all in turn."""
    rows: dict[str, dict[str, Cell]] = {}
    steps: dict[str, Step] = {}
    for name, build in ways.items():
        rows[name] = {"way": name, "batch": batch, "bar": f"{name}, B={batch}"}
        try:
            method, loss = build(dim)
            step = loss_step(method, loss, dim=dim, batch=batch, device=device)
            step()
            rows[name]["peak_mib"] = peak_mib(step, device=device)
            steps[name] = step
        except Exception as error:  # one loss must not end the run
            rows[name]["problem"] = describe_error(error)
    for name, timing in time_in_turn(steps, device=device).items():
        if timing.error is None:
            times = {"ms": 1e3 * timing.fastest, "median_ms": 1e3 * timing.median, "rounds": len(timing.times)}
            rows[name] |= times
        else:
            rows[name]["problem"] = timing.error
    for row in rows.values():
        for key in ("ms", "peak_mib"):
            value, dense = row.get(key), rows[DENSE].get(key)
            if isinstance(value, float) and isinstance(dense, float) and dense > 0:
                row[f"of_dense_{key.removeprefix('peak_')}"] = value / dense
    return list(rows.values())


def loss_step(method: Method, loss: PairLoss, *, dim: int, batch: int, device: torch.device) -> Step:
    """Forward and backward from fixed unit vectors, without an optimiser."""
    method.to(device).train()
    generator = torch.Generator().manual_seed(0)
    unit = (functional.normalize(torch.randn(batch, dim, generator=generator), dim=1) for _ in range(2))
    v, t = (x.to(device).requires_grad_() for x in unit)
    ids = torch.arange(batch, device=device)

    def step() -> None:
        torch.autograd.backward(loss(Embedding(v), Embedding(t), batch_block(ids, seed=0, step=0)).total)
        for tensor in (v, t, *method.parameters()):
            tensor.grad = None

    return step
