"""The shots as batches of augmented photos. Every draw is a function of seed, pass over the shots, and shot."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vacsr.backbones.augment import DRAWS, randaugment
from vacsr.backbones.images import PhotoTransform
from vacsr.data.fewshot import LabelledPhotos
from vacsr.data.photos import Photos
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.noise import RowNoise, Stream
from vacsr.train.data import batch_order

_TRIES = 10
_NARROW, _WIDE = 3 / 4, 4 / 3  # of a crop's width over its height
_PIXEL_BYTES = 4  # of an RGB pixel in PIL

Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a part of a photo, in pixels."""


def crop_box(width: int, height: int, *, draws: Sequence[float], scale: tuple[float, float]) -> Box:
    """The box of a random resized crop: an area whose share is from ``scale``, an aspect from 3/4 to 4/3.

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
            return _box(_integer(left, width - w), _integer(top, height - h), w, h)
    w, h = min(width, round(height * _WIDE)), min(height, round(width / _NARROW))
    return _box((width - w) // 2, (height - h) // 2, w, h)


def _box(left: int, top: int, width: int, height: int) -> Box:
    return left, top, left + width, top + height


def _integer(draw: float, largest: int) -> int:
    """Uniform from 0 to ``largest``."""
    return min(int(draw * (largest + 1)), largest)


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
            operations, magnitude = c.randaugment_operations, c.randaugment_magnitude
            return randaugment(self._square(photo), draws, operations=operations, magnitude=magnitude)
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
        size = _PIXEL_BYTES * photo.width * photo.height
        with self.lock:
            if row not in self.cache and size <= self.free:
                self.cache[row] = photo
                self.free -= size
        return photo


class PixelBatch(NamedTuple):
    """The photos of one step before they go to the device."""

    step: int
    rows: Tensor
    """[B] of the shots."""
    first: Tensor
    """uint8 [B, 3, S, S]"""
    second: Tensor | None
    """Another view, if asked for."""


class ShotLoader:
    """The dataloader of the training shots. Threads prepare batches ahead of need, one thread per batch."""

    def __init__(
        self, shots: LabelledPhotos, config: FewshotTrainConfig, *, transform: PhotoTransform, second: bool = False
    ) -> None:
        self.shots, self.config = shots, config
        kinds = (config.view, config.second_view) if second else (config.view,)
        self.views = [View(kind, config, transform) for kind in kinds]
        self.photos = CachedPhotos(shots.photos, limit=config.cache_gb * 2**30)

    @property
    def batch_size(self) -> int:
        """All shots where they are fewer than a batch."""
        return min(self.config.batch_size, len(self.shots))

    @property
    def batches_per_pass(self) -> int:
        """A last batch that is not full is left out; its shots are in other passes."""
        return len(self.shots) // self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """As many as the shots fill, unless the recipe sets them."""
        return self.config.steps_per_epoch or self.batches_per_pass

    def stream(self, start: int, stop: int) -> Iterator[PixelBatch]:
        """The batches of the steps from ``start`` up to ``stop``; a batch depends on its step only."""
        workers = self.config.workers or os.cpu_count() or 1
        steps = iter(range(start, stop))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="shots")
        try:
            queue: deque[Future[PixelBatch]] = deque(pool.submit(self._batch, step) for step in islice(steps, workers))
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

    def _batch(self, step: int) -> PixelBatch:
        number, rows = self.pass_and_rows(step)
        noise = RowNoise(self.config.seed, torch.tensor(number), rows, Stream.IMAGE)
        photos = [self.photos.open(row) for row in rows.tolist()]
        streams = (Stream.FIRST_VIEW, Stream.SECOND_VIEW)
        pixels = [
            _stack(photos, view, noise.other(stream).uniform(view.draws).tolist())
            for view, stream in zip(self.views, streams, strict=False)
        ]
        return PixelBatch(step, rows, pixels[0], pixels[1] if len(pixels) > 1 else None)


def _stack(photos: Sequence[Image.Image], view: View, draws: Sequence[Sequence[float]]) -> Tensor:
    """-> uint8 [B, 3, S, S]"""
    squares = [np.asarray(view(photo, row)) for photo, row in zip(photos, draws, strict=True)]
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous()
