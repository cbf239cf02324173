"""A training step of the pair loss alone, over batch sizes: dense, in strips, and the sigmoid loss beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.bench.result import BenchResult, Cell
from vacsr.bench.timing import peak_mib, timed_in_turn, what_failed
from vacsr.efficiency import Step, where_it_runs
from vacsr.methods.base import Embedding, Method
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.pairwise import batch_block
from vacsr.strips import PairLoss, StripLoss, strip_rows

if TYPE_CHECKING:
    from vacsr.bench import Size

SIZES = {"small": (256, (32, 64, 128)), "coco": (1024, (128, 256, 512, 1024, 2048, 4096))}
"""d, and the batch sizes."""
COLUMNS = {
    "way": "loss", "batch": "batch", "ms": "ms a step", "peak_mib": "peak MiB", "of_dense_ms": "time / dense",
    "of_dense_mib": "memory / dense",
}  # fmt: skip
_PAIRS = {"cpu": 32**2, "cuda": 128**2}  # of a strip
_NOTE = "Forward and backward of the loss alone; the fastest round, and the most memory held beyond weights and inputs."
_STRIPS, _ONE_STRIP = "adapter in strips", "adapter in one strip: dense"


class Loss(NamedTuple):
    """One way to the loss and its gradients."""

    name: str
    make: Callable[[int, int, torch.device], Step]
    """d, batch, device -> forward and backward."""

    def called(self, batch: int, device: torch.device) -> str:
        """A batch that is no larger than a strip is taken whole, which is the dense way again."""
        return _ONE_STRIP if self.name == _STRIPS and batch**2 <= _PAIRS[device.type] else self.name


def bench_training(size: Size, device: torch.device, say: Callable[[str], None]) -> BenchResult:
    """Forward and backward over random embeddings; a batch that does not fit says so and the others go on."""
    dim, batches = SIZES[size]
    rows: list[dict[str, Cell]] = []
    for batch in batches:
        say(f"batch {batch}: {', '.join(loss.called(batch, device) for loss in LOSSES)}")
        rows += _rows(dim, batch, device)
    _compare(rows)
    settings = {"d": dim, "pairs_per_strip": _PAIRS[device.type]}
    drawn = ("ms", "peak_mib")
    return BenchResult("training", where_it_runs(device), settings, rows, COLUMNS, drawn, (_NOTE,), label="bar")


def _rows(dim: int, batch: int, device: torch.device) -> list[dict[str, Cell]]:
    """Every loss at one batch size: first its memory, which says whether it fits, then all in turn."""
    rows: dict[str, dict[str, Cell]] = {}
    steps: dict[str, Step] = {}
    for loss in LOSSES:
        name = loss.called(batch, device)
        rows[name] = {"way": name, "batch": batch, "bar": f"{name}, B={batch}"}
        try:
            step = loss.make(dim, batch, device)
            step()
            rows[name]["peak_mib"] = peak_mib(step, device=device)
            steps[name] = step
        except Exception as error:  # one loss must not end the run
            rows[name]["problem"] = what_failed(error)
    timed = timed_in_turn(steps, device=device)
    for name, found in timed.found.items():
        rows[name] |= {"ms": 1e3 * found.seconds, "median_ms": 1e3 * found.median, "rounds": found.rounds}
    for name, problem in timed.problems.items():
        rows[name]["problem"] = problem
    return list(rows.values())


def sigmoid_step(dim: int, batch: int, device: torch.device) -> Step:
    """The sigmoid loss on cosines: what a step costs without an adapter."""
    method = Sigmoid(SigmoidConfig(), dim=8)
    return _step(method, method.loss, dim=dim, batch=batch, device=device)


def dense_step(dim: int, batch: int, device: torch.device) -> Step:
    """The whole matrix of pairs at once."""
    method = Vacsr(VacsrConfig(), dim=dim)
    return _step(method, method.loss, dim=dim, batch=batch, device=device)


def strip_step(dim: int, batch: int, device: torch.device) -> Step:
    """Strip by strip, with gradients taken on the way."""
    method = Vacsr(VacsrConfig(), dim=dim)
    rows = strip_rows(method, max(1, _PAIRS[device.type] // batch), rows=batch, columns=batch)
    loss = method.loss if rows == batch else StripLoss(method.loss, method, rows)
    return _step(method, loss, dim=dim, batch=batch, device=device)


LOSSES = (
    Loss("sigmoid", sigmoid_step),
    Loss("adapter, dense", dense_step),
    Loss(_STRIPS, strip_step),
)


def _step(method: Method, loss: PairLoss, *, dim: int, batch: int, device: torch.device) -> Step:
    """Forward and backward from fixed unit vectors, without an optimiser."""
    assert isinstance(method, nn.Module), "a method is a module"
    method.to(device).train()
    generator = torch.Generator().manual_seed(0)
    v, t = (_leaf(batch, dim, generator, device) for _ in range(2))
    ids = torch.arange(batch, device=device)

    def step() -> None:
        torch.autograd.backward(loss(Embedding(v), Embedding(t), batch_block(ids, seed=0, step=0)).total)
        for tensor in (v, t, *method.parameters()):
            tensor.grad = None

    return step


def _leaf(batch: int, dim: int, generator: torch.Generator, device: torch.device) -> Tensor:
    unit = functional.normalize(torch.randn(batch, dim, generator=generator), dim=1)
    return unit.to(device).requires_grad_()


def _compare(rows: list[dict[str, Cell]]) -> None:
    """With the dense adapter at the same batch size."""
    dense = {row["batch"]: row for row in rows if row["way"] == "adapter, dense"}
    for row in rows:
        for key in ("ms", "peak_mib"):
            own, other = row.get(key), dense[row["batch"]].get(key)
            if isinstance(own, float) and isinstance(other, float) and other > 0:
                row[f"of_dense_{key.removeprefix('peak_')}"] = own / other
