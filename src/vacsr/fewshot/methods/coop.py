"""CoOp (Zhou et al., IJCV 2022): the words in front of the class name become vectors that learn.

Sentence of a class: start, context, class name, full stop, end. The context replaces word embeddings, so it gets
positions as words do. It starts at the embeddings of real words: before training, with the same words as the template,
the method is zero-shot CLIP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.backbones.edits import TowerEdits, word_table
from vacsr.config.base import MethodConfig, register
from vacsr.errors import UsageError
from vacsr.fewshot.methods.base import PUBLIC_FRAME, ClassSet, FewshotMethod, PublishedPlan, splice
from vacsr.fewshot.methods.clip import ClipModel


class CoopConfig(MethodConfig):
    """Context words shared by all classes are learned as vectors (CoOp). Defaults as published for base-to-novel."""

    name: Literal["coop"] = "coop"
    """The method's name."""
    context: Annotated[str, Field(min_length=1)] = "a photo of a"
    """Words whose embeddings the context starts at, one vector per token; the class name and a full stop follow."""


class TextPrompts(TowerEdits):
    """Replaces what follows the start of every sentence by vectors: the words, and the input of further blocks."""

    def __init__(self, prompts: Sequence[Tensor]) -> None:
        """Of the words and of blocks 1, 2, …: [n, W] for all sentences, or [C, n, W]."""
        self.prompts = prompts

    def words(self, tokens: Tensor) -> Tensor:
        """[C, L, W] -> [C, L, W]"""
        return splice(tokens, self.prompts[0], start=1, length=self.prompts[0].shape[-2])

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """[C, L, W] -> [C, L, W]"""
        if not 0 < depth < len(self.prompts):
            return tokens
        return splice(tokens, self.prompts[depth], start=1, length=self.prompts[depth].shape[-2])


@register("coop", CoopConfig, presets={"paper": {}})
class Coop(FewshotMethod):
    """One context for all classes; cross-entropy of scaled cosines."""

    config: CoopConfig
    plan = PublishedPlan(
        {**PUBLIC_FRAME, "lr": 0.002, "batch_size": 32, "epochs": 200}, train_on={"imagenet": {"epochs": 50}}
    )

    def __init__(self, clip: ClipModel, config: CoopConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.prefix = clip.tokens([config.context])[0, 1:-1]
        self.context = nn.Parameter(word_table(clip.backbone.text).weight.detach()[self.prefix].clone())

    def text_features(self, classes: ClassSet) -> Tensor:
        """-> [C, d]"""
        return self.clip.text(self.sentence_ids(classes), edits=TextPrompts([self.context]))

    def tokenize(self, classes: ClassSet) -> Tensor:
        """Ids of "context name.", which begin with the same tokens for every class. -> [C, L]"""
        context, n = self.config.context, len(self.prefix)
        ids = self.clip.tokens([f"{context} {name.replace('_', ' ')}." for name in classes.names])
        complete = ids[:, 1 + n :].ge(0).sum(dim=1) >= 2  # a word of the name and the end
        if not bool(complete.all() and (ids[:, 1 : 1 + n] == self.prefix.to(ids.device)).all()):
            raise UsageError(
                f"context {context!r} is not tokenised as {n} tokens before every class name — end it with a whole "
                f"word and keep sentences within {self.clip.backbone.text.context} tokens"
            )
        return ids
