"""How much captions have in common by their words, as cosines of TF-IDF vectors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

_WORD = re.compile(r"\b\w\w+\b")  # as in DAA's public code: one-letter words, above all "a", are dropped


class WordTable(nn.Module):
    """The M captions of a training set as unit TF-IDF vectors over V words, sparse until a batch needs them.

    ``rarity`` by captions is log((1 + M)/(1 + captions with the word)) + 1: every word weighs something. By images, as
    in CIDEr, it is log(N/images with the word): a word that all images have weighs nothing, and a caption of such words
    alone is the zero vector.
    """

    words: Tensor  # [M, L] int64, V where there is no further word
    weights: Tensor  # [M, L] float32, a unit vector each, 0 where there is no word
    caption_image: Tensor  # [M] int64, the image row of each caption
    image_captions: Tensor  # [N, P] int64, the captions of each image, −1 where there are no more

    def __init__(
        self, captions: Sequence[str], caption_image: Tensor, *, rarity: Literal["captions", "images"] = "captions"
    ) -> None:
        super().__init__()
        counts = [Counter(_WORD.findall(caption.lower())) for caption in captions]
        idf = _by_captions(counts) if rarity == "captions" else _by_images(counts, caption_image.tolist())
        index = {word: number for number, word in enumerate(sorted(idf))}
        self.size = len(index)
        words = torch.full((len(counts), max([1, *map(len, counts)])), self.size, dtype=torch.int64)
        weights = torch.zeros(words.shape)
        for row, count in enumerate(counts):
            words[row, : len(count)] = torch.tensor([index[word] for word in count], dtype=torch.int64)
            weights[row, : len(count)] = torch.tensor([times * idf[word] for word, times in count.items()])
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("weights", functional.normalize(weights, dim=1), persistent=False)
        self.register_buffer("caption_image", caption_image.clone(), persistent=False)
        self.register_buffer("image_captions", captions_by_image(caption_image), persistent=False)

    def relevance(self, captions: Tensor) -> Tensor:
        """Mean cosine of the captions of row i's image with caption j. [B] rows of the training set -> [B, B]

        No shape depends on the data, so that the step can be captured as a CUDA graph. Only the captions of the batch
        are spread out over all words, each word at most once: sums have one order, and results are reproducible.
        """
        words, weights = self.words[captions], self.weights[captions]
        dense = weights.new_zeros(len(captions), self.size + 1).scatter_add(1, words, weights)
        siblings = self.image_captions[self.caption_image[captions]]  # [B, P]
        present, rows = siblings >= 0, siblings.clamp_min(0)
        share = self.weights[rows] * (present / present.sum(dim=1, keepdim=True)).unsqueeze(-1)  # [B, P, L]
        matched = dense.T[self.words[rows].flatten(1)]  # [B, P·L, B]
        with torch.autocast(dense.device.type, enabled=False):  # cosines are small, and their order is what counts
            return torch.bmm(share.flatten(1).unsqueeze(1), matched).squeeze(1)


def _by_captions(counts: Sequence[Counter[str]]) -> dict[str, float]:
    """Smoothed as if one more caption had every word."""
    with_word = Counter(word for count in counts for word in count)
    return {word: math.log((1 + len(counts)) / (1 + number)) + 1.0 for word, number in with_word.items()}


def _by_images(counts: Sequence[Counter[str]], images: Sequence[int]) -> dict[str, float]:
    """However often a word occurs with an image, it counts once."""
    pairs = {(word, image) for count, image in zip(counts, images, strict=True) for word in count}
    total = len(set(images))
    return {word: math.log(total / number) for word, number in Counter(word for word, _ in pairs).items()}


def captions_by_image(caption_image: Tensor) -> Tensor:
    """The captions of every image, in order, −1 after the last. [M] -> [N, P]"""
    order = caption_image.argsort(stable=True)
    counts = caption_image.bincount()
    starts = counts.cumsum(0) - counts
    table = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int64)
    image = caption_image[order]
    table[image, torch.arange(len(order)) - starts[image]] = order
    return table
