"""What a method costs: parameters, and the time and memory of a step in training and in inference.

Photos are random and captions fill the context, so that nothing but the arithmetic is timed; cached features are the
data's own. Memory is CUDA's peak of allocated bytes, on a CPU the growth of the process at its peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vacsr.backbones import scheme_of
from vacsr.config import DataConfig, Recipe
from vacsr.data import PhotoSet
from vacsr.data.photos import ArrayPhotos
from vacsr.errors import UsageError
from vacsr.methods.base import Embedding
from vacsr.model import MatchingModel
from vacsr.scoring.folded import BlockScorer
from vacsr.train.assemble import Parts, assemble
from vacsr.train.batches import batch_order
from vacsr.train.feed import Batch
from vacsr.train.precision import matmul_precision
from vacsr.train.recipe import training_data

Step = Callable[[], object]
_WARM = {"cuda": 10, "cpu": 2}  # steps that compile, capture and fill caches
_SIDE, _WORDS, _CACHE_GB = 224, 120, 64.0
_GIB = 2**30


class StepCost(NamedTuple):
    """Mean over steps."""

    ms: float
    images_per_s: float
    peak_gib: float | None
    """None where the system does not say."""


class Efficiency(NamedTuple):
    """Of one method. Parameters in millions."""

    parameters: float
    method_parameters: float
    """Those beyond towers, pooling and heads of one network."""
    inference: StepCost
    training: StepCost
    steps: int
    where: str
    """GPU or CPU, and torch."""

    def to_json(self) -> dict[str, Any]:
        """As a result of a report."""
        costs = {"inference": self.inference._asdict(), "training": self.training._asdict()}
        return {**self._asdict(), **costs}


def measure_recipe(recipe: Recipe, *, steps: int = 100) -> Efficiency:
    """Build the recipe's model and time its steps, inference first: gradients and moments are not part of that."""
    before = _resident()
    batch = recipe.train.batch_size
    parts = _assemble(recipe)
    with matmul_precision(recipe.train.precision):
        inference = inference_step(parts, batch, precision=recipe.train.precision)
        inferring = step_cost(inference, batch=batch, device=parts.device, steps=steps, before=before)
        parts.model.train()
        training = step_cost(training_step(parts, batch), batch=batch, device=parts.device, steps=steps, before=before)
    total, own = count_parameters(parts.model)
    return Efficiency(total / 1e6, own / 1e6, inferring, training, steps, where_it_runs(parts.device))


def _assemble(recipe: Recipe) -> Parts:
    """Random photos for towers, the training split for cached features."""
    cached = scheme_of(recipe.backbone.spec).cached
    pairs = training_data(recipe.data).train if cached else random_photos(recipe.train.batch_size, words=_WORDS)
    reading = DataConfig(cache_gb=_CACHE_GB)
    return assemble(recipe.method, pairs, recipe.train, backbone=recipe.backbone, dev=None, reading=reading)


def random_photos(batch: int, *, words: int) -> PhotoSet:
    """Two batches of photos, one caption each, all captions of the same length."""
    generator = np.random.default_rng(0)
    names = tuple(f"{row:04d}" for row in range(2 * batch))
    pixels = generator.integers(0, 256, (len(names), _SIDE, _SIDE, 3), dtype=np.uint8)
    captions = tuple(" ".join(generator.choice(["dog", "cat", "car", "sea"], words)) for _ in names)
    return PhotoSet(ArrayPhotos(pixels, names), names, captions, names, torch.arange(len(names)))


def count_parameters(model: MatchingModel) -> tuple[int, int]:
    """All of them, and those that the method adds to towers, pooling and heads."""
    total = sum(parameter.numel() for parameter in model.parameters())
    plain = [model.backbone, model.image_head, model.text_head, model.image_pool, model.text_pool]
    known = sum(p.numel() for module in plain for p in module.parameters())
    # A variance branch lies in the towers, and is the method's.
    known -= sum(p.numel() for branch in model.backbone.variance_params().values() for _, p in branch)
    return total, total - known


def training_step(parts: Parts, batch: int) -> Step:
    """One training step after the other."""
    if len(parts.feed.data.texts) < batch:
        raise UsageError(f"a batch of {batch} from {len(parts.feed.data.texts)} captions — set train.batch_size lower")

    def numbered() -> Iterator[tuple[int, Batch]]:
        number = 0
        while True:
            for rows in batch_order(len(parts.feed.data.texts), batch=batch, seed=0, epoch=number):
                yield number, Batch(rows.to(parts.device))
                number += 1

    batches = numbered()

    def step() -> None:
        number, rows = next(batches)
        parts.step(rows, number)

    return step


def inference_step(parts: Parts, batch: int, *, precision: str) -> Step:
    """Embed a batch and score all its pairs."""
    model, data, device = parts.model.eval(), parts.feed.data, parts.device.type
    assert data.images is not None, "a few batches fit on the device"
    images, texts = data.images[:batch], data.texts[:batch]
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
    _forget_peak(device)
    for _ in range(_WARM[device.type]):
        step()
    _wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    seconds = (time.perf_counter() - started) / steps
    return StepCost(1e3 * seconds, batch / seconds, _peak(device, before))


def where_it_runs(device: torch.device) -> str:
    """For people."""
    threads = f"{torch.get_num_threads()} thread{'' if torch.get_num_threads() == 1 else 's'}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads}"
    return f"{name}, torch {torch.__version__}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> None:
    """Let the peak start from what is held now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak(device: torch.device, before: int | None) -> float | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    peak = _status("VmHWM")
    return None if peak is None or before is None else max(0, peak - before) / _GIB


def _resident() -> int | None:
    return _status("VmRSS")


def _status(name: str) -> int | None:
    """Bytes, as Linux tells them; None elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
