"""From photos to the squares that a tower sees, with PIL and torch alone: decode, resize, crop, normalise."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vacsr.errors import DataError

Triple = tuple[float, float, float]
Resample = Literal["bicubic", "bilinear"]

IMAGENET_MEAN: Triple = (0.485, 0.456, 0.406)
IMAGENET_STD: Triple = (0.229, 0.224, 0.225)
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)

_ROOM = 2**26  # pixels between photo and square: a long strip would be enlarged to more than memory holds
_AHEAD = 2  # batches that are read while one is used

T = TypeVar("T")
Progress = Callable[[int, int], None]  # called with how many of how many are done


@dataclass(frozen=True)
class PhotoTransform:
    """How a tower wants its photos."""

    size: int  # S, the side of the square
    mean: Triple = IMAGENET_MEAN  # per channel, of pixels in 0-1
    std: Triple = IMAGENET_STD
    resample: Resample = "bicubic"
    resize: Literal["whole", "center"] = "whole"  # the whole photo squeezed into the square, or its centre
    short: int = 0  # with `center`: the shorter side before the square is cut; 0 means S

    def with_size(self, size: int) -> PhotoTransform:
        """The same part of a photo in a square of another side."""
        return replace(self, size=size, short=round(size * self.short / self.size))

    def pixels(self, photo: Image.Image) -> Tensor:
        """The square as bytes. -> uint8 [3, S, S]

        A centre is cut as the public processors do: the longer side is rounded down, and so are the offsets.
        """
        side, short, (width, height) = self.size, self.shorter_side(), photo.size
        scaled = (side, side)
        if self.resize == "center" and 0 not in photo.size:
            scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
        if 0 in photo.size or max(*scaled, height) * short > _ROOM:
            raise DataError(f"a photo of {width:,} × {height:,} pixels has no usable shape — crop it, or leave it out")
        rgb = photo if photo.mode == "RGB" else photo.convert("RGB")
        square = rgb.resize(scaled, Image.Resampling[self.resample.upper()])
        left, top = (scaled[0] - side) // 2, (scaled[1] - side) // 2
        square = square.crop((left, top, left + side, top + side))
        return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()

    def shorter_side(self) -> int:
        """What a photo needs on its shorter side for nothing to be enlarged."""
        return self.size if self.resize == "whole" else max(self.size, self.short)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Bytes (or floats in 0-255) to what the tower was trained on. [B, 3, S, S] -> float32 [B, 3, S, S]"""
        channels = zip(pixels.unbind(1), self.mean, self.std, strict=True)
        # Plain numbers, not a tensor of them: copying one to a GPU would wait for it, and break a captured graph.
        return torch.stack([(x.float() - 255.0 * mean) / (255.0 * std) for x, mean, std in channels], dim=1)

    def describe(self) -> str:
        """One line that changes when the pixels do.

        >>> PhotoTransform(224).describe()
        '224 whole bicubic, mean 0.4850 0.4560 0.4060, std 0.2290 0.2240 0.2250'
        """
        cut = f"center of {self.short or self.size}" if self.resize == "center" else "whole"
        mean, std = (" ".join(f"{x:.4f}" for x in triple) for triple in (self.mean, self.std))
        return f"{self.size} {cut} {self.resample}, mean {mean}, std {std}"


class Boxes(NamedTuple):
    """One rectangle per photo, in pixels, and whether it is mirrored. All [B]."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor


def resize(images: Tensor, boxes: Boxes | None = None, *, size: int, resample: Resample) -> Tensor:
    """Each photo, or its box, as a square: PIL's crop and resize before its rounding. [B, 3, H, W] -> [B, 3, S, S]

    Values stay float32 but within 0-255, also between the two passes, as PIL's bytes do: cubic filters overshoot.
    """
    batch, channels, height, width = images.shape
    if boxes is None:
        zero = torch.zeros(batch, device=images.device)
        boxes = Boxes(zero, zero, zero + height, zero + width, torch.zeros_like(zero, dtype=torch.bool))
    rows = line_weights(boxes.top, boxes.height, pixels=height, size=size, resample=resample)
    columns = line_weights(boxes.left, boxes.width, pixels=width, size=size, resample=resample)
    columns = torch.where(boxes.flip[:, None, None], columns.flip(1), columns)
    with torch.autocast(images.device.type, enabled=False):  # eight bits of bfloat16 are fewer than a pixel's
        narrow = (images.float().reshape(batch, channels * height, width) @ columns.transpose(1, 2)).clamp(0.0, 255.0)
        out = rows.unsqueeze(1) @ narrow.view(batch, channels, height, size)
    return out.clamp(0.0, 255.0)


def line_weights(start: Tensor, extent: Tensor, *, pixels: int, size: int, resample: Resample) -> Tensor:
    """What each of ``pixels`` gives to each of ``size`` outputs that cover [start, start+extent). [B] -> [B, S, P]

    The filter widens with the scale when shrinking, as PIL's does, and ends at the box, as after a crop.
    """
    scale = (extent / size).view(-1, 1, 1)
    centre = start.view(-1, 1, 1) + (torch.arange(size, device=start.device).view(1, -1, 1) + 0.5) * scale
    pixel = torch.arange(pixels, device=start.device).view(1, 1, -1) + 0.5
    inside = (pixel > start.view(-1, 1, 1)) & (pixel < (start + extent).view(-1, 1, 1))
    distance = ((pixel - centre) / scale.clamp(min=1.0)).abs()
    weight = (_cubic(distance) if resample == "bicubic" else (1.0 - distance).clamp(min=0.0)) * inside
    return weight / weight.sum(dim=-1, keepdim=True)


def _cubic(x: Tensor) -> Tensor:
    """Keys' cubic of a distance, with a = −1/2 as PIL has it."""
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, torch.zeros_like(x)))


