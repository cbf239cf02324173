"""How much captions have in common by their words: unit TF-IDF vectors, kept sparse until a batch needs them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_WORD = re.compile(r"\b\w\w+\b")  # as in DAA's public code: one-letter words, above all "a", are dropped


class WordTable(NamedTuple):
    """The captions of a training set as sparse vectors over V words."""

    words: Tensor
    """[M, L] int64, V where there is no further word."""
    weights: Tensor
    """[M, L] float32, a unit vector each, 0 where there is no word."""
    caption_image: Tensor
    """[M] int64, the image row of each caption."""
    image_captions: Tensor
    """[N, P] int64, the captions of each image, −1 where there are no more."""
    size: int
    """V."""


def word_table(
    captions: Sequence[str], caption_image: Tensor, *, rarity: Literal["captions", "images"] = "captions"
) -> WordTable:
    """TF-IDF of M captions.

    ``rarity`` by captions is log((1 + M)/(1 + captions with the word)) + 1: every word weighs something. By images, as
    in CIDEr, it is log(N/images with the word): a word that all images have weighs nothing, and a caption of such words
    alone is the zero vector.
    """
    counts = [Counter(_WORD.findall(caption.lower())) for caption in captions]
    rare = _by_captions(counts) if rarity == "captions" else _by_images(counts, caption_image.tolist())
    place = {word: number for number, word in enumerate(sorted(rare))}
    longest = max((len(found) for found in counts), default=0)
    words = torch.full((len(counts), max(1, longest)), len(place), dtype=torch.int64)
    weights = torch.zeros(words.shape)
    for row, found in enumerate(counts):
        words[row, : len(found)] = torch.tensor([place[word] for word in found], dtype=torch.int64)
        weights[row, : len(found)] = torch.tensor([count * rare[word] for word, count in found.items()])
    weights = torch.nn.functional.normalize(weights, dim=1)
    return WordTable(words, weights, caption_image.clone(), captions_by_image(caption_image), len(place))


def _by_captions(counts: Sequence[Counter[str]]) -> dict[str, float]:
    """Smoothed as if one more caption had every word."""
    with_word = Counter(word for found in counts for word in found)
    return {word: math.log((1 + len(counts)) / (1 + count)) + 1.0 for word, count in with_word.items()}


def _by_images(counts: Sequence[Counter[str]], images: Sequence[int]) -> dict[str, float]:
    """However often a word occurs with an image, it counts once."""
    seen = {(word, image) for found, image in zip(counts, images, strict=True) for word in found}
    total = len(set(images))
    return {word: math.log(total / count) for word, count in Counter(word for word, _ in seen).items()}


def captions_by_image(caption_image: Tensor) -> Tensor:
    """The captions of every image, in order, −1 after the last. [M] -> [N, P]"""
    order = caption_image.argsort(stable=True)
    counts = caption_image.bincount()
    starts = counts.cumsum(0) - counts
    table = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int64)
    image = caption_image[order]
    table[image, torch.arange(len(order)) - starts[image]] = order
    return table


def word_relevance(table: WordTable, captions: Tensor) -> Tensor:
    """Mean cosine of the captions of row i's image with caption j. [B] rows of the training set -> [B, B]

    No shape depends on the data, so that the step can be captured as a CUDA graph. Only the batch's own captions are
    spread out over all words, each word at most once: sums have one order, and figures repeat.
    """
    words, weights = table.words[captions], table.weights[captions]
    dense = weights.new_zeros(len(captions), table.size + 1).scatter_add(1, words, weights)
    mates = table.image_captions[table.caption_image[captions]]  # [B, P]
    known, rows = mates >= 0, mates.clamp_min(0)
    share = table.weights[rows] * (known / known.sum(dim=1, keepdim=True)).unsqueeze(-1)  # [B, P, L]
    found = dense.T[table.words[rows].flatten(1)]  # [B, P·L, B]
    with torch.autocast(
        found.device.type, enabled=False
    ):  # likenesses of captions are small, their order is what counts
        return torch.bmm(share.flatten(1).unsqueeze(1), found).squeeze(1)
