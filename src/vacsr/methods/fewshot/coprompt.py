"""CoPrompt (Roy & Etemad, ICLR 2024): MaPLe, an adapter on each side's features, and a pull towards the frozen towers.

An adapter is two maps without bias, each followed by ReLU; what it gives is blended with the feature it was given. Such
an adapter of c·x is c times that of x, so it does not matter that features are normalised before and not only after.

Loss = CE + W·[(1 − cos(t, t°)) + (1 − cos(v, v°))]. t° are the frozen text tower's features of one sentence per class,
drawn anew in each step from the class's descriptions; a class without any is told by the data set's own template. v°
are the frozen image tower's features of a second view of the photos.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.config.fewshot.tuning import CopromptConfig
from vacsr.errors import UsageError
from vacsr.methods.fewshot.base import ClassSet, ShotBatch, drawn_from, scaled_cosines
from vacsr.methods.fewshot.clip import ClipModel, unit
from vacsr.methods.fewshot.kept import Kept
from vacsr.methods.fewshot.maple import Maple
from vacsr.noise import RowNoise, Stream
from vacsr.objective import LossTerms

_ROWS = 256  # sentences encoded at a time


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


class Described(NamedTuple):
    """Every sentence of a class list as the frozen text tower sees it, class after class."""

    features: Tensor  # [S, d] unit
    first: Tensor  # [C] where a class begins
    lengths: Tensor  # [C] how many a class has

    def pick(self, *, seed: int, step: int) -> Tensor:
        """One sentence of each class; the seed and the step decide. -> [C, d]"""
        places = torch.arange(len(self.lengths))
        draw = RowNoise(seed, torch.tensor(step), places, Stream.SENTENCES).uniform(1)[:, 0]
        chosen = torch.minimum((draw * self.lengths).long(), self.lengths - 1)
        return self.features[(self.first + chosen).to(self.features.device)]


class Coprompt(Maple):
    """MaPLe's towers with adapters; trained to classify and to stay consistent."""

    second_view = True
    config: CopromptConfig

    def __init__(
        self, clip: ClipModel, config: CopromptConfig, *, classes: ClassSet, generator: torch.Generator
    ) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        with drawn_from(generator):
            self.image_adapter, self.text_adapter = (
                FeatureAdapter(clip.dim, reduction=config.reduction, blend=blend).to(self.prompts.tokens[0])
                for blend in (config.image_blend, config.text_blend)
            )
        self._described = Kept[Described]()

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Cross-entropy and the two consistency terms."""
        if batch.second is None:
            raise UsageError("coprompt was given one view of each photo — give ShotBatch.second too")
        images, texts = self.image_features(batch.pixels), self.text_features(classes)
        ce = functional.cross_entropy(scaled_cosines(images, texts, scale=self.clip.scale), batch.labels)
        with torch.no_grad():
            seen = self.clip.image(batch.second)
            told = self.described(classes).pick(seed=batch.seed, step=batch.step)
        text, image = inconsistency(texts, told), inconsistency(images, seen)
        total = ce + self.config.consistency * (text + image)
        return LossTerms(total, {"ce": ce.detach(), "text": text.detach(), "image": image.detach()})

    def image_features(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, d] unit"""
        out: Tensor = self.image_adapter(super().image_features(pixels))
        return out

    def text_features(self, classes: ClassSet) -> Tensor:
        """-> [C, d] unit"""
        out: Tensor = self.text_adapter(super().text_features(classes))
        return out

    def described(self, classes: ClassSet) -> Described:
        """The frozen features of all sentences, worked out once for a class list."""
        return self._described.of((classes, self.clip.device), lambda: _describe(self.clip, classes))


def inconsistency(found: Tensor, wanted: Tensor) -> Tensor:
    """1 − cos of unit vectors, averaged. [N, d], [N, d] -> 0-d"""
    return 1.0 - (found * wanted).sum(dim=-1).mean()


@torch.no_grad()
def _describe(clip: ClipModel, classes: ClassSet) -> Described:
    told = classes.sentences or ((),) * len(classes.names)
    if len(told) != len(classes.names):
        raise UsageError(f"{len(told)} lists of sentences for {len(classes.names)} classes — give one list for each")
    lists = [own or (prompt,) for own, prompt in zip(told, classes.prompts(), strict=True)]
    flat = [sentence for own in lists for sentence in own]
    features = [clip.text(clip.tokens(flat[row : row + _ROWS])) for row in range(0, len(flat), _ROWS)]
    lengths = torch.tensor([len(own) for own in lists])
    return Described(torch.cat(features), lengths.cumsum(0) - lengths, lengths)
