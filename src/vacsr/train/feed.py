"""What a step is fed with: the training set on the device, or photos that arrive batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import tee
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.base import TowerBackbone
from vacsr.backbones.inputs import KeptPhotos, Progress, Reader, tower_inputs
from vacsr.config import DataConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.methods.model import MatchingModel
from vacsr.train.distributed import ALONE, World

_SHARE = 0.5  # of a GPU's free memory that photos may take


@dataclass(frozen=True)
class TrainTensors:
    """The training set on the device; photos may be elsewhere."""

    images: Tensor | None  # [N, D_image], or uint8 [N, 3, S, S]
    texts: Tensor  # [M, D_text], or int32 [M, L]
    caption_image: Tensor  # [M]


class Batch(NamedTuple):
    """Caption rows of a step, the same on all ranks, and this rank's photos where they are not on the device."""

    captions: Tensor  # [B]
    photos: Tensor | None = None  # uint8 [R, 3, S, S]


@dataclass(frozen=True)
class Feed:
    """Turns the order of captions into batches."""

    data: TrainTensors
    reader: Reader | None = None
    """Where photos come from that are not on the device."""
    world: World = ALONE

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
        mine, rest = tee(order)
        rows = self._photo_rows(mine)
        for captions, photos in zip(rest, self.reader.stream(rows), strict=True):
            if self.device.type == "cuda" and photos.device.type == "cpu":
                photos = photos.pin_memory()
            yield Batch(captions.to(self.device), photos.to(self.device, non_blocking=True))

    def _photo_rows(self, order: Iterable[Tensor]) -> Iterator[list[int]]:
        """Rows of the photos that this rank encodes, batch by batch."""
        images = self.data.caption_image.cpu()
        for captions in order:
            yield images[captions[self.world.rows(len(captions))]].tolist()


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
    assert isinstance(model.backbone, TowerBackbone), "building the model has refused other backbones"
    inputs = tower_inputs(
        model.backbone, pairs,
        size=config.photo_size, workers=config.workers, cache_gb=config.cache_gb, draft=True, progress=progress,
    )  # fmt: skip
    texts = inputs.texts.to(device)
    if isinstance(inputs.images, KeptPhotos) and _fits(inputs.images.pixels, device):
        return Feed(TrainTensors(inputs.images.pixels.to(device), texts, labels), world=world)
    return Feed(TrainTensors(None, texts, labels), inputs.images, world)


def _fits(pixels: Tensor, device: torch.device) -> bool:
    """A CPU has them already; a GPU must have room for its own work too."""
    return device.type == "cpu" or pixels.nbytes <= _SHARE * torch.cuda.mem_get_info(device)[0]
