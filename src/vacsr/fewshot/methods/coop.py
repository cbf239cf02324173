"""CoOp (Zhou et al., IJCV 2022) and CoCoOp (Zhou et al., CVPR 2022): the words in front of the class name are learned.

The context replaces word embeddings and starts at those of real words: before training, with the same words as the
template, CoOp is zero-shot CLIP. CoCoOp adds a vector made from the photo to every context vector, so each photo has
sentences of its own: B photos and C classes are B·C passes through the text tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.backbones.edits import TowerEdits, splice, word_table
from vacsr.config.base import MethodConfig, register
from vacsr.errors import UsageError
from vacsr.fewshot.methods.base import (
    ClassSet,
    FewshotMethod,
    PublishedPlan,
    ShotBatch,
    cross_entropy,
    drawn_from,
    encode_chunks,
)
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.objective import LossTerms


class CoopConfig(MethodConfig):
    """Context words shared by all classes are learned as vectors (CoOp). Defaults as published for base-to-novel."""

    name: Literal["coop"] = "coop"
    context: Annotated[str, Field(min_length=1)] = "a photo of a"
    """Words whose embeddings the context starts at, one vector per token; the class name and a full stop follow."""


class CocoopConfig(CoopConfig):
    """CoOp's context, shifted by a small network that sees the photo (CoCoOp). Defaults as published."""

    name: Literal["cocoop"] = "cocoop"  # type: ignore[assignment]
    reduction: Annotated[int, Field(ge=1)] = 16
    """The network's hidden layer has d divided by this: 32 for CLIP's 512."""
    chunk: Annotated[int, Field(ge=1)] = 2048
    """Prompts encoded at a time, of photos × classes; where more are needed, training recomputes them."""


@dataclass(frozen=True, eq=False)
class TextPrompts(TowerEdits):
    """Replaces what follows the start of every sentence by vectors: the words, and the input of further blocks."""

    prompts: Sequence[Tensor]  # of the words and of blocks 1, 2, …: [n, W] for all sentences, or [C, n, W]

    def words(self, tokens: Tensor) -> Tensor:
        return splice(tokens, self.prompts[0], start=1, length=self.prompts[0].shape[-2])

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        if not 0 < depth < len(self.prompts):
            return tokens
        return splice(tokens, self.prompts[depth], start=1, length=self.prompts[depth].shape[-2])


def context_template(context: str) -> str:
    """The sentence of a class: these words, its name and a full stop.

    >>> context_template("a {odd} photo of a")
    'a {{odd}} photo of a {}.'
    """
    return context.replace("{", "{{").replace("}", "}}") + " {}."


@register("coop", CoopConfig, presets={"paper": {}})
class Coop(FewshotMethod):
    """One context for all classes; cross-entropy of scaled cosines."""

    config: CoopConfig
    plan = PublishedPlan({"lr": 0.002, "batch_size": 32, "epochs": 200}, train_on={"imagenet": {"epochs": 50}})

    def __init__(self, clip: ClipModel, config: CoopConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.prefix = clip.tokens([config.context])[0, 1:-1]
        self.context = nn.Parameter(word_table(clip.backbone.text).weight.detach()[self.prefix].clone())

    def text_edits(self) -> TextPrompts:
        return TextPrompts([self.context])

    def template(self, classes: ClassSet) -> str:
        return context_template(self.config.context)

    def tokenize(self, classes: ClassSet) -> Tensor:
        """The ids of every class must begin with those of the context."""
        ids, n = super().tokenize(classes), len(self.prefix)
        complete = ids[:, 1 + n :].ge(0).sum(dim=1) >= 2  # a word of the name and the end
        if not bool(complete.all() and (ids[:, 1 : 1 + n] == self.prefix.to(ids.device)).all()):
            message = f"context {self.config.context!r} is not tokenised as {n} tokens before every class name"
            limit = self.clip.backbone.text.context
            raise UsageError(f"{message} — end it with a whole word and keep sentences within {limit} tokens")
        return ids


@register("cocoop", CocoopConfig, presets={"paper": {}})
class Cocoop(Coop):
    """CoOp's context and a network that shifts it; cross-entropy of scaled cosines."""

    config: CocoopConfig
    plan = PublishedPlan({"lr": 0.002, "batch_size": 1, "epochs": 10})

    def __init__(self, clip: ClipModel, config: CocoopConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        hidden = max(1, clip.dim // config.reduction)
        with drawn_from(generator):
            self.meta = nn.Sequential(nn.Linear(clip.dim, hidden), nn.ReLU(), nn.Linear(hidden, clip.text_width))
        self.meta.to(self.context)

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        return cross_entropy(self._logits(batch.pixels, self.sentence_ids(classes)), batch.labels)

    def prepare(self, classes: ClassSet) -> Tensor:
        """The ids of the classes' sentences: their features depend on the photo. -> [C, L]"""
        return self.sentence_ids(classes)

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        return self._logits(pixels, prepared)

    def _logits(self, pixels: Tensor, ids: Tensor) -> Tensor:
        """Every class's sentence with every photo's context. [B, 3, S, S], [C, L] -> [B, C]"""
        images = self.image_features(pixels)
        contexts = self.context + self.meta(images).unsqueeze(1)  # [B, n, W]

        def encode(pairs: Tensor) -> Tensor:
            """Pair p is photo p // C with class p % C. [P] -> [P, d]"""
            return self.clip.text(ids[pairs % len(ids)], edits=TextPrompts([contexts[pairs // len(ids)]]))

        pairs = torch.arange(len(images) * len(ids), device=ids.device)
        texts = encode_chunks(encode, pairs, size=self.config.chunk).view(len(images), len(ids), self.clip.dim)
        with torch.autocast(images.device.type, enabled=False):
            return self.clip.scale * (images.unsqueeze(1) * texts).sum(dim=-1)
