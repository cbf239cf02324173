"""DAA: beside another method's loss, the ranks of scores should be the ranks of what captions say."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from vacsr.config.base import method_entry
from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method, ParamGroup, RetrievalConfig, register
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.pcme import PcmeConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.methods.vse import VseConfig
from vacsr.objective import LossTerms, PairBlock, cosines


class DaaConfig(RetrievalConfig):
    """Another method's loss, and ranks that agree with the words of the captions (DAA)."""

    name: Literal["daa"] = "daa"
    base: Annotated[PcmeConfig | VseConfig | InfoNCEConfig | SigmoidConfig, Field(discriminator="name")] = PcmeConfig()
    """The method that is trained beside it and that scores."""
    weight: Annotated[float, Field(ge=0)] = 1000.0
    """w of w·(1 − ASP), in each direction."""
    temperature: Annotated[float, Field(gt=0)] = 0.01
    """T of the soft ranks."""


_PCME = {"name": "pcme", "samples": 5, "scale": 15.0, "shift": 15.0, "vib_weight": 1e-5, "vib_reduction": "sum"}
"""PCME as in DAA's code."""


@register("daa", DaaConfig, presets={"paper": {"base": _PCME}})
class Daa(Method):
    """loss = base + w(1 − ASP) per image + w(1 − ASP) per caption; score, grade and uncertainty are the base's.

    ASP = mean min(R_s, R_c)/max(R_s, R_c) of soft ranks R(x)_j = 1 + Σ_{k≠j} σ((x_k − x_j)/T), over a row's cosines
    and over the TF-IDF similarity of its captions, as the paper writes it: the public code lacks a transpose.
    """

    config: DaaConfig

    def __init__(self, config: DaaConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.base: Method = method_entry(config.base.name).method(config.base, dim=dim)
        self.log_var_start, self.variance_norm = self.base.log_var_start, self.base.variance_norm
        self.words: WordTable | None = None  # of the training captions; saved models do without

    def fit(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        if captions is None:
            message = "method 'daa' compares the words of captions, and these data have none"
            raise UsageError(f"{message} — name the file with them: features:FILE,captions=FILE")
        self.words = WordTable(captions, caption_image.cpu())

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        if pairs.captions is None or self.words is None:
            raise UsageError("method 'daa' has not seen the training captions — train with vacsr.fit, or call fit()")
        base, temperature = self.base.loss(v, t, pairs), self.config.temperature
        score, words = cosines(v.mean, t.mean), self.words.relevance(pairs.captions)
        rows = 1.0 - rank_agreement(score, words, temperature=temperature)
        cols = 1.0 - rank_agreement(score.T, words.T, temperature=temperature)
        total = base.total + self.config.weight * (rows + cols)
        return LossTerms(total, {**base.parts, "asp_i2t": rows.detach(), "asp_t2i": cols.detach()})

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        return self.base.score(v, t)

    def grade(self, score: Tensor) -> Tensor | None:
        return self.base.grade(score)

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        return self.base.uncertainty(v, t)

    def param_groups(self) -> list[ParamGroup]:
        return self.base.param_groups()


def soft_ranks(x: Tensor, *, temperature: float) -> Tensor:
    """R(x)_j = 1 + Σ_{k≠j} σ((x_k − x_j)/T): the largest has rank 1. [Q, C] -> [Q, C]"""
    above = torch.sigmoid((x.unsqueeze(1) - x.unsqueeze(2)) / temperature)  # [Q, j, k]
    return above.sum(dim=2) + 0.5  # of which σ(0) = ½ is the item itself


def rank_agreement(score: Tensor, relevance: Tensor, *, temperature: float) -> Tensor:
    """ASP: mean over queries and items of min(R_s, R_c)/max(R_s, R_c), 1 where both orders agree. [Q, C] -> 0-d"""
    by_score, by_relevance = (soft_ranks(x, temperature=temperature) for x in (score, relevance))
    return (torch.minimum(by_score, by_relevance) / torch.maximum(by_score, by_relevance)).mean()


class WordTable(nn.Module):
    """The M captions of a training set as unit TF-IDF vectors over V words, sparse until a batch needs them.

    As in DAA's public code, the IDF is log((1 + M)/(1 + captions with the word)) + 1, and one-letter words are dropped.
    """

    words: Tensor  # [M, L] int64, V where there is no further word
    weights: Tensor  # [M, L] float32, a unit vector each, 0 where there is no word
    caption_image: Tensor  # [M] int64, the image row of each caption
    image_captions: Tensor  # [N, P] int64, the captions of each image, −1 where there are no more

    def __init__(self, captions: Sequence[str], caption_image: Tensor) -> None:
        super().__init__()
        counts = [Counter(re.findall(r"\b\w\w+\b", caption.lower())) for caption in captions]
        frequency = Counter(word for count in counts for word in count)
        idf = {word: math.log((1 + len(counts)) / (1 + number)) + 1.0 for word, number in frequency.items()}
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
        by_image = torch.split(caption_image.argsort(stable=True), caption_image.bincount().tolist())
        padded = pad_sequence(list(by_image), batch_first=True, padding_value=-1)
        self.register_buffer("image_captions", padded, persistent=False)

    def relevance(self, captions: Tensor) -> Tensor:
        """Mean cosine of the captions of row i's image with caption j. [B] rows of the training set -> [B, B]

        No shape depends on the data, so a CUDA graph can hold the step; each word is added once, in a fixed order.
        """
        words, weights = self.words[captions], self.weights[captions]
        dense = weights.new_zeros(len(captions), self.size + 1).scatter_add(1, words, weights)
        siblings = self.image_captions[self.caption_image[captions]]  # [B, P]
        present, rows = siblings >= 0, siblings.clamp_min(0)
        share = self.weights[rows] * (present / present.sum(dim=1, keepdim=True)).unsqueeze(-1)  # [B, P, L]
        matched = dense.T[self.words[rows].flatten(1)]  # [B, P·L, B]
        with torch.autocast(dense.device.type, enabled=False):  # cosines are small, and their order is what counts
            return torch.bmm(share.flatten(1).unsqueeze(1), matched).squeeze(1)
