"""CoCoOp (Zhou et al., CVPR 2022): CoOp's context, moved by what the photo shows.

A small network maps the photo's unit feature to one vector that is added to every context vector, so each photo has
sentences of its own: B photos and C classes are B·C passes through the text tower. The network's weights are drawn, so
before training the logits are near those of zero-shot CLIP, not equal to them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vacsr.config.fewshot.prompts import CocoopConfig
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, cross_entropy, drawn_from
from vacsr.methods.fewshot.clip import ClipModel
from vacsr.methods.fewshot.coop import ContextWords, context_tokens, context_vectors
from vacsr.objective import LossTerms


class Cocoop(FewshotMethod):
    """A context and a network that moves it; cross entropy of scaled cosines."""

    def __init__(self, clip: ClipModel, config: CocoopConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.config = config
        self.context = nn.Parameter(context_vectors(clip, config.context))
        middle = max(1, clip.dim // config.reduction)
        with drawn_from(generator):
            self.meta = nn.Sequential(nn.Linear(clip.dim, middle), nn.ReLU(), nn.Linear(middle, clip.text_width))
        self.meta.to(self.context)

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Cross entropy; the photos' features are fixed."""
        return cross_entropy(self._logits(batch.pixels, self.prepared(classes)), batch.labels)

    def prepared(self, classes: ClassSet) -> Tensor:
        """The ids of the classes' sentences: their features depend on the photo. -> [C, L]"""
        return self.sentence_ids(classes)

    def tokenize(self, classes: ClassSet) -> Tensor:
        """With the context's words. -> [C, L]"""
        return context_tokens(self.clip, self.config.context, names=classes.names)

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, L] -> [B, C]"""
        return self._logits(pixels, prepared)

    def _logits(self, pixels: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            images = self.clip.image(pixels)
        contexts = self.context + self.meta(images).unsqueeze(1)  # [B, n, W]
        texts = self._texts(contexts, tokens)
        with torch.autocast(images.device.type, enabled=False):
            return self.clip.scale * (images.unsqueeze(1) * texts).sum(dim=-1)

    def _texts(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """Every class's sentence with every photo's context. [B, n, W], [C, L] -> [B, C, d]"""
        pairs = torch.arange(len(contexts) * len(tokens), device=tokens.device)
        chunks = torch.split(pairs, self.config.chunk)
        if torch.is_grad_enabled() and len(chunks) > 1:
            parts = [checkpoint(self._some, contexts, tokens, chunk, use_reentrant=False) for chunk in chunks]
        else:
            parts = [self._some(contexts, tokens, chunk) for chunk in chunks]
        return torch.cat(parts).view(len(contexts), len(tokens), self.clip.dim)

    def _some(self, contexts: Tensor, tokens: Tensor, pairs: Tensor) -> Tensor:
        """Pair p is photo p // C with class p % C. [P] -> [P, d]"""
        photo, name = pairs // len(tokens), pairs % len(tokens)
        return self.clip.text(tokens[name], edits=ContextWords(contexts[photo]))
