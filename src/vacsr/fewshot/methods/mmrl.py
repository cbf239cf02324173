"""MMRL (Guo and Gu, CVPR 2025): representation tokens that both towers share, inserted into their upper blocks.

R [n, rep_dim] is mapped by a separate linear layer into every one of the last ``layers`` blocks of each tower. The n
mapped tokens follow the first token; the first of these blocks inserts them and each following block replaces them.

A photo has two features: f_c from the class token as in CLIP, and f_r from the mean of the representation tokens
through a projection that learns. Loss: w·CE(f_c) + (1−w)·CE(f_r) + λ(1−cos(f_c, f⁰)) + λ(1−cos(t, t⁰)), where f⁰ and t⁰
are the frozen towers' features. f_r is fitted to the training classes; f_c alone scores other classes and domains.
"""

import copy
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.edits import TowerEdits, splice
from vacsr.config.base import MethodConfig, register
from vacsr.fewshot.methods.base import ClassSet, FewshotMethod, PublishedPlan, ShotBatch, cosine_distance, drawn_from
from vacsr.fewshot.methods.clip import unit
from vacsr.objective import LossTerms

_CONSISTENCY = {
    "stanford_cars": 7.0, "fgvc_aircraft": 6.0, "sun397": 6.0, "dtd": 6.0, "food101": 5.0, "oxford_flowers": 4.0,
    "ucf101": 3.0, "imagenet": 0.5, "caltech101": 0.5, "oxford_pets": 0.2, "eurosat": 0.01,
}  # fmt: skip
"""λ, chosen for each data set in the public code."""


class MmrlConfig(MethodConfig):
    """Tokens shared by both towers, inserted into their upper blocks. Defaults as published for base-to-novel."""

    name: Literal["mmrl"] = "mmrl"
    tokens: Annotated[int, Field(ge=1)] = 5
    """How many representation tokens."""
    rep_dim: Annotated[int, Field(ge=1)] = 512
    """Dimension of the shared tokens; 2048 in the published EuroSAT run."""
    layers: Annotated[int, Field(ge=1)] = 7
    """The last so many blocks of each tower: of twelve, from the sixth on. At most all of the shallower tower."""
    class_weight: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Share of the class token's feature in the loss and in the mixed logits; the representation's has the rest."""
    consistency: Annotated[float, Field(ge=0)] = 1.0
    """λ of both cosine terms that hold the features near the frozen towers'; the published runs set it per data set."""


class InsertedTokens(TowerEdits):
    """Inserts tokens after the first one at the first of the last blocks, and replaces them at each that follows."""

    def __init__(self, rows: Sequence[Tensor], *, depth: int) -> None:
        self.rows, self.first = rows, depth - len(rows)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """[B, L, W] -> [B, L + n, W] at the first of the blocks, the same length at the others"""
        index = depth - self.first
        return tokens if index < 0 else splice(tokens, self.rows[index], start=1, insert=index == 0)


def equal_maps(inputs: int, outputs: int, *, count: int) -> nn.ModuleList:
    """``count`` linear layers with the same initial weights."""
    layer = nn.Linear(inputs, outputs)
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(count))


@register("mmrl", MmrlConfig, presets={"paper": {}})
class Mmrl(FewshotMethod):
    """Two cross-entropies, and two cosines to the frozen towers."""

    config: MmrlConfig
    plan = PublishedPlan(
        {"optimizer": "adamw", "lr": 0.001, "batch_size": 4, "epochs": 10, "crop": (0.5, 1.0)},
        train_on={"imagenet": {"batch_size": 32, "epochs": 5}},
        method_on={
            **{name: {"consistency": weight} for name, weight in _CONSISTENCY.items()},
            "eurosat": {"consistency": _CONSISTENCY["eurosat"], "rep_dim": 2048},
        },
        domain_method={"consistency": 0.2},
        domain_train={"epochs": 1, "batch_size": 32, "warmup_epochs": 0},
    )

    def add_weights(self, classes: ClassSet, generator: torch.Generator) -> None:
        clip, config, self.names = self.clip, self.config, classes.names
        count = min(config.layers, *clip.depths)
        self.tokens = nn.Parameter(0.02 * torch.randn(config.tokens, config.rep_dim, generator=generator))
        with drawn_from(generator):
            self.image_maps = equal_maps(config.rep_dim, clip.image_width, count=count)
            self.text_maps = equal_maps(config.rep_dim, clip.text_width, count=count)
            self.projection = nn.Linear(clip.image_width, clip.dim, bias=False)
            nn.init.normal_(self.projection.weight, std=clip.image_width**-0.5)

    def both_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """f_c and f_r, unit vectors. [B, 3, S, S] -> [B, d], [B, d]"""
        norm: Any = self.clip.backbone.image.norm or nn.Identity()  # between last block and projection
        tokens = self.clip.image_tokens(pixels, edits=self.image_edits())
        inserted = norm(tokens[:, 1 : 1 + len(self.tokens)])
        return self.clip.pool_image(tokens), unit(self.projection(inserted.mean(dim=1)))

    def image_edits(self) -> InsertedTokens:
        return InsertedTokens([layer(self.tokens) for layer in self.image_maps], depth=self.clip.depths[0])

    def text_edits(self) -> InsertedTokens:
        return InsertedTokens([layer(self.tokens) for layer in self.text_maps], depth=self.clip.depths[1])

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        with torch.no_grad():
            frozen_images = self.clip.image(batch.pixels)
        (images, representations), texts = self.both_features(batch.pixels), self.text_features(classes)
        parts = {
            "ce": functional.cross_entropy(self.scaled_cosines(images, texts), batch.labels),
            "ce_rep": functional.cross_entropy(self.scaled_cosines(representations, texts), batch.labels),
            "image": cosine_distance(images, frozen_images),
            "text": cosine_distance(texts, self.frozen_texts(classes)),
        }
        ce = torch.lerp(parts["ce_rep"], parts["ce"], self.config.class_weight)
        total = ce + self.config.consistency * (parts["image"] + parts["text"])
        return LossTerms(total, {name: part.detach() for name, part in parts.items()})

    @torch.no_grad()
    def prepare(self, classes: ClassSet) -> tuple[Tensor, bool]:
        """Text features [C, d], and whether both features of a photo score this class list: that of training."""
        return self.text_features(classes), classes.names == self.names and not classes.shifted

    @torch.no_grad()
    def predict(self, pixels: Tensor, prepared: tuple[Tensor, bool]) -> tuple[Tensor, None]:
        images, representations = self.both_features(pixels)
        texts, mixed = prepared
        logits = self.scaled_cosines(images, texts)
        if mixed:
            logits = torch.lerp(self.scaled_cosines(representations, texts), logits, self.config.class_weight)
        return logits, None
