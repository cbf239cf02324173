"""CLIPood (Shu et al., ICML 2023): the image tower learns with a margin, and its weights are averaged over training.

Training compares f − λ·t_y with every class, where y is the photo's own: y must beat class c by λ·(1 − t_y·t_c), more
where the texts say that c is less like y. The text tower rests; predictions have no margin.

What is kept is the mean of the weights before the first step and after each of N, weighted by the Beta(β, β) density at
(i+½)/(N+1). It is updated in every step, so one copy of the tower is held beside it. Before training the method is
zero-shot CLIP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vacsr.config.fewshot.tuning import ClipoodConfig
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, cross_entropy, scaled_cosines
from vacsr.methods.fewshot.clip import ClipModel
from vacsr.methods.fewshot.kept import Kept
from vacsr.objective import LossTerms


def beta_weight(i: int, steps: int, *, beta: float) -> float:
    """The Beta(β, β) density at (i+½)/(N+1), not normalised.

    >>> beta_weight(0, 1, beta=1.0), round(beta_weight(0, 9, beta=0.5) / beta_weight(9, 9, beta=0.5), 9)
    (1.0, 1.0)
    """
    place = (i + 0.5) / (steps + 1)
    return float((place * (1.0 - place)) ** (beta - 1.0))


class RunningMean(nn.Module):
    """A weighted mean of some tensors' values over time. Its state moves and is saved with the module that has it."""

    weight: Tensor

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros((), device=tensors[0].device))
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"mean_{number}", tensor.detach().clone())

    def means(self) -> list[Tensor]:
        """As many as the tensors, in their order."""
        return [buffer for name, buffer in self.named_buffers() if name != "weight"]

    @torch.no_grad()
    def add(self, tensors: Sequence[Tensor], weight: float) -> None:
        """m ← m + (x − m)·w/(W + w), W ← W + w."""
        self.weight += weight
        share = weight / self.weight  # a tensor: a plain number would wait for the device
        for mean, tensor in zip(self.means(), tensors, strict=True):
            mean.lerp_(tensor.detach(), share.to(mean.dtype))


class Clipood(FewshotMethod):
    """Cross-entropy with a margin on scaled cosines of the image tower and the frozen texts."""

    def __init__(
        self, clip: ClipModel, config: ClipoodConfig, *, classes: ClassSet, generator: torch.Generator
    ) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.config = config
        clip.backbone.image.requires_grad_(True)
        clip.image_map.requires_grad_(True)
        self.average = RunningMean(list(self.learned().values()))
        self._texts = Kept[Tensor]()

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Mean cross-entropy of the batch, with the margin."""
        images, texts = self.clip.image(batch.pixels), self.prepared(classes)
        return cross_entropy(
            margin_logits(images, texts, batch.labels, margin=self.config.margin, scale=self.clip.scale), batch.labels
        )

    @torch.no_grad()
    def prepared(self, classes: ClassSet) -> Tensor:
        """Unit vectors of the classes' prompts, kept from step to step. -> [C, d]"""
        ids = self.sentence_ids(classes)
        return self._texts.of((classes.names, classes.template, ids.device), lambda: self.clip.text(ids))

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        return scaled_cosines(self.clip.image(pixels), prepared, scale=self.clip.scale)

    def after_step(self, step: int, steps: int) -> None:
        """Take the present weights into the mean; before the first, those that training began with."""
        now = list(self.learned().values())
        if step == 0:
            self.average.add(self.average.means(), beta_weight(0, steps, beta=self.config.beta))
        self.average.add(now, beta_weight(step + 1, steps, beta=self.config.beta))

    @torch.no_grad()
    def finish(self) -> None:
        """The mean becomes the tower."""
        for parameter, mean in zip(self.learned().values(), self.average.means(), strict=True):
            parameter.copy_(mean)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Saved weights; a training from here begins its mean with them."""
        super().load(tensors)
        self.average = RunningMean(list(self.learned().values()))


def margin_logits(images: Tensor, texts: Tensor, labels: Tensor, *, margin: float, scale: float) -> Tensor:
    """s·(f − λ·t_y)·t_c. [B, d], [C, d], [B] -> [B, C]"""
    return scaled_cosines(images - margin * texts[labels], texts, scale=scale)
