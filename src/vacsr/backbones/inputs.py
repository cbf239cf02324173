"""From a data set to what towers take: photos as squares of bytes, captions as rows of tokens."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vacsr.backbones.base import Backbone
from vacsr.backbones.preprocess import PhotoTransform
from vacsr.data.photos import Photos, PhotoSet

Progress = Callable[[int, int], None]
"""Told how many of how many are done."""

_CHUNK = 256  # photos between two words to the progress display


class Reader(Protocol):
    """Photos by rows, in the order asked for."""

    def stream(self, batches: Iterable[Sequence[int]], *, ahead: int = 2) -> Iterator[Tensor]:
        """The photos of each batch of rows, some batches ahead of need. -> uint8 [B, 3, S, S]"""


@dataclass(frozen=True, eq=False)
class PhotoReader:
    """Decodes photos to squares in threads; PIL lets go of Python's lock while it works."""

    photos: Photos
    transform: PhotoTransform
    size: int = 0
    """Side of the squares; 0 takes the transform's own."""
    workers: int = 0
    """Threads; 0 takes one per core."""
    draft: bool = False
    """Let JPEG be decoded at a fraction where that still leaves all pixels the square needs. Quicker, and the pixels
    are not quite those of the tower's own processor: for training only."""

    def __len__(self) -> int:
        return len(self.photos)

    @property
    def side(self) -> int:
        """Of the squares that come out."""
        return self.size or self.transform.size

    @property
    def bytes(self) -> int:
        """What all of them take in memory."""
        return len(self.photos) * 3 * self.side**2

    def one(self, row: int) -> Tensor:
        """uint8 [3, S, S]"""
        enough = self.transform.shorter_side(size=self.side) if self.draft else 0
        return self.transform.pixels(self.photos.open(row, side=enough), size=self.side)

    def stream(self, batches: Iterable[Sequence[int]], *, ahead: int = 2) -> Iterator[Tensor]:
        """Decoded batch by batch, ``ahead`` of them at work while one is used. -> uint8 [B, 3, S, S]"""
        coming = iter(batches)
        pool = ThreadPoolExecutor(self.workers or os.cpu_count() or 1, thread_name_prefix="photos")
        try:
            queue: deque[list[Future[Tensor]]] = deque()
            for rows in islice(coming, ahead + 1):
                queue.append([pool.submit(self.one, row) for row in rows])
            while queue:
                batch = torch.stack([photo.result() for photo in queue.popleft()])
                for rows in islice(coming, 1):
                    queue.append([pool.submit(self.one, row) for row in rows])
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def read_all(self, progress: Progress | None = None) -> Tensor:
        """Every photo. -> uint8 [N, 3, S, S]"""
        whole = torch.empty(len(self.photos), 3, self.side, self.side, dtype=torch.uint8)
        chunks = [range(start, min(start + _CHUNK, len(whole))) for start in range(0, len(whole), _CHUNK)]
        for rows, batch in zip(chunks, self.stream(chunks), strict=True):
            whole[rows.start : rows.stop] = batch
            if progress is not None:
                progress(rows.stop, len(whole))
        return whole


@dataclass(frozen=True, eq=False)
class KeptPhotos:
    """Photos that were decoded once and lie in memory. uint8 [N, 3, S, S]"""

    pixels: Tensor

    def stream(self, batches: Iterable[Sequence[int]], *, ahead: int = 2) -> Iterator[Tensor]:
        """Looked up when asked for."""
        return (self.pixels[torch.as_tensor(rows, dtype=torch.int64, device=self.pixels.device)] for rows in batches)


class TowerInputs(NamedTuple):
    """A data set as towers take it."""

    images: Reader
    texts: Tensor  # [M, L] int32, −1 for padding


def tower_inputs(
    backbone: Backbone,
    pairs: PhotoSet,
    *,
    size: int = 0,
    workers: int = 0,
    cache_gb: float = 0.0,
    draft: bool = False,
    progress: Progress | None = None,
) -> TowerInputs:
    """Tokens of every caption, and photos: decoded now where they all fit into ``cache_gb``, else when asked for.

    ``draft``: see :class:`PhotoReader`; training sets it, what is measured does not.
    """
    reader = PhotoReader(pairs.photos, backbone.transform, size=size, workers=workers, draft=draft)
    kept = reader.bytes <= cache_gb * 2**30
    return TowerInputs(
        KeptPhotos(reader.read_all(progress)) if kept else reader,
        backbone.tokenize(pairs.captions),
    )
