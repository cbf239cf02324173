"""MaPLe (Khattak et al., CVPR 2023): learned tokens in the first blocks of both towers, the image's mapped from text.

A class is "a photo of a {}." whatever the data set. In the text tower the learned tokens follow the start token, in
place of the first context words; in the image tower they come last, before the first norm. Each of the next blocks
drops their outputs and gets new ones; after the last such block they stay. Image tokens are a linear map of the text
tokens of the same block. Both towers are frozen.

The first text tokens start as the words they replace, the others small and random, so that predictions at the start are
near zero-shot CLIP's but not equal to them. With mean pooling a tower's mean includes the learned tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vacsr.backbones.edits import TowerEdits, word_table
from vacsr.config.base import MethodConfig, register
from vacsr.errors import UsageError
from vacsr.fewshot.methods.base import PUBLIC_FRAME, ClassSet, FewshotMethod, PublishedPlan, drawn_from, splice
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.coop import TextPrompts

_TOKEN_STD = 0.02


class DeepPromptConfig(MethodConfig):
    """Learned tokens in the first blocks of both towers; the image tokens are made from the text tokens."""

    tokens: Annotated[int, Field(ge=1)] = 2
    """Tokens per block; they replace the context's first tokens."""
    depth: Annotated[int, Field(ge=1)] = 9
    """Blocks that get tokens of their own, from the first on; at most all blocks of the shallower tower."""
    context: str = "a photo of a"
    """A class is described as these words, its name and a full stop; the first block's tokens start as its first."""


class MapleConfig(DeepPromptConfig):
    """MaPLe. Defaults as published for base-to-novel; its ImageNet run for other domains has depth 3."""

    name: Literal["maple"] = "maple"
    """The method's name."""


class DeepPrompts(nn.Module):
    """The tokens of every prompted block, and the maps from text tokens to image tokens."""

    def __init__(self, first: Tensor, *, depth: int, image_width: int, generator: torch.Generator) -> None:
        """``first``: the text tokens of the first block at the start. [n, W_text]"""
        super().__init__()
        text_width = first.shape[1]
        fresh = [_TOKEN_STD * torch.randn(first.shape, generator=generator) for _ in range(depth - 1)]
        self.tokens = nn.ParameterList([first.clone(), *fresh])
        with drawn_from(generator):
            first_map, other_map = nn.Linear(text_width, image_width), nn.Linear(text_width, image_width)
        self.maps = nn.ModuleList([first_map, *(deepcopy(other_map) for _ in fresh)])  # the others start equal
        self.to(first)

    def text(self) -> list[Tensor]:
        """By block. -> [n, W_text] each"""
        return list(self.tokens)

    def image(self) -> list[Tensor]:
        """By block. -> [n, W_image] each"""
        return [linear(tokens) for linear, tokens in zip(self.maps, self.tokens, strict=True)]


class ImagePrompts(TowerEdits):
    """Appends the first block's tokens; each deeper block replaces them by its own."""

    def __init__(self, prompts: Sequence[Tensor]) -> None:
        self.prompts = prompts

    def entry(self, tokens: Tensor) -> Tensor:
        """[B, L, W] -> [B, L + n, W]"""
        return splice(tokens, self.prompts[0], start=tokens.shape[1], length=0)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """[B, L + n, W] -> [B, L + n, W]"""
        if not 0 < depth < len(self.prompts):
            return tokens
        n = len(self.prompts[depth])
        return splice(tokens, self.prompts[depth], start=tokens.shape[1] - n, length=n)


@register("maple", MapleConfig, presets={"paper": {}})
class Maple(FewshotMethod):
    """Cross-entropy on scaled cosines of the prompted towers."""

    config: DeepPromptConfig
    plan = PublishedPlan(
        {**PUBLIC_FRAME, "lr": 0.0035, "batch_size": 4, "epochs": 5},
        domain_method={"depth": 3},
        domain_train={"lr": 0.0026, "epochs": 2},
    )

    def __init__(
        self, clip: ClipModel, config: DeepPromptConfig, *, classes: ClassSet, generator: torch.Generator
    ) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        depth = min(config.depth, len(clip.backbone.image.blocks()), len(clip.backbone.text.blocks()))
        first = first_words(clip, config.context, count=config.tokens)
        self.prompts = DeepPrompts(first, depth=depth, image_width=clip.image_width, generator=generator)

    def image_features(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, d]"""
        return self.clip.image(pixels, edits=ImagePrompts(self.prompts.image()))

    def text_features(self, classes: ClassSet) -> Tensor:
        """-> [C, d]"""
        return self.clip.text(self.sentence_ids(classes), edits=TextPrompts(self.prompts.text()))

    def tokenize(self, classes: ClassSet) -> Tensor:
        """With the context's words. -> [C, L]"""
        template = self.config.context.replace("{", "{{").replace("}", "}}") + " {}."
        return super().tokenize(ClassSet(classes.names, template))


@torch.no_grad()
def first_words(clip: ClipModel, context: str, *, count: int) -> Tensor:
    """Embeddings of a context's first tokens; class names are not among them. -> [count, W]"""
    ids = clip.tokens([context])[0]
    available = len(ids) - 2  # without start and end
    if available < count:
        raise UsageError(
            f"method.tokens is {count}, {context!r} has {available} tokens — set method.tokens to at most {available}, "
            "or give method.context more words"
        )
    words: Tensor = word_table(clip.backbone.text)(ids[1 : 1 + count])
    return words
