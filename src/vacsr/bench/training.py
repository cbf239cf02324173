"""The cost of a training step.

`vacsr bench training` times forward and backward of the loss alone over batch sizes: the adapter's loss over the whole
matrix of pairs and in strips, and the sigmoid loss beside them. `measure_recipe` counts the parameters of a recipe's
model and times its whole steps, in training and in inference: photos are random and captions fill the context, so that
only the arithmetic is timed; cached features are the data's own. Memory is CUDA's peak of allocated bytes, on a CPU the
growth of the process at its peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from vacsr.backbones import scheme_of
from vacsr.bench import BenchResult, Cell
from vacsr.bench.stopwatch import (
    GIB,
    Prepared,
    Step,
    Way,
    describe_device,
    measure,
    peak_mib,
    process_bytes,
    reset_peak_memory,
    seconds_per_step,
)
from vacsr.config import DataConfig, Recipe
from vacsr.data import PhotoSet
from vacsr.data.photos import ArrayPhotos
from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.model import MatchingModel
from vacsr.pairwise import batch_block
from vacsr.scoring.folded import BlockScorer
from vacsr.strips import PairLoss, StripLoss, strip_rows
from vacsr.train.data import Batch, batch_order, training_data
from vacsr.train.retrieval import RetrievalTask, retrieval_task
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Trainer


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


_WARM_UP = {"cuda": 10, "cpu": 2}  # steps that compile, capture and fill caches
_SIDE, _WORDS, _CACHE_GB = 224, 120, 64.0


class StepCost(NamedTuple):
    """Means over steps."""

    ms: float
    images_per_s: float
    peak_gib: float | None
    """None where the system does not say."""


class Efficiency(NamedTuple):
    """Of one method; parameters in millions."""

    parameters: float
    method_parameters: float
    """Those beyond towers, pooling and heads of one network, in millions."""
    inference: StepCost
    training: StepCost
    steps: int
    where: str
    """GPU or CPU, and torch."""

    def to_json(self) -> dict[str, Any]:
        """For a report."""
        costs = {"inference": self.inference._asdict(), "training": self.training._asdict()}
        return {**self._asdict(), **costs}


def measure_recipe(recipe: Recipe, *, steps: int = 100) -> Efficiency:
    """Build the recipe's model and time its steps, inference first: gradients and moments are not part of that."""
    before = process_bytes("VmRSS")
    batch = recipe.train.batch_size
    task = _task(recipe)
    trainer = Trainer(task, recipe.train)  # compiles, where the recipe says so
    with matmul_precision(recipe.train.precision):
        inference = inference_step(task, batch, precision=recipe.train.precision)
        inferring = step_cost(inference, batch=batch, device=task.device, steps=steps, before=before)
        task.model.train()
        training = step_cost(training_step(trainer, batch), batch=batch, device=task.device, steps=steps, before=before)
    total, added = count_parameters(task.model)
    return Efficiency(total / 1e6, added / 1e6, inferring, training, steps, describe_device(task.device))


def _task(recipe: Recipe) -> RetrievalTask:
    """Random photos for towers, the training split for cached features."""
    cached = scheme_of(recipe.backbone.spec).cached
    pairs = training_data(recipe.data).train if cached else random_photos(recipe.train.batch_size, words=_WORDS)
    reading = DataConfig(cache_gb=_CACHE_GB)
    return retrieval_task(recipe.method, pairs, recipe.train, backbone=recipe.backbone, reading=reading)


def random_photos(batch: int, *, words: int) -> PhotoSet:
    """Two batches of photos, one caption each, all captions of the same length."""
    generator = np.random.default_rng(0)
    names = tuple(f"{row:04d}" for row in range(2 * batch))
    pixels = generator.integers(0, 256, (len(names), _SIDE, _SIDE, 3), dtype=np.uint8)
    captions = tuple(" ".join(generator.choice(["dog", "cat", "car", "sea"], words)) for _ in names)
    return PhotoSet(ArrayPhotos(pixels, names), names, captions, names, torch.arange(len(names)))


def count_parameters(model: MatchingModel) -> tuple[int, int]:
    """All parameters, and those that the method adds to towers, pooling and heads."""
    total = model.count_parameters()
    plain = [model.backbone, model.image_head, model.text_head, model.image_pool, model.text_pool]
    shared = sum(p.numel() for module in plain for p in module.parameters())
    # A variance branch is part of the towers but belongs to the method; unused parameters were not counted.
    shared -= sum(p.numel() for branch in model.backbone.variance_params().values() for _, p in branch)
    shared -= sum(p.numel() for p in model.backbone.unused_params())
    return total, total - shared


def training_step(trainer: Trainer, batch: int) -> Step:
    """One training step after the other."""
    assert isinstance(trainer.task, RetrievalTask), "retrieval is measured"
    device, count = trainer.task.device, len(trainer.task.loader.texts)
    if count < batch:
        raise UsageError(f"a batch of {batch} from {count} captions — set train.batch_size lower")

    def numbered() -> Iterator[tuple[int, Batch]]:
        number = 0
        while True:
            for rows in batch_order(count, batch=batch, seed=0, epoch=number):
                yield number, Batch(rows.to(device))
                number += 1

    batches = numbered()

    def step() -> None:
        number, rows = next(batches)
        trainer.step(rows, number)

    return step


def inference_step(task: RetrievalTask, batch: int, *, precision: str) -> Step:
    """Embed a batch and score all its pairs."""
    model, loader, device = task.model.eval(), task.loader, task.device.type
    assert loader.images is not None, "a few batches fit on the device"
    images, texts = loader.images[:batch], loader.texts[:batch]
    scorer = BlockScorer(model.method, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            v, t = model.embed_images(images), model.embed_texts(texts)
        scorer.block(_float(v), _float(t))

    return step


def _float(x: Embedding) -> Embedding:
    return Embedding(x.mean.float(), None if x.log_var is None else x.log_var.float())


def step_cost(step: Step, *, batch: int, device: torch.device, steps: int = 100, before: int | None = None) -> StepCost:
    """Warm up, then the mean over ``steps``. ``before``: bytes that the process held before the model."""
    reset_peak_memory(device)
    for _ in range(_WARM_UP[device.type]):
        step()
    seconds = seconds_per_step(step, device=device, steps=steps)
    return StepCost(1e3 * seconds, batch / seconds, _peak_gib(device, before))


def _peak_gib(device: torch.device, before: int | None) -> float | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = process_bytes("VmHWM")
    return None if peak is None or before is None else max(0, peak - before) / GIB
