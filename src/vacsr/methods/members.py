"""An ensemble in one model: every member has its own heads and its own copy of the method, on one backbone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import fmean

import torch
from torch import Tensor, nn

from vacsr.adapter import FoldedScore
from vacsr.methods.base import Embedding, Likelihood, Method, MethodConfig, ParamGroup, SetEmbeddings, TrainingView
from vacsr.noise import of_member
from vacsr.objective import LossTerms, PairBlock


class Members(Method):
    """The members' vectors stand end to end, so the cosine of two items is the mean of the members' cosines.

    Each member learns from its own loss with its own noise; the score is the mean of the members' scores.
    """

    def __init__(self, config: MethodConfig, members: Sequence[Method]) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.parts = nn.ModuleList(members)
        self.members = len(members)
        first = members[0]
        self.task, self.networks = first.task, first.networks  # type: ignore[misc]
        self.logit_score, self.pairwise, self.soft_labels = first.logit_score, first.pairwise, first.soft_labels
        self.log_var_start, self.variance_norm, self.mix = first.log_var_start, first.variance_norm, first.mix
        self.look_ahead = first.look_ahead
        self.pair_width = sum(member.pair_width for member in members)

    @property
    def each(self) -> list[Method]:
        """The members' own methods."""
        return [part for part in self.parts if isinstance(part, Method)]

    def split(self, x: Embedding) -> list[Embedding]:
        """Each member's part of a joined embedding, of length 1 again. [N, M·d] -> M times [N, d]"""
        means = (x.mean * math.sqrt(self.members)).chunk(self.members, dim=-1)
        variances = [None] * self.members if x.log_var is None else x.log_var.chunk(self.members, dim=-1)
        return [Embedding(mean, variance) for mean, variance in zip(means, variances, strict=True)]

    def _both(self, v: Embedding, t: Embedding) -> list[tuple[Method, Embedding, Embedding]]:
        """Each member with its parts of both sides."""
        return list(zip(self.each, self.split(v), self.split(t), strict=True))

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        """The mean of the members' losses: a member's gradient is 1/M of what it would have alone."""
        terms = [
            member.loss(x, y, replace(pairs, noise=of_member(pairs.noise, number)))
            for number, (member, x, y) in enumerate(self._both(v, t))
        ]
        parts = {name: torch.stack([term.parts[name] for term in terms]).mean(dim=0) for name in terms[0].parts}
        return LossTerms(torch.stack([term.total for term in terms]).mean(dim=0), parts)

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        return torch.stack([member.score(x, y) for member, x, y in self._both(v, t)]).mean(dim=0)

    def aligned_score(self, v: Embedding, t: Embedding) -> Tensor:
        return torch.stack([member.aligned_score(x, y) for member, x, y in self._both(v, t)]).mean(dim=0)

    def grade(self, score: Tensor) -> Tensor | None:
        """The mean of what the members make of a score. [...] -> [...]"""
        return _mean([member.grade(score) for member in self.each])

    def opinion(self, score: Tensor) -> Tensor:
        return torch.stack([member.opinion(score) for member in self.each]).mean(dim=0)

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        return _mean([member.uncertainty(x, y) for member, x, y in self._both(v, t)])

    def disagreement(self, v: Embedding, t: Embedding) -> Tensor:
        values = []
        for member, x, y in self._both(v, t):
            score = member.aligned_score(x, y)
            grade = member.grade(score)
            values.append(score if grade is None else grade)
        return torch.stack(values).std(dim=0)

    def param_groups(self) -> list[ParamGroup]:
        return [group for member in self.each for group in member.param_groups()]

    def fold(self) -> FoldedScore | None:
        folded = [member.fold() for member in self.each]
        parts = [part.averaged(self.members) for score in folded if score is not None for part in score.parts]
        return FoldedScore(tuple(parts)) if parts else None

    def likelihood(self) -> Likelihood | None:
        """With the members' mean scale and bias."""
        known = [one for member in self.each if (one := member.likelihood()) is not None]
        if not known:
            return None
        return Likelihood(known[0].kind, fmean(one.scale for one in known), fmean(one.bias for one in known))

    def fit(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        for member in self.each:
            member.fit(captions, caption_image)

    def start_epoch(self, view: TrainingView) -> None:
        """Each member sees its own part of the embeddings, which are computed once, and only if one asks for them."""
        embed = cache(view.embed)

        def part(number: int) -> SetEmbeddings:
            return SetEmbeddings(*(self.split(Embedding(x))[number].mean for x in embed()))

        for number, member in enumerate(self.each):
            member.start_epoch(replace(view, embed=partial(part, number)))

    def training_state(self) -> dict[str, Tensor]:
        states = enumerate(member.training_state() for member in self.each)
        return {f"{number}-{name}": value for number, state in states for name, value in state.items()}

    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        for number, member in enumerate(self.each):
            start = f"{number}-"
            member.load_training_state({n.removeprefix(start): x for n, x in state.items() if n.startswith(start)})


def _mean(values: Sequence[Tensor | None]) -> Tensor | None:
    """Of what the members have; None where they have nothing."""
    known = [value for value in values if value is not None]
    return torch.stack(known).mean(dim=0) if known else None
