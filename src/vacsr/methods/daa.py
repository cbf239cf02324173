"""DAA: beside another method's loss, the ranks of scores should be the ranks of what captions say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vacsr.config.base import method_entry
from vacsr.errors import UsageError
from vacsr.methods.base import Embedding, Method, MethodConfig, ParamGroup, register
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.pcme import PcmeConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.methods.tfidf import WordTable
from vacsr.methods.vse import VseConfig
from vacsr.objective import LossTerms
from vacsr.pairwise import PairBlock, cosines


class DaaConfig(MethodConfig):
    """Another method's loss, and ranks that agree with the words of the captions (DAA)."""

    name: Literal["daa"] = "daa"
    """The method's name."""
    base: Annotated[PcmeConfig | VseConfig | InfoNCEConfig | SigmoidConfig, Field(discriminator="name")] = PcmeConfig()
    """The method that is trained beside it and that scores."""
    weight: Annotated[float, Field(ge=0)] = 1000.0
    """w of w·(1 − ASP), in each direction."""
    temperature: Annotated[float, Field(gt=0)] = 0.01
    """T of the soft ranks."""
    rarity: Literal["captions", "images"] = "captions"
    """A word is rare that few captions have (smoothed, as the public code counts), or that few images have (CIDEr)."""


_PCME = {"name": "pcme", "samples": 5, "scale": 15.0, "shift": 15.0, "vib_weight": 1e-5, "vib_reduction": "sum"}
"""PCME as in DAA's code."""


@register("daa", DaaConfig, presets={"paper": {"base": _PCME}})
class Daa(Method):
    """loss = base + w(1 − ASP) per image + w(1 − ASP) per caption; score, grade and uncertainty are the base's.

    ASP = mean min(R_s, R_c)/max(R_s, R_c) of soft ranks R(x)_j = 1 + Σ_{k≠j} σ((x_k − x_j)/T), over a row's cosines
    and over the TF-IDF similarity of its captions. The public code lacks a transpose, and so compares the rank of one
    pair with that of another; this is what the paper writes.
    """

    config: DaaConfig

    def __init__(self, config: DaaConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.base: Method = method_entry(config.base.name).method(config.base, dim=dim)
        self.log_var_start, self.variance_norm = self.base.log_var_start, self.base.variance_norm
        self.words: WordTable | None = None  # of the training captions; saved models do without

    def fit(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        """Count the words of the training captions."""
        if captions is None:
            raise UsageError(
                "method 'daa' compares the words of captions, and these data have none — "
                "name the file with them: features:FILE,captions=FILE"
            )
        self.words = WordTable(captions, caption_image.cpu(), rarity=self.config.rarity)

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """The terms of the base, and the two of the ranks."""
        if pairs.captions is None or self.words is None:
            raise UsageError(
                "method 'daa' has not seen the training captions — train it with vacsr.fit, or call its fit() first"
            )
        base = self.base.loss(v, t, pairs)
        score, words = cosines(v.mean, t.mean), self.words.relevance(pairs.captions)
        temperature = self.config.temperature
        rows = 1.0 - rank_agreement(score, words, temperature=temperature)
        cols = 1.0 - rank_agreement(score.T, words.T, temperature=temperature)
        total = base.total + self.config.weight * (rows + cols)
        return LossTerms(total, {**base.parts, "asp_i2t": rows.detach(), "asp_t2i": cols.detach()})

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        """The base's. [I, d], [T, d] -> [I, T]"""
        return self.base.score(v, t)

    def grade(self, score: Tensor) -> Tensor:
        """The base's."""
        return self.base.grade(score)

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        """The base's. [N, d], [N, d] -> [N]"""
        return self.base.uncertainty(v, t)

    def param_groups(self) -> list[ParamGroup]:
        """The base's."""
        return self.base.param_groups()


def soft_ranks(x: Tensor, *, temperature: float) -> Tensor:
    """R(x)_j = 1 + Σ_{k≠j} σ((x_k − x_j)/T): the largest has rank 1. [Q, C] -> [Q, C]"""
    above = torch.sigmoid((x.unsqueeze(1) - x.unsqueeze(2)) / temperature)  # [Q, j, k]
    return above.sum(dim=2) + 0.5  # of which σ(0) = ½ is the item itself


def rank_agreement(score: Tensor, relevance: Tensor, *, temperature: float) -> Tensor:
    """ASP: mean over queries and items of min(R_s, R_c)/max(R_s, R_c), 1 where both orders agree. [Q, C] -> 0-d"""
    by_score, by_relevance = (soft_ranks(x, temperature=temperature) for x in (score, relevance))
    return (torch.minimum(by_score, by_relevance) / torch.maximum(by_score, by_relevance)).mean()
