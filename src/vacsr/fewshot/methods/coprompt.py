"""CoPrompt (Roy & Etemad, ICLR 2024): MaPLe, an adapter on each side's features, and a pull towards the frozen towers.

An adapter is two maps without bias, each followed by ReLU; its output is blended with its input. Such an adapter of c·x
is c times that of x, so it does not matter that features are normalised before and not only after.

Loss = CE + W·[(1 − cos(t, t°)) + (1 − cos(v, v°))]. t° are the frozen text tower's features of one sentence per class,
drawn in each step from the class's descriptions; a class without any is described by the data set's own template. v°
are the frozen image tower's features of a second view of the photos.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vacsr.config.base import register
from vacsr.errors import UsageError
from vacsr.fewshot.methods.base import (
    PUBLIC_FRAME,
    ClassSet,
    PublishedPlan,
    ShotBatch,
    cosine_distance,
    drawn_from,
)
from vacsr.fewshot.methods.clip import ClipModel, unit
from vacsr.fewshot.methods.maple import DeepPromptConfig, Maple
from vacsr.noise import RowNoise, Stream
from vacsr.objective import LossTerms

_ROWS = 256  # sentences encoded at a time
_DEPTH_TOKENS_CONSISTENCY = {
    "imagenet": (12, 4, 8.0), "caltech101": (12, 4, 4.0), "oxford_pets": (12, 2, 0.1), "stanford_cars": (12, 4, 4.0),
    "oxford_flowers": (9, 4, 8.0), "food101": (9, 4, 0.5), "fgvc_aircraft": (9, 4, 2.0), "sun397": (12, 4, 8.0),
    "dtd": (12, 2, 8.0), "eurosat": (12, 2, 0.1), "ucf101": (12, 4, 2.0),
}  # fmt: skip
"""Chosen for each data set in the public code."""


class CopromptConfig(DeepPromptConfig):
    """CoPrompt: MaPLe, adapters on the features, and a pull towards the frozen towers.

    Defaults are those of its configuration file; its runs set tokens, depth and consistency per data set.
    """

    name: Literal["coprompt"] = "coprompt"
    """The method's name."""
    reduction: Annotated[int, Field(ge=1)] = 4
    """The adapters' hidden layer has the features' dimension divided by this."""
    image_blend: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the adapter's output in an image's feature."""
    text_blend: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of the adapter's output in a class's feature."""
    consistency: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the two cosine terms."""


class FeatureAdapter(nn.Module):
    """d → d/r → d without biases, ReLU after both, blended with its input."""

    def __init__(self, dim: int, *, reduction: int, blend: float) -> None:
        super().__init__()
        self.blend = blend
        self.down = nn.Linear(dim, max(1, dim // reduction), bias=False)
        self.up = nn.Linear(max(1, dim // reduction), dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Unit vectors to unit vectors. [N, d] -> [N, d]"""
        adapted = functional.relu(self.up(functional.relu(self.down(x))))
        return unit(self.blend * adapted + (1.0 - self.blend) * x)


class SentenceFeatures(NamedTuple):
    """The frozen text tower's features of every sentence of a class list, class after class."""

    features: Tensor  # [S, d] unit
    first: Tensor  # [C] where a class begins
    lengths: Tensor  # [C] sentences per class

    def pick(self, *, seed: int, step: int) -> Tensor:
        """One sentence of each class, determined by seed and step. -> [C, d]"""
        rows = torch.arange(len(self.lengths))
        draw = RowNoise(seed, torch.tensor(step), rows, Stream.SENTENCES).uniform(1)[:, 0]
        chosen = torch.minimum((draw * self.lengths).long(), self.lengths - 1)
        return self.features[(self.first + chosen).to(self.features.device)]


@register("coprompt", CopromptConfig, presets={"paper": {}})
class Coprompt(Maple):
    """MaPLe's towers with adapters; trained to classify and to stay consistent."""

    config: CopromptConfig
    second_view = True
    # Both views squeeze the whole photo into the square and go through RandAugment; no crop and no flip.
    plan = PublishedPlan(
        {
            **PUBLIC_FRAME,
            **{"lr": 0.0035, "batch_size": 4, "epochs": 8, "view": "randaugment", "second_view": "randaugment"},
        },
        train_on={"food101": {"epochs": 5}},
        method_on={
            name: {"depth": depth, "tokens": tokens, "consistency": weight}
            for name, (depth, tokens, weight) in _DEPTH_TOKENS_CONSISTENCY.items()
        },
    )

    def __init__(self, clip: ClipModel, config: Any, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        with drawn_from(generator):
            self.image_adapter, self.text_adapter = (
                FeatureAdapter(clip.dim, reduction=config.reduction, blend=blend).to(self.prompts.tokens[0])
                for blend in (config.image_blend, config.text_blend)
            )

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Cross-entropy and the two consistency terms."""
        if batch.second is None:
            raise UsageError("coprompt needs two views of each photo — give ShotBatch.second too")
        images, texts = self.image_features(batch.pixels), self.text_features(classes)
        ce = functional.cross_entropy(self.scaled_cosines(images, texts), batch.labels)
        with torch.no_grad():
            frozen_images = self.clip.image(batch.second)
            frozen_texts = self.sentence_features(classes).pick(seed=batch.seed, step=batch.step)
        text, image = cosine_distance(texts, frozen_texts), cosine_distance(images, frozen_images)
        total = ce + self.config.consistency * (text + image)
        return LossTerms(total, {"ce": ce.detach(), "text": text.detach(), "image": image.detach()})

    def image_features(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, d]"""
        features: Tensor = self.image_adapter(super().image_features(pixels))
        return features

    def text_features(self, classes: ClassSet) -> Tensor:
        """-> [C, d]"""
        features: Tensor = self.text_adapter(super().text_features(classes))
        return features

    def sentence_features(self, classes: ClassSet) -> SentenceFeatures:
        """The frozen features of all sentences, cached for the class list."""
        return self.cached("sentences", (classes, self.clip.device), lambda: _encode_sentences(self.clip, classes))


def _encode_sentences(clip: ClipModel, classes: ClassSet) -> SentenceFeatures:
    given = classes.sentences or ((),) * len(classes.names)
    if len(given) != len(classes.names):
        raise UsageError(f"{len(given)} lists of sentences for {len(classes.names)} classes — give one list for each")
    lists = [sentences or (prompt,) for sentences, prompt in zip(given, classes.prompts(), strict=True)]
    flat = [sentence for sentences in lists for sentence in sentences]
    features = [clip.text(clip.tokens(flat[row : row + _ROWS])) for row in range(0, len(flat), _ROWS)]
    lengths = torch.tensor([len(sentences) for sentences in lists])
    return SentenceFeatures(torch.cat(features), lengths.cumsum(0) - lengths, lengths)
