"""Mixup and cutmix: images blended with a partner of their batch, in amounts that go by seed, step and place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.config import MixConfig
from vacsr.noise import RowNoise, Stream


class Mixture(NamedTuple):
    """How each of R images is mixed."""

    own: Tensor
    """[R] the part that stays its own, 1 where it is not mixed."""
    cut: Tensor
    """[R] bool: a rectangle is pasted, nothing is blended."""
    box: Tensor
    """[R, 4] int64: top, bottom, left and right of that rectangle in pixels."""


class Partners(NamedTuple):
    """What R images are mixed with."""

    mixture: Mixture
    rows: Tensor
    """[R] the partners' places in the batch, by which their own crops are drawn."""
    images: Tensor | None = None
    """The partners themselves; None where they are the R images in reverse order."""


def draw_mixture(noise: RowNoise, config: MixConfig, *, side: int = 0) -> Mixture:
    """The draws of R images with ``side`` pixels; features have no sides, and are only blended.

    The middle one of 2α−1 uniform numbers is Beta(α, α), without a loop of rejections that a CUDA graph cannot hold.
    """
    count = 2 * config.alpha - 1
    draw = noise.other(Stream.MIX).uniform(4 + count)
    mixed = draw[:, 0] < config.share
    own = draw[:, 4:].sort(dim=1).values[:, config.alpha - 1]
    cut = mixed & (draw[:, 1] < config.cutmix) if side else torch.zeros_like(mixed)
    box = _box(own, draw[:, 2:4], side)
    area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2])
    own = torch.where(cut, 1.0 - area / max(1, side * side), own)
    return Mixture(torch.where(mixed, own, torch.ones_like(own)), cut, box)


def _box(own: Tensor, centre: Tensor, side: int) -> Tensor:
    """A rectangle of 1 − ``own`` of the square around a random centre, cut off at the edges. [R], [R, 2] -> [R, 4]"""
    half = (side * (1.0 - own).sqrt()).long() // 2
    middle = (centre * side).long()
    ends = torch.stack((middle[:, 0] - half, middle[:, 0] + half, middle[:, 1] - half, middle[:, 1] + half), dim=1)
    return ends.clamp(0, side)


def blend(images: Tensor, partners: Tensor, mixture: Mixture) -> Tensor:
    """Features [R, D] or pixels [R, 3, S, S], each with its partner."""
    whole = (len(images), *[1] * (images.ndim - 1))
    blended = torch.lerp(partners, images, mixture.own.view(whole).to(images.dtype))
    if images.ndim == 2:
        return blended
    place = torch.arange(images.shape[-1], device=images.device)
    top, bottom, left, right = mixture.box.unsqueeze(-1).unbind(dim=1)  # [R, 1] each
    down, across = (place >= top) & (place < bottom), (place >= left) & (place < right)
    inside = (down.unsqueeze(2) & across.unsqueeze(1)).unsqueeze(1)
    return torch.where(mixture.cut.view(whole), torch.where(inside, partners, images), blended)


def mixed_labels(labels: Tensor, own: Tensor) -> Tensor:
    """λ·y_i + (1−λ)·y_partner, the partner of row i being row B−1−i. [B, C], [B] -> [B, C]"""
    return torch.lerp(labels.flip(0), labels, own.unsqueeze(1).to(labels.dtype))
