"""CoOp (Zhou et al., IJCV 2022): the words in front of the class name become vectors that learn.

Sentence of a class: start, context, class name, full stop, end. The context replaces word embeddings, so its places
get positions as words do. It starts at the embeddings of real words: before training, with the same words as the
template, the method is zero-shot CLIP.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vacsr.backbones.edits import TowerEdits, word_table
from vacsr.config.fewshot.prompts import CoopConfig
from vacsr.errors import UsageError
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, cross_entropy, scaled_cosines
from vacsr.methods.fewshot.clip import ClipModel
from vacsr.objective import LossTerms


class ContextWords(TowerEdits):
    """The words after the start of every sentence replaced by vectors: [n, W] for all sentences, or [B, n, W]."""

    def __init__(self, context: Tensor) -> None:
        self.context = context

    def words(self, tokens: Tensor) -> Tensor:
        """[B, L, W] -> [B, L, W]"""
        context = self.context.to(tokens.dtype).expand(len(tokens), -1, -1)
        return torch.cat((tokens[:, :1], context, tokens[:, 1 + context.shape[1] :]), dim=1)


def context_vectors(clip: ClipModel, context: str) -> Tensor:
    """The embeddings of the context's words. -> [n, W]"""
    ids = clip.tokens([context])[0, 1:-1]
    return word_table(clip.backbone.text).weight.detach()[ids].clone()


def context_tokens(clip: ClipModel, context: str, *, names: tuple[str, ...]) -> Tensor:
    """Ids of "context name.", which begin with the same tokens for every class. -> [C, L]"""
    ids = clip.tokens([f"{context} {name.replace('_', ' ')}." for name in names])
    own = clip.tokens([context])[0, 1:-1]
    named = ids[:, 1 + len(own) :].ge(0).sum(dim=1) >= 2  # a word of the name and the end
    if not bool(named.all() and (ids[:, 1 : 1 + len(own)] == own).all()):
        raise UsageError(
            f"context {context!r} does not stand as {len(own)} tokens before the class names — end it with a whole "
            f"word and keep sentences within {clip.backbone.text.context} tokens"
        )
    return ids


class Coop(FewshotMethod):
    """One context for all classes; cross entropy of scaled cosines."""

    def __init__(self, clip: ClipModel, config: CoopConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.config = config
        self.context = nn.Parameter(context_vectors(clip, config.context))

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Cross entropy; the photos' features are fixed."""
        with torch.no_grad():
            images = self.clip.image(batch.pixels)
        return cross_entropy(scaled_cosines(images, self._texts(classes), scale=self.clip.scale), batch.labels)

    def _texts(self, classes: ClassSet) -> Tensor:
        """-> [C, d]"""
        return self.clip.text(self.sentence_ids(classes), edits=ContextWords(self.context))

    def tokenize(self, classes: ClassSet) -> Tensor:
        """With the context's words. -> [C, L]"""
        return context_tokens(self.clip, self.config.context, names=classes.names)

    @torch.no_grad()
    def prepared(self, classes: ClassSet) -> Tensor:
        """-> [C, d]"""
        return self._texts(classes)

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        return scaled_cosines(self.clip.image(pixels), prepared, scale=self.clip.scale)
