"""Augmentation of photos and captions. Every draw is a function of seed, step and the item's position in the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.resample import Boxes
from vacsr.config import AugmentConfig
from vacsr.noise import RowNoise, Stream


class Vocabulary(NamedTuple):
    """What changing words needs to know of a tokenizer."""

    special: Tensor
    """[K] ids that are left alone: start and end."""
    ordinary: Tensor
    """[V] ids a random word is drawn from."""
    mask: int
    """Stands for a hidden word."""


def draw_boxes(noise: RowNoise, config: AugmentConfig, *, height: int, width: int) -> Boxes:
    """One ratio for both sides, whole pixels, anywhere within the photo; mirrored with probability ``flip``. [B]"""
    draw = noise.other(Stream.CROP).uniform(4)
    low, high = min(config.crop), max(config.crop)
    ratio = low + (high - low) * draw[:, 0]
    sides = [(ratio * side).round().clamp(min=1.0) for side in (height, width)]
    places = [
        torch.minimum((draw[:, 1 + axis] * (total - side + 1.0)).floor(), total - side)
        for axis, (side, total) in enumerate(zip(sides, (height, width), strict=True))
    ]
    return Boxes(places[0], places[1], sides[0], sides[1], draw[:, 3] < config.flip)


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


def change_words(texts: Tensor, noise: RowNoise, config: AugmentConfig, *, vocabulary: Vocabulary) -> Tensor:
    """Each word token is, with probability ``text_tokens``, masked, replaced or dropped; what is left moves together.

    [B, L] -> [B, L], −1 where there is no token
    """
    if config.text_tokens == 0.0:
        return texts
    # Three numbers per place, side by side: a row's draws must not depend on how far others pad it.
    draw = noise.other(Stream.TEXT_TOKENS).uniform(3 * texts.shape[1]).view(*texts.shape, 3)
    hit, kind, pick = draw.unbind(-1)
    ordinary = vocabulary.ordinary
    word = (texts >= 0) & (texts.unsqueeze(-1) != vocabulary.special).all(dim=-1)
    changed = word & (hit < config.text_tokens)
    masked = changed & (kind < config.text_mask)
    replaced = changed & ~masked & (kind < config.text_mask + config.text_random)
    gone = (texts < 0) | (changed & ~masked & ~replaced)
    gone = torch.where(gone.all(dim=1, keepdim=True), texts < 0, gone)
    other = ordinary[(pick * len(ordinary)).long().clamp(max=len(ordinary) - 1)].to(texts.dtype)
    new = torch.where(masked, vocabulary.mask, torch.where(replaced, other, texts))
    together = gone.to(torch.uint8).sort(dim=1, stable=True).indices
    return new.masked_fill(gone, -1).gather(1, together)
