"""CLIPood (Shu et al., ICML 2023): the image tower learns with a margin, and its weights are averaged over training.

The loss compares f − λ·t_y with every class: y must beat class c by λ·(1 − t_y·t_c). The text tower is frozen, and
predictions have no margin. Before training the method is zero-shot CLIP.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.config.base import MethodConfig, register
from vacsr.fewshot.methods.base import ClassSet, FewshotMethod, PublishedPlan, ShotBatch, cross_entropy
from vacsr.objective import LossTerms


class ClipoodConfig(MethodConfig):
    """CLIPood: the image tower learns, the text tower is frozen. Defaults as published for base-to-novel."""

    name: Literal["clipood"] = "clipood"
    margin: Annotated[float, Field(ge=0)] = 0.3
    """λ: how much of its own class's text is subtracted from an image before the loss compares it with all classes."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weights after step i of N are averaged by the Beta(β, β) density at (i+½)/(N+1); below 1 both ends count most.

    The published runs for other domains have 0.5; 1 is the plain mean.
    """


def beta_weight(i: int, steps: int, *, beta: float) -> float:
    """The Beta(β, β) density at (i+½)/(N+1), not normalised.

    >>> beta_weight(0, 1, beta=1.0), round(beta_weight(0, 9, beta=0.5) / beta_weight(9, 9, beta=0.5), 9)
    (1.0, 1.0)
    """
    x = (i + 0.5) / (steps + 1)
    return float((x * (1.0 - x)) ** (beta - 1.0))


@register("clipood", ClipoodConfig, presets={"paper": {}})
class Clipood(FewshotMethod):
    """Cross-entropy with a margin on scaled cosines of the image tower and the frozen texts."""

    config: ClipoodConfig
    weight: Tensor
    plan = PublishedPlan(
        {
            "optimizer": "adamw", "lr": 5e-6, "weight_decay": 0.1, "schedule": "cosine-step", "warmup_epochs": 0,
            "epochs": 1, "steps_per_epoch": 500, "batch_size": 36, "crop": (0.7, 1.0),
        },
        train_on={
            "imagenet": {"epochs": 10}, "fgvc_aircraft": {"epochs": 10}, "stanford_cars": {"epochs": 5},
            "sun397": {"epochs": 5}, "ucf101": {"epochs": 2},
        },
        domain_method={"beta": 0.5},
    )  # fmt: skip

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        self.clip.backbone.image.requires_grad_(True)
        self.clip.image_map.requires_grad_(True)
        tower = [parameter.detach().clone() for parameter in self.trainable().values()]
        self.average = nn.ParameterList(tower).requires_grad_(False)
        self.register_buffer("weight", torch.zeros((), device=self.clip.device))  # of all that the average holds

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Mean cross-entropy of s·(f − λ·t_y)·t_c over the batch."""
        images, texts = self.image_features(batch.pixels), self.text_features(classes)
        shifted = images - self.config.margin * texts[batch.labels]
        return cross_entropy(self.scaled_cosines(shifted, texts), batch.labels)

    def text_features(self, classes: ClassSet) -> Tensor:
        return self.frozen_texts(classes)

    @torch.no_grad()
    def after_step(self, step: int, steps: int) -> None:
        """Add the present weights to the average, which starts with those that training began with."""
        if step == 0:
            self.weight.fill_(beta_weight(0, steps, beta=self.config.beta))
        weight = beta_weight(step + 1, steps, beta=self.config.beta)
        self.weight += weight
        share = weight / self.weight  # a tensor: a plain number would wait for the device
        for average, parameter in zip(self.average, self.trainable().values(), strict=True):
            average.lerp_(parameter, share.to(average.dtype))

    @torch.no_grad()
    def finish(self) -> None:
        """The average becomes the tower."""
        for parameter, average in zip(self.trainable().values(), self.average, strict=True):
            parameter.copy_(average)
