"""The shots as batches of augmented photos. Every draw is a function of seed, pass over the shots, and shot."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Lock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vacsr.backbones.augment import DRAWS, randaugment
from vacsr.backbones.images import PhotoTransform
from vacsr.data.fewshot import LabelledPhotos
from vacsr.data.photos import Photos
from vacsr.errors import UsageError
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.methods.base import ShotBatch
from vacsr.noise import RowNoise, Stream
from vacsr.train.data import batch_order

_TRIES = 10
_NARROW, _WIDE = 3 / 4, 4 / 3  # of a crop's width over its height


def crop_box(
    width: int, height: int, *, draws: Sequence[float], scale: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random resized crop: a share of the area from ``scale``, an aspect of 3/4 to 4/3.

    Four draws in (0, 1) for each of ten tries: area, aspect, top, left; the first box that fits into the photo counts.
    If none fits, the largest centred box with an aspect in that range.

    >>> crop_box(100, 50, draws=[0.5] * 40, scale=(0.5, 0.5))
    (25, 0, 75, 50)
    """
    low, high = min(scale), max(scale)
    for start in range(0, 4 * _TRIES, 4):
        area, aspect, top, left = draws[start : start + 4]
        pixels = width * height * (low + (high - low) * area)
        ratio = math.exp(math.log(_NARROW) + (math.log(_WIDE) - math.log(_NARROW)) * aspect)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = (min(int(draw * (room + 1)), room) for draw, room in ((left, width - w), (top, height - h)))
            return x, y, x + w, y + h
    w, h = min(width, round(height * _WIDE)), min(height, round(width / _NARROW))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


@dataclass(frozen=True)
class View:
    """The augmentation of a photo: ``crop`` is a random resized crop and a flip, ``randaugment`` the whole photo
    squeezed into the square and then RandAugment. In the tower's size and with its filter (CLIP: bicubic)."""

    kind: str
    config: FewshotTrainConfig
    transform: PhotoTransform

    @property
    def draws(self) -> int:
        """Draws in (0, 1) per photo."""
        return 4 * _TRIES + 1 if self.kind == "crop" else DRAWS * self.config.randaugment_operations

    def __call__(self, photo: Image.Image, draws: Sequence[float]) -> Image.Image:
        """An RGB square."""
        c = self.config
        if self.kind != "crop":
            return randaugment(self._square(photo), draws, magnitude=c.randaugment_magnitude)
        square = self._square(photo.crop(crop_box(photo.width, photo.height, draws=draws, scale=c.crop)))
        return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws[-1] < c.flip else square

    def _square(self, photo: Image.Image) -> Image.Image:
        size = self.transform.size
        return photo.resize((size, size), Image.Resampling[self.transform.resample.upper()])


class CachedPhotos:
    """Decoded photos, cached while they fit into ``limit`` bytes; safe to use from several threads."""

    def __init__(self, photos: Photos, *, limit: float) -> None:
        self.photos, self.free = photos, limit
        self.cache: dict[int, Image.Image] = {}
        self.lock = Lock()

    def open(self, row: int) -> Image.Image:
        """The photo in full size, since a crop may show any part of it."""
        cached = self.cache.get(row)
        if cached is not None:
            return cached
        photo = self.photos.open(row)
        size = 4 * photo.width * photo.height  # of RGB in PIL
        with self.lock:
            if row not in self.cache and size <= self.free:
                self.cache[row] = photo
                self.free -= size
        return photo


class ShotLoader:
    """The dataloader of the training shots. Threads prepare batches ahead of need, one thread per batch."""

    def __init__(
        self, shots: LabelledPhotos, config: FewshotTrainConfig, *, transform: PhotoTransform, second: bool = False
    ) -> None:
        self.shots, self.config = shots, config
        kinds = (config.view, config.second_view) if second else (config.view,)
        self.views = [View(kind, config, transform) for kind in kinds]
        self.photos = CachedPhotos(shots.photos, limit=config.cache_gb * 2**30)
        self.batch_size = min(config.batch_size, len(shots))
        self.batches_per_pass = len(shots) // self.batch_size  # what does not fill a batch comes in other passes
        batches = config.steps_per_epoch or self.batches_per_pass
        self.steps_per_epoch = batches // config.accumulate * config.accumulate
        if not self.steps_per_epoch:
            message = f"an epoch has {batches} batches, train.accumulate={config.accumulate}"
            raise UsageError(f"{message} — lower train.accumulate or train.batch_size, or set train.steps_per_epoch")

    def stream(self, start: int, stop: int) -> Iterator[ShotBatch]:
        """The batches of the steps from ``start`` up to ``stop``; a batch depends on its step only."""
        workers = self.config.workers or os.cpu_count() or 1
        steps = iter(range(start, stop))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="shots")
        try:
            queue = deque(pool.submit(self._batch, step) for step in islice(steps, workers))
            while queue:
                batch = queue.popleft().result()
                queue.extend(pool.submit(self._batch, step) for step in islice(steps, 1))
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def pass_and_rows(self, step: int) -> tuple[int, Tensor]:
        """The pass over the shots that a step belongs to, and its shots. An epoch is one or more passes, the last
        perhaps incomplete. -> [B]"""
        epoch, index = divmod(step, self.steps_per_epoch)
        passes = -(-self.steps_per_epoch // self.batches_per_pass)
        number, position = divmod(index, self.batches_per_pass)
        number += epoch * passes
        order = batch_order(len(self.shots), batch=self.batch_size, seed=self.config.seed, epoch=number)
        return number, next(islice(order, position, None))

    def _batch(self, step: int) -> ShotBatch:
        """Pixels as uint8 [B, 3, S, S], on the CPU."""
        number, rows = self.pass_and_rows(step)
        noise = RowNoise(self.config.seed, torch.tensor(number), rows, Stream.IMAGE)
        photos = [self.photos.open(row) for row in rows.tolist()]
        views: list[Tensor] = []
        for view, stream in zip(self.views, (Stream.FIRST_VIEW, Stream.SECOND_VIEW), strict=False):
            draws = noise.other(stream).uniform(view.draws).tolist()
            squares = [np.asarray(view(photo, row)) for photo, row in zip(photos, draws, strict=True)]
            views.append(torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous())
        return ShotBatch(
            views[0], self.shots.labels[rows], views[1] if len(views) > 1 else None,
            seed=self.config.seed, step=step, steps=self.config.epochs * self.steps_per_epoch,
        )  # fmt: skip
