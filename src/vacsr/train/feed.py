"""What a step is fed with: the training set on the device, or photos that arrive batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.inputs import KeptPhotos, PhotoReader, Progress, Reader, tower_inputs
from vacsr.config import DataConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.methods.base import Method, Neighbours
from vacsr.model import MatchingModel
from vacsr.train.distributed import ALONE, World

_SHARE = 0.5  # of a GPU's free memory that photos may take


@dataclass(frozen=True)
class TrainTensors:
    """The training set on the device; photos may be elsewhere."""

    images: Tensor | None  # [N, D_image], or uint8 [N, 3, S, S]
    texts: Tensor  # [M, D_text], or int32 [M, L]
    caption_image: Tensor  # [M]


class NearPairs(NamedTuple):
    """The batch's neighbours, and this rank's photos of them."""

    captions: Neighbours  # [B] each
    photos: Neighbours  # uint8 [R, 3, S, S] each


class Batch(NamedTuple):
    """Caption rows of a step, the same on all ranks, and this rank's photos where they are not on the device."""

    captions: Tensor  # [B]
    photos: Tensor | None = None  # uint8 [R, 3, S, S]
    near: NearPairs | None = None
    """Where photos come along and the method looks at neighbours too."""


class _Plan(NamedTuple):
    """What has to be read for a batch."""

    captions: tuple[Tensor, ...]  # [B] each: the batch, and two kinds of neighbours where they are asked for
    rows: list[int]
    places: Tensor | None  # [3, R] into rows, each of which is read once; None where rows are the batch's own


@dataclass(frozen=True)
class Feed:
    """Turns the order of captions into batches."""

    data: TrainTensors
    reader: Reader | None = None
    """Where photos come from that are not on the device."""
    world: World = ALONE
    looks: Method | None = None
    """The method whose neighbours' photos are read along with a batch's own."""

    @property
    def device(self) -> torch.device:
        """Where batches lie."""
        return self.data.texts.device

    def batches(self, order: Iterable[Tensor]) -> Iterator[Batch]:
        """One batch for each tensor of caption rows [B]."""
        if self.reader is None:
            for captions in order:
                yield Batch(captions.to(self.device))
            return
        plans, rest = tee(self._plans(order))
        rows = (plan.rows for plan in plans)
        for plan, photos in zip(rest, self.reader.stream(rows), strict=True):
            if self.device.type == "cuda" and photos.device.type == "cpu":
                photos = photos.pin_memory()
            yield self._batch(plan, photos.to(self.device, non_blocking=True))

    def _plans(self, order: Iterable[Tensor]) -> Iterator[_Plan]:
        """Batch by batch, the photos that this rank encodes."""
        images, near = self.data.caption_image.cpu(), self._all_neighbours()
        for captions in order:
            own = self.world.rows(len(captions))
            if near is None:
                yield _Plan((captions,), images[captions[own]].tolist(), None)
                continue
            together = (captions, *(kind[captions] for kind in near))
            rows, places = torch.unique(torch.stack([images[part[own]] for part in together]), return_inverse=True)
            yield _Plan(together, rows.tolist(), places)

    def _all_neighbours(self) -> Neighbours | None:
        """Everybody's, asked once for an epoch: they stay as they are in it, and asking would wait for the GPU. [M]"""
        if self.looks is None:
            return None
        everybody = torch.arange(len(self.data.caption_image), device=self.device)
        return Neighbours(*(kind.cpu() for kind in self.looks.neighbours(everybody)))

    def _batch(self, plan: _Plan, photos: Tensor) -> Batch:
        """Photos [U, 3, S, S] that were read once stand wherever they are needed."""
        captions, *near = (rows.to(self.device) for rows in plan.captions)
        if plan.places is None:
            return Batch(captions, photos)
        own, *theirs = (photos[place] for place in plan.places.to(self.device))
        return Batch(captions, own, NearPairs(Neighbours(*near), Neighbours(*theirs)))


def build_feed(
    model: MatchingModel,
    pairs: PairSet | PhotoSet,
    *,
    config: DataConfig,
    device: torch.device,
    world: World,
    progress: Progress | None = None,
) -> Feed:
    """Features go to the device whole; so do photos that fit, and the others stay where they are."""
    labels = pairs.caption_image.to(device)
    if isinstance(pairs, PairSet):
        return Feed(TrainTensors(pairs.images.to(device), pairs.texts.to(device), labels), world=world)
    inputs = tower_inputs(
        model.backbone, pairs,
        size=config.photo_size, workers=config.workers, cache_gb=config.cache_gb, draft=True, progress=progress,
    )  # fmt: skip
    texts = inputs.texts.to(device)
    if isinstance(inputs.images, KeptPhotos) and _fits(inputs.images.pixels, device):
        return Feed(TrainTensors(inputs.images.pixels.to(device), texts, labels), world=world)
    looks = model.method if model.method.look_ahead > 0 else None
    return Feed(TrainTensors(None, texts, labels), inputs.images, world, looks)


def how_to_keep(reader: Reader) -> str:
    """What to type so that the photos of a reader come to lie on the GPU, and why they do not."""
    if isinstance(reader, PhotoReader):
        size = reader.bytes / 2**30
        return f"they take {size:.1f} GiB, data.cache_gb allows less — set data.cache_gb={math.ceil(size)}"
    assert isinstance(reader, KeptPhotos), "there are no others"
    size = reader.pixels.nbytes / 2**30
    return f"they take {size:.1f} GiB, more than half of the GPU's free memory — set a smaller data.photo_size"


def _fits(pixels: Tensor, device: torch.device) -> bool:
    """A CPU has them already; a GPU must have room for its own work too."""
    return device.type == "cpu" or pixels.nbytes <= _SHARE * torch.cuda.mem_get_info(device)[0]
