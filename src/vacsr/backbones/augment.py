"""Augmentation of photos and captions: crops, dropped tokens and words, mixup and cutmix.

Randomness is passed in: every draw is a function of seed, step (or epoch) and the item's position.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.images import Boxes
from vacsr.config import AugmentConfig, MixConfig
from vacsr.noise import RowNoise, Stream


def draw_boxes(noise: RowNoise, config: AugmentConfig, *, height: int, width: int) -> Boxes:
    """One ratio for both sides, whole pixels, anywhere within the photo; mirrored with probability ``flip``. [B]"""
    draw = noise.other(Stream.CROP).uniform(4)
    low, high = min(config.crop), max(config.crop)
    ratio = low + (high - low) * draw[:, 0]
    sides = [(ratio * side).round().clamp(min=1.0) for side in (height, width)]
    top, left = (
        torch.minimum((draw[:, 1 + axis] * (total - side + 1.0)).floor(), total - side)
        for axis, (side, total) in enumerate(zip(sides, (height, width), strict=True))
    )
    return Boxes(top, left, sides[0], sides[1], draw[:, 3] < config.flip)


def drop_image_tokens(mask: Tensor, noise: RowNoise, *, rate: float) -> Tensor:
    """With u from (0, 1): where u > p each token, the class token too, goes with probability p·u; one always stays.

    Tokens leave before pooling, after the tower has seen them all. [B, L] -> [B, L] bool
    """
    if rate == 0.0:
        return mask
    draw = noise.other(Stream.IMAGE_TOKENS).uniform(1 + mask.shape[1])
    u, token = draw[:, :1], draw[:, 1:]
    lost = (token < rate * u) & (u > rate)
    last = token == token.masked_fill(~mask, -1.0).amax(dim=1, keepdim=True)
    return mask & (~lost | last)


def change_words(
    texts: Tensor, noise: RowNoise, config: AugmentConfig, *, special: Tensor, ordinary: Tensor, mask: int
) -> Tensor:
    """Each word token is, with probability ``text_tokens``, masked, replaced or dropped; what is left moves together.

    ``special`` [K] are the ids that are left alone (start and end), ``ordinary`` [V] those a random word is drawn
    from, ``mask`` stands for a hidden word. [B, L] -> [B, L], −1 where there is no token
    """
    if config.text_tokens == 0.0:
        return texts
    # Three numbers per position, side by side: a row's draws must not depend on how far others pad it.
    draw = noise.other(Stream.TEXT_TOKENS).uniform(3 * texts.shape[1]).view(*texts.shape, 3)
    hit, kind, pick = draw.unbind(-1)
    word = (texts >= 0) & (texts.unsqueeze(-1) != special).all(dim=-1)
    changed = word & (hit < config.text_tokens)
    masked = changed & (kind < config.text_mask)
    replaced = changed & ~masked & (kind < config.text_mask + config.text_random)
    gone = (texts < 0) | (changed & ~masked & ~replaced)
    gone = torch.where(gone.all(dim=1, keepdim=True), texts < 0, gone)
    other = ordinary[(pick * len(ordinary)).long().clamp(max=len(ordinary) - 1)].to(texts.dtype)
    new = torch.where(masked, mask, torch.where(replaced, other, texts))
    together = gone.to(torch.uint8).sort(dim=1, stable=True).indices
    return new.masked_fill(gone, -1).gather(1, together)


class Mixture(NamedTuple):
    """How each of R images is mixed."""

    weight: Tensor  # [R] λ, the weight of the image itself; 1 where it is not mixed
    cut: Tensor  # [R] bool: a rectangle is pasted, nothing is blended
    box: Tensor  # [R, 4] int64: top, bottom, left and right of that rectangle in pixels


class Partners(NamedTuple):
    """What R images are mixed with."""

    mixture: Mixture
    rows: Tensor  # [R] the partners' positions in the batch, by which their crops are drawn
    images: Tensor | None = None  # the partners themselves; None where they are the R images in reverse order


def draw_mixture(noise: RowNoise, config: MixConfig, *, side: int = 0) -> Mixture:
    """The draws of R images with ``side`` pixels; features have no sides, and are only blended.

    The middle one of 2α−1 uniform numbers is Beta(α, α), without a loop of rejections that a CUDA graph cannot hold.
    """
    count = 2 * config.alpha - 1
    draw = noise.other(Stream.MIX).uniform(4 + count)
    mixed = draw[:, 0] < config.share
    weight = draw[:, 4:].sort(dim=1).values[:, config.alpha - 1]
    cut = mixed & (draw[:, 1] < config.cutmix) if side else torch.zeros_like(mixed)
    # A rectangle of 1 − λ of the square around a random centre, cut at the edges.
    centre, half = (draw[:, 2:4] * side).long(), ((side * (1.0 - weight).sqrt()).long() // 2).unsqueeze(1)
    box = torch.stack((centre - half, centre + half), dim=2).flatten(1).clamp(0, side)
    area = (box[:, 1] - box[:, 0]) * (box[:, 3] - box[:, 2])
    weight = torch.where(cut, 1.0 - area / max(1, side * side), weight)
    return Mixture(torch.where(mixed, weight, torch.ones_like(weight)), cut, box)


def blend(images: Tensor, partners: Tensor, mixture: Mixture) -> Tensor:
    """Features [R, D] or pixels [R, 3, S, S], each with its partner."""
    whole = (len(images), *[1] * (images.ndim - 1))
    blended = torch.lerp(partners, images, mixture.weight.view(whole).to(images.dtype))
    if images.ndim == 2:
        return blended
    pixel = torch.arange(images.shape[-1], device=images.device)
    top, bottom, left, right = mixture.box.unsqueeze(-1).unbind(dim=1)  # [R, 1] each
    down, across = (pixel >= top) & (pixel < bottom), (pixel >= left) & (pixel < right)
    inside = (down.unsqueeze(2) & across.unsqueeze(1)).unsqueeze(1)
    return torch.where(mixture.cut.view(whole), torch.where(inside, partners, images), blended)


def mixed_labels(labels: Tensor, weight: Tensor) -> Tensor:
    """λ·y_i + (1−λ)·y_partner, the partner of row i being row B−1−i. [B, C], [B] -> [B, C]"""
    return torch.lerp(labels.flip(0), labels, weight.unsqueeze(1).to(labels.dtype))
