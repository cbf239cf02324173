"""Crop, resize and flip as two small matrices per photo: PIL's filters, on any device, with static shapes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Resample = Literal["bicubic", "bilinear"]


class Boxes(NamedTuple):
    """One rectangle per photo, in pixels, and whether it is mirrored. All [B]."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor


def whole(images: Tensor) -> Boxes:
    """Each photo entire, not mirrored."""
    batch, height, width = images.shape[0], images.shape[-2], images.shape[-1]
    zero = torch.zeros(batch, device=images.device)
    return Boxes(zero, zero, zero + height, zero + width, torch.zeros_like(zero, dtype=torch.bool))


def resize(images: Tensor, boxes: Boxes, *, size: int, resample: Resample) -> Tensor:
    """Each photo's box as a square; equals PIL's crop and resize before its rounding. [B, 3, H, W] -> [B, 3, S, S]

    Values stay float32 but within 0-255, also between the two passes, as PIL's bytes do: cubic filters overshoot.
    """
    batch, channels, height, width = images.shape
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
    kernel, scale = _KERNELS[resample], (extent / size).view(-1, 1, 1)
    centre = start.view(-1, 1, 1) + (torch.arange(size, device=start.device).view(1, -1, 1) + 0.5) * scale
    pixel = torch.arange(pixels, device=start.device).view(1, 1, -1) + 0.5
    inside = (pixel > start.view(-1, 1, 1)) & (pixel < (start + extent).view(-1, 1, 1))
    weight = kernel((pixel - centre) / scale.clamp(min=1.0)) * inside
    return weight / weight.sum(dim=-1, keepdim=True)


def _triangle(x: Tensor) -> Tensor:
    return (1.0 - x.abs()).clamp(min=0.0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' cubic with a = −1/2, as PIL has it."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, torch.zeros_like(x)))


_KERNELS = {"bilinear": _triangle, "bicubic": _cubic}