def read_ahead(read: Callable[[T], Tensor], batches: Iterable[Iterable[T]], *, workers: int) -> Iterator[Tensor]:
    """Batches of what ``read`` makes of each item, read by threads, some batches before they are needed."""
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="photos")
    jobs = ([pool.submit(read, item) for item in items] for items in batches)
    try:
        queue = deque(islice(jobs, _AHEAD + 1))
        while queue:
            batch = torch.stack([job.result() for job in queue.popleft()])
            queue.extend(islice(jobs, 1))
            yield batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, eq=False)
class PhotoReader:
    """Photos as squares: decoded in threads, as PIL lets go of Python's lock while it works, or all in memory."""

    photos: Any  # a vacsr.data.photos.Photos
    transform: PhotoTransform
    workers: int = 0  # threads; 0 takes one per core
    draft: bool = False
    """Let JPEG be decoded at a fraction where that still leaves all pixels the square needs. Quicker, and the pixels
    are not quite those of the tower's own processor: for training only."""
    decoded: Tensor | None = None  # what :meth:`read_all` gave, if all photos fit into memory

    def read(self, row: int) -> Tensor:
        """One photo. -> uint8 [3, S, S]"""
        enough = self.transform.shorter_side() if self.draft else 0
        return self.transform.pixels(self.photos.open(row, side=enough))

    def stream(self, batches: Iterable[Sequence[int]]) -> Iterator[Tensor]:
        """Batch by batch, read ahead of need. -> uint8 [B, 3, S, S]"""
        pixels = self.decoded
        if pixels is None:
            return read_ahead(self.read, batches, workers=self.workers)
        return (pixels[torch.as_tensor(rows, dtype=torch.int64)] for rows in batches)

    def batches(self, size: int) -> Iterator[Tensor]:
        """All photos in their order. -> uint8 [B, 3, S, S]"""
        every = range(len(self.photos))
        return self.stream([every[start : start + size] for start in every[::size]])

    def read_all(self, progress: Progress | None = None) -> Tensor:
        """Every photo. -> uint8 [N, 3, S, S]"""
        side, done = self.transform.size, 0
        whole = torch.empty(len(self.photos), 3, side, side, dtype=torch.uint8)
        for batch in self.batches(256):
            whole[done : done + len(batch)] = batch
            done += len(batch)
            if progress is not None:
                progress(done, len(whole))
        return whole


class TowerInputs(NamedTuple):
    """A data set as towers take it: photos, and tokens [M, L] int32 with −1 for padding."""

    images: PhotoReader
    texts: Tensor


def tower_inputs(
    backbone: Any, pairs: Any, *, size: int = 0, workers: int = 0, cache_gb: float = 0.0, draft: bool = False,
    progress: Progress | None = None,
) -> TowerInputs:  # fmt: skip
    """``pairs.captions`` as tokens; ``pairs.photos`` decoded now where they fit into ``cache_gb``, else when asked for.

    ``size``: side of the squares, from which training crops; 0 takes the tower's own. ``draft``: see
    :class:`PhotoReader`; training sets it, evaluation does not.
    """
    transform = backbone.transform.with_size(size) if size else backbone.transform
    reader = PhotoReader(pairs.photos, transform, workers=workers, draft=draft)
    if len(pairs.photos) * 3 * transform.size**2 <= cache_gb * 2**30:
        reader = replace(reader, decoded=reader.read_all(progress))
    return TowerInputs(reader, backbone.tokenize(pairs.captions))
