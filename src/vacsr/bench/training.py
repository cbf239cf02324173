"""The cost of a training step.

`vacsr bench training` times forward and backward of the loss alone over batch sizes: the adapter's loss over the whole
matrix of pairs and in strips, and the sigmoid loss beside them. `measure_recipe` counts the parameters of a recipe's
model and times its whole steps, in training and in inference: photos are random and captions fill the context, so that
only the arithmetic is timed; cached features are the data's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, count
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import profile
from torch.nn import functional

from vacsr.backbones import scheme_of
from vacsr.bench import BenchResult, Log, Prepared, Step, Way, describe_device, measure, seconds_per_step
from vacsr.config import DataConfig, Recipe
from vacsr.data import PhotoSet
from vacsr.data.photos import ArrayPhotos
from vacsr.methods.base import Embedding, Method
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.model import MatchingModel
from vacsr.objective import batch_block
from vacsr.scoring.folded import BlockScorer
from vacsr.strips import PairLoss, StripLoss, strip_rows
from vacsr.train.data import Batch, training_data
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Trainer

SIZES: dict[str, dict[str, Any]] = {
    "small": {"dim": 256, "batches": (32, 64, 128)},
    "coco": {"dim": 1024, "batches": (128, 256, 512, 1024, 2048, 4096)},
}
COLUMNS = {
    "way": "loss", "batch": "batch", "ms": "ms a step", "peak_mib": "peak MiB", "of_dense_ms": "time / dense",
    "of_dense_mib": "memory / dense",
}  # fmt: skip
SIGMOID, DENSE = "sigmoid", "adapter, dense"
_NOTE = "Forward and backward of the loss alone; the fastest round, and the most memory held beyond weights and inputs."
MIB, GIB = 2**20, 2**30


def run(
    device: torch.device, log: Log = lambda _: None, *, dim: int, batches: Sequence[int], tile: int | None = None
) -> BenchResult:
    """Random embeddings; a loss that does not fit in memory says so and the others go on.

    A strip has as many pairs as a square tile of edge ``tile``, by default 128 on a GPU and 32 on a CPU.
    """
    rows: list[dict[str, Any]] = []
    tile = tile or (128 if device.type == "cuda" else 32)
    for batch in batches:
        strips = "adapter in one strip: dense" if batch <= tile else "adapter in strips"
        heights = {SIGMOID: batch, DENSE: batch, strips: tile**2 // batch}
        ways = [
            Way({"way": name, "batch": batch}, partial(_prepare, name, height, dim, batch, device))
            for name, height in heights.items()
        ]
        rows += _with_ratios(measure(ways, device=device, log=log))
    settings, plotted = {"d": dim, "tile": tile}, ("ms", "peak_mib")
    return BenchResult("training", describe_device(device), settings, rows, COLUMNS, plotted, (_NOTE,), label="bar")


def _prepare(name: str, rows: int, dim: int, batch: int, device: torch.device) -> Prepared:
    """A loss in strips of so many rows, all of them at most; with its peak memory, which also shows whether it fits."""
    method: Method = Sigmoid(SigmoidConfig(), dim=dim) if name == SIGMOID else Vacsr(VacsrConfig(), dim=dim)
    rows = batch if rows >= batch else strip_rows(method, max(1, rows), rows=batch, columns=batch)
    loss = method.loss if rows == batch else StripLoss(method.loss, method, rows)
    step = loss_step(method, loss, dim=dim, batch=batch, device=device)
    step()
    return Prepared(step, {"peak_mib": peak_mib(step, device=device)})


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times in milliseconds, and ratios to the dense loss of the same batch size."""
    for row in rows:
        row["bar"] = f"{row['way']}, B={row['batch']}"
        row |= {name: 1e3 * row.pop(key) for key, name in (("seconds", "ms"), ("median", "median_ms")) if key in row}
    dense = next(row for row in rows if row["way"] == DENSE)
    for row in rows:
        for key, ratio in (("ms", "of_dense_ms"), ("peak_mib", "of_dense_mib")):
            if key in row and dense.get(key):
                row[ratio] = row[key] / dense[key]
    return rows


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


