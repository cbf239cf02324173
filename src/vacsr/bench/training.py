"""What a recipe costs: parameters of its model, and whole steps of training and of inference.

Photos are random and captions fill the context, so that only the arithmetic is timed; cached features are real data.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import torch

from vacsr.backbones import scheme_of
from vacsr.bench import Step, describe_device, seconds_per_step
from vacsr.config import DataConfig, Recipe
from vacsr.data import PhotoSet
from vacsr.data.photos import ArrayPhotos
from vacsr.model import MatchingModel
from vacsr.scoring.folded import BlockScorer
from vacsr.train.data import Batch, training_data
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Trainer

GIB = 2**30


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
