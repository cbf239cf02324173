"""The shots as batches of augmented squares. Every draw is a function of seed, pass over the shots, and shot."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vacsr.backbones.preprocess import PhotoTransform
from vacsr.data.fewshot import LabelledPhotos
from vacsr.data.photos import Photos
from vacsr.fewshot.config import FewshotTrainConfig
from vacsr.fewshot.views import View, build_view
from vacsr.noise import RowNoise, Stream
from vacsr.train.data import batch_order

_PIXEL = 4  # bytes that PIL keeps for an RGB pixel


class ShotPixels(NamedTuple):
    """One batch before it goes to the device."""

    step: int
    rows: Tensor
    """[B] of the shots."""
    first: Tensor
    """uint8 [B, 3, S, S]"""
    second: Tensor | None
    """Another view, where one is asked for."""


class _Work(NamedTuple):
    """What a thread needs for one batch."""

    step: int
    rows: Tensor
    draws: list[list[list[float]]]
    """For each view, for each row."""


class CachedPhotos:
    """Decoded photos, kept while they fit into ``limit`` bytes; several threads may open at once."""

    def __init__(self, photos: Photos, *, limit: float) -> None:
        self.photos, self.room = photos, limit
        self.kept: dict[int, Image.Image] = {}
        self.lock = Lock()

    def open(self, row: int) -> Image.Image:
        """The whole photo, never a draft of it: a crop may show any part at full size."""
        found = self.kept.get(row)
        if found is not None:
            return found
        photo = self.photos.open(row)
        size = _PIXEL * photo.width * photo.height
        with self.lock:
            if row not in self.kept and size <= self.room:
                self.kept[row] = photo
                self.room -= size
        return photo


class ShotFeed:
    """The training shots, step by step. Batches are made in threads, some ahead of need, each by one thread."""

    def __init__(
        self, shots: LabelledPhotos, config: FewshotTrainConfig, *, transform: PhotoTransform, second: bool = False
    ) -> None:
        self.shots, self.config = shots, config
        kinds = (config.view, config.second_view) if second else (config.view,)
        self.views: list[View] = [build_view(kind, config, transform=transform) for kind in kinds]
        self.photos = CachedPhotos(shots.photos, limit=config.cache_gb * 2**30)

    @property
    def batch(self) -> int:
        """Photos of a step: all shots where there are fewer than a batch."""
        return min(self.config.batch_size, len(self.shots))

    @property
    def batches_per_pass(self) -> int:
        """A last batch that is not full is left out; its shots come round in other passes."""
        return len(self.shots) // self.batch

    @property
    def steps_per_epoch(self) -> int:
        """As many as the shots fill, unless the recipe says how many."""
        return self.config.steps_per_epoch or self.batches_per_pass

    def stream(self, start: int, stop: int) -> Iterator[ShotPixels]:
        """The batches of the steps from ``start`` up to ``stop``: the same ones, wherever one starts."""
        workers = self.config.workers or os.cpu_count() or 1
        coming = self._works(start, stop)
        pool = ThreadPoolExecutor(workers, thread_name_prefix="shots")
        try:
            queue: deque[Future[ShotPixels]] = deque(pool.submit(self._make, work) for work in islice(coming, workers))
            while queue:
                made = queue.popleft().result()
                queue.extend(pool.submit(self._make, work) for work in islice(coming, 1))
                yield made
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def rows_of(self, step: int) -> list[int]:
        """The shots of one step, for messages."""
        return next(self._works(step, step + 1)).rows.tolist()

    def _works(self, start: int, stop: int) -> Iterator[_Work]:
        """An epoch is one or more passes over the shots, the last perhaps cut short."""
        turns = -(-self.steps_per_epoch // self.batches_per_pass)
        known, order, draws = -1, [], []  # type: tuple[int, list[Tensor], list[Tensor]]
        for step in range(start, stop):
            epoch, place = divmod(step, self.steps_per_epoch)
            turn, at = divmod(place, self.batches_per_pass)
            if known != epoch * turns + turn:
                known = epoch * turns + turn
                order = list(batch_order(len(self.shots), batch=self.batch, seed=self.config.seed, epoch=known))
                draws = self._draws(known)
            yield _Work(step, order[at], [of_view[order[at]].tolist() for of_view in draws])

    def _draws(self, turn: int) -> list[Tensor]:
        """For each view, [N, lanes]"""
        noise = RowNoise(self.config.seed, torch.tensor(turn), torch.arange(len(self.shots)), Stream.IMAGE)
        streams = (Stream.FIRST_VIEW, Stream.SECOND_VIEW)
        return [
            noise.other(stream).uniform(view.lanes)
            for view, stream in zip(self.views, streams[: len(self.views)], strict=True)
        ]

    def _make(self, work: _Work) -> ShotPixels:
        photos = [self.photos.open(row) for row in work.rows.tolist()]
        made = [_stack(photos, view, draws) for view, draws in zip(self.views, work.draws, strict=True)]
        return ShotPixels(work.step, work.rows, made[0], made[1] if len(made) > 1 else None)


def _stack(photos: Sequence[Image.Image], view: View, draws: Sequence[Sequence[float]]) -> Tensor:
    """-> uint8 [B, 3, S, S]"""
    squares = [np.asarray(view(photo, own)) for photo, own in zip(photos, draws, strict=True)]
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).contiguous()