def measure_recipe(recipe: Recipe, *, steps: int) -> dict[str, Any]:
    """Build the recipe's model and time its steps, inference first: gradients and moments are not part of that.

    Parameters are in millions, the method's own being those beyond towers, pooling and heads of one network.
    """
    batch, cached = recipe.train.batch_size, scheme_of(recipe.backbone.spec).cached
    pairs = training_data(recipe.data).train if cached else random_photos(batch, words=120)
    reading = DataConfig(cache_gb=64.0)
    task = RetrievalTask(recipe.method, pairs, recipe.train, backbone=recipe.backbone, reading=reading)
    trainer = Trainer(task, recipe.train)  # compiles, where the recipe says so
    cost = partial(step_cost, batch=batch, device=task.device, steps=steps)
    with matmul_precision(recipe.train.precision):
        inference = cost(inference_step(task))
        task.model.train()
        training = cost(training_step(trainer))
    total, added = count_parameters(task.model)
    return {
        "parameters": total / 1e6, "method_parameters": added / 1e6, "inference": inference, "training": training,
        "steps": steps, "where": describe_device(task.device),
    }  # fmt: skip


def random_photos(batch: int, *, words: int) -> PhotoSet:
    """Two batches of photos, one caption each, all captions of the same length."""
    generator = np.random.default_rng(0)
    names = tuple(f"{row:04d}" for row in range(2 * batch))
    pixels = generator.integers(0, 256, (len(names), 224, 224, 3), dtype=np.uint8)
    captions = tuple(" ".join(generator.choice(["dog", "cat", "car", "sea"], words)) for _ in names)
    return PhotoSet(ArrayPhotos(pixels, names), names, captions, names, torch.arange(len(names)))


def count_parameters(model: MatchingModel) -> tuple[int, int]:
    """All parameters, and those that the method adds to towers, pooling and heads."""
    total = model.count_parameters()
    plain = [model.backbone, model.image_head, model.text_head, model.image_pool, model.text_pool]
    shared = sum(p.numel() for module in plain for p in module.parameters())
    # A variance branch is part of the towers but belongs to the method; unused parameters were not counted.
    shared -= sum(p.numel() for tower in model.backbone.tower_params().values() for _, p in tower.variance)
    shared -= sum(p.numel() for p in model.backbone.unused_params())
    return total, total - shared


def training_step(trainer: Trainer) -> Step:
    """One training step after the other."""
    task: Any = trainer.task
    batches = enumerate(chain.from_iterable(map(task.order, count())))

    def step() -> None:
        number, rows = next(batches)
        trainer.step(Batch(rows.to(task.device)), number)

    return step


def inference_step(task: RetrievalTask) -> Step:
    """Embed a batch and score all its pairs."""
    model, loader, batch, half = task.model.eval(), task.loader, task.config.batch_size, task.config.precision == "bf16"
    assert isinstance(loader.images, torch.Tensor), "a few batches fit on the device"
    images, texts = loader.images[:batch], loader.texts[:batch]
    scorer = BlockScorer(model.method, dtype=torch.bfloat16 if half else torch.float32)

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast(task.device.type, torch.bfloat16, enabled=half):
            embeddings = model.embed_images(images), model.embed_texts(texts)
        v, t = (x.map(torch.Tensor.float) for x in embeddings)
        scorer.block(v, t)

    return step


def step_cost(step: Step, *, batch: int, device: torch.device, steps: int, groups: int = 1) -> dict[str, float | None]:
    """Warm up, then :func:`seconds_per_step`. The peak is CUDA's of allocated bytes; None on a CPU."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(10 if gpu else 2):  # compiles, captures and fills caches
        step()
    seconds = seconds_per_step(step, device=device, steps=steps, groups=groups)
    peak = torch.cuda.max_memory_allocated(device) / GIB if gpu else None
    return {"ms": 1e3 * seconds, "images_per_s": batch / seconds, "peak_gib": peak}


def peak_mib(work: Step, *, device: torch.device) -> float:
    """The most that a call allocates beyond what was held before it, as torch's allocator counts it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    with profile(profile_memory=True, use_kineto=False) as profiler:
        work()
    changes = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    live: list[int] = list(accumulate((event.nbytes() for event in changes), initial=0))
    return max(now - lowest for now, lowest in zip(live, accumulate(live, min), strict=True)) / MIB
