"""CoCoOp (Zhou et al., CVPR 2022): CoOp's context, shifted by what the photo shows.

A small network maps the photo's unit feature to one vector that is added to every context vector, so each photo has
sentences of its own: B photos and C classes are B·C passes through the text tower. The network's weights are drawn, so
before training the logits are near those of zero-shot CLIP, not equal to them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vacsr.config.base import register
from vacsr.fewshot.methods.base import PUBLIC_FRAME, ClassSet, PublishedPlan, ShotBatch, cross_entropy, drawn_from
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.coop import Coop, CoopConfig, TextPrompts
from vacsr.objective import LossTerms


class CocoopConfig(CoopConfig):
    """CoOp's context, shifted by a small network that sees the photo (CoCoOp). Defaults as published."""

    name: Literal["cocoop"] = "cocoop"  # type: ignore[assignment]
    """The method's name."""
    reduction: Annotated[int, Field(ge=1)] = 16
    """The network's hidden layer has d divided by this: 32 for CLIP's 512."""
    chunk: Annotated[int, Field(ge=1)] = 2048
    """Prompts encoded at a time, of photos × classes; where more are needed, training recomputes them."""


@register("cocoop", CocoopConfig, presets={"paper": {}})
class Cocoop(Coop):
    """CoOp's context and a network that shifts it; cross-entropy of scaled cosines."""

    config: CocoopConfig
    plan = PublishedPlan({**PUBLIC_FRAME, "lr": 0.002, "batch_size": 1, "epochs": 10})

    def __init__(self, clip: ClipModel, config: CocoopConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        hidden = max(1, clip.dim // config.reduction)
        with drawn_from(generator):
            self.meta = nn.Sequential(nn.Linear(clip.dim, hidden), nn.ReLU(), nn.Linear(hidden, clip.text_width))
        self.meta.to(self.context)

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Cross-entropy."""
        return cross_entropy(self._logits(batch.pixels, self.sentence_ids(classes)), batch.labels)

    def prepare(self, classes: ClassSet) -> Tensor:
        """The ids of the classes' sentences: their features depend on the photo. -> [C, L]"""
        return self.sentence_ids(classes)

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, L] -> [B, C]"""
        return self._logits(pixels, prepared)

    def _logits(self, pixels: Tensor, ids: Tensor) -> Tensor:
        images = self.image_features(pixels)
        contexts = self.context + self.meta(images).unsqueeze(1)  # [B, n, W]
        texts = self._encode(contexts, ids)
        with torch.autocast(images.device.type, enabled=False):
            return self.clip.scale * (images.unsqueeze(1) * texts).sum(dim=-1)

    def _encode(self, contexts: Tensor, ids: Tensor) -> Tensor:
        """Every class's sentence with every photo's context. [B, n, W], [C, L] -> [B, C, d]"""
        pairs = torch.arange(len(contexts) * len(ids), device=ids.device)
        chunks = torch.split(pairs, self.config.chunk)
        if torch.is_grad_enabled() and len(chunks) > 1:
            parts = [checkpoint(self._encode_pairs, contexts, ids, chunk, use_reentrant=False) for chunk in chunks]
        else:
            parts = [self._encode_pairs(contexts, ids, chunk) for chunk in chunks]
        return torch.cat(parts).view(len(contexts), len(ids), self.clip.dim)

    def _encode_pairs(self, contexts: Tensor, ids: Tensor, pairs: Tensor) -> Tensor:
        """Pair p is photo p // C with class p % C. [P] -> [P, d]"""
        photo, label = pairs // len(ids), pairs % len(ids)
        return self.clip.text(ids[label], edits=TextPrompts([contexts[photo]]))
