"""Zero-shot CLIP: the class whose sentence is nearest to the photo. What every other method must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, cross_entropy, scaled_cosines
from vacsr.objective import LossTerms


class Zeroshot(FewshotMethod):
    """scale·cos with the data set's own template; nothing learns."""

    trains = False

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Cross entropy, to look at: there is nothing to train."""
        return cross_entropy(self.logits(batch.pixels, self.prepared(classes)), batch.labels)

    @torch.no_grad()
    def prepared(self, classes: ClassSet) -> Tensor:
        """-> [C, d]"""
        return self.clip.text(self.sentence_ids(classes))

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        return scaled_cosines(self.clip.image(pixels), prepared, scale=self.clip.scale)
