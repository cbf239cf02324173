"""VACSR: the variational adapter on v⊙t with its objective (paper §3)."""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from vacsr.adapter import AdapterConfig, FoldedScore, VariationalAdapter
from vacsr.errors import NotFoldable
from vacsr.methods.base import Embedding, Method, ParamGroup, RetrievalConfig, register, split_by_decay
from vacsr.objective import LossTerms, ObjectiveConfig, PairBlock, VacsrObjective


class VacsrConfig(RetrievalConfig):
    """The paper's method: adapter and objective. The field defaults are the preset `default`."""

    name: Literal["vacsr"] = "vacsr"
    adapter: AdapterConfig = AdapterConfig()
    """The model."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """Adapter learning rate relative to the heads'."""


_ENSEMBLE = {"contrastive_weight": 4.0, "contrastive_direction": "both", "cosine_weight": 0.0, "correction": 0.0}


@register(
    "vacsr",
    VacsrConfig,
    presets={
        "paper": {"adapter": {"residual": "none"}, "objective": {"cosine_weight": 0.0, "correction": 0.0}},
        "ensemble": {"members": 4, "teacher": 0.5, "trust": 0.1, "objective": _ENSEMBLE},
    },
)
class Vacsr(Method):
    """Score = decoder of the mixture's mean (+ a·cos + b); uncertainty = mixed bounded variance of the pair."""

    config: VacsrConfig
    logit_score = True
    soft_labels = True

    def __init__(self, config: VacsrConfig, *, dim: int) -> None:
        super().__init__(config, dim=dim)
        self.adapter = VariationalAdapter(dim, config.adapter)
        self.objective = VacsrObjective(config.objective)
        # What looks along columns needs the whole batch, not a block of rows.
        self.pairwise = "both" not in (config.objective.negative_direction, config.objective.contrastive_direction)
        self.pair_width = self.adapter.components * self.adapter.latent

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        return self.objective(self.adapter, v.mean, t.mean, block=pairs)

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        return self.adapter.logit(v.mean.unsqueeze(1), t.mean.unsqueeze(0))

    def aligned_score(self, v: Embedding, t: Embedding) -> Tensor:
        return self.adapter.logit(v.mean, t.mean)

    def grade(self, score: Tensor) -> Tensor:
        return score.sigmoid()  # the paper's similarity

    def uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        return self.adapter.uncertainty(v.mean, t.mean)

    def param_groups(self) -> list[ParamGroup]:
        return split_by_decay("adapter", self.adapter.named_parameters(), lr_scale=self.config.lr_scale)

    def fold(self) -> FoldedScore | None:
        try:
            return FoldedScore((self.adapter.fold(),))
        except NotFoldable:
            return None
