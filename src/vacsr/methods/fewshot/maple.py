"""MaPLe (Khattak et al., CVPR 2023): learned tokens in the first blocks of both towers, text's turned into image's.

A class is "a photo of a {}." whatever the data set. In the text tower the learned tokens stand after the start token,
in place of the first context words; in the image tower they come last, before the first norm. Each of the next blocks
drops what has become of them and gets fresh ones; after the last such block they stay. Image tokens are a linear map of
the text tokens of the same block. Both towers rest.

The first text tokens start as the words they replace, the others small and random, so that predictions at the start are
near zero-shot CLIP's but not equal to them. With mean pooling a tower's mean counts the learned tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from vacsr.backbones.edits import TowerEdits, word_table
from vacsr.config.fewshot.tuning import DeepPromptConfig
from vacsr.errors import UsageError
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, cross_entropy, drawn_from, scaled_cosines
from vacsr.methods.fewshot.clip import ClipModel
from vacsr.objective import LossTerms

_SPREAD = 0.02  # of fresh tokens


class DeepPrompts(nn.Module):
    """The tokens of every prompted block, and the maps that make image tokens of them."""

    def __init__(self, first: Tensor, *, depth: int, image_width: int, generator: torch.Generator) -> None:
        """``first``: the text tokens of the first block at the start. [n, W_text]"""
        super().__init__()
        text_width = first.shape[1]
        fresh = [_SPREAD * torch.randn(first.shape, generator=generator) for _ in range(depth - 1)]
        self.tokens = nn.ParameterList([first.clone(), *fresh])
        with drawn_from(generator):
            first_map, other_map = nn.Linear(text_width, image_width), nn.Linear(text_width, image_width)
        self.maps = nn.ModuleList([first_map, *(deepcopy(other_map) for _ in fresh)])  # the others start alike
        self.to(first)

    def text(self) -> list[Tensor]:
        """By block. -> [n, W_text] each"""
        return list(self.tokens)

    def image(self) -> list[Tensor]:
        """By block. -> [n, W_image] each"""
        return [into(tokens) for into, tokens in zip(self.maps, self.tokens, strict=True)]


class TextPrompts(TowerEdits):
    """Puts each block's tokens after the start token, over what stands there."""

    def __init__(self, tokens: Sequence[Tensor]) -> None:
        self.tokens = tokens

    def words(self, tokens: Tensor) -> Tensor:
        """[C, L, W] -> [C, L, W]"""
        return self._over(tokens, self.tokens[0])

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """[C, L, W] -> [C, L, W]"""
        return self._over(tokens, self.tokens[depth]) if 0 < depth < len(self.tokens) else tokens

    def _over(self, tokens: Tensor, own: Tensor) -> Tensor:
        return torch.cat((tokens[:, :1], _each(own, tokens), tokens[:, 1 + len(own) :]), dim=1)


class ImagePrompts(TowerEdits):
    """Appends the first block's tokens; each deeper block gets its own in their place."""

    def __init__(self, tokens: Sequence[Tensor]) -> None:
        self.tokens = tokens

    def entry(self, tokens: Tensor) -> Tensor:
        """[B, L, W] -> [B, L + n, W]"""
        return torch.cat((tokens, _each(self.tokens[0], tokens)), dim=1)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """[B, L + n, W] -> [B, L + n, W]"""
        if not 0 < depth < len(self.tokens):
            return tokens
        own = self.tokens[depth]
        return torch.cat((tokens[:, : -len(own)], _each(own, tokens)), dim=1)


def _each(own: Tensor, tokens: Tensor) -> Tensor:
    """The same tokens for every row. [n, W], [B, L, W] -> [B, n, W]"""
    return own.to(tokens.dtype).expand(len(tokens), -1, -1)


class Maple(FewshotMethod):
    """Cross-entropy on scaled cosines of the prompted towers."""

    def __init__(
        self, clip: ClipModel, config: DeepPromptConfig, *, classes: ClassSet, generator: torch.Generator
    ) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.config = config
        blocks = min(len(clip.backbone.image.blocks()), len(clip.backbone.text.blocks()))
        depth = min(config.depth, blocks)
        start = first_words(clip, config.context, count=config.tokens)
        self.prompts = DeepPrompts(start, depth=depth, image_width=clip.image_width, generator=generator)

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Mean cross-entropy of the batch."""
        images, texts = self.image_features(batch.pixels), self.text_features(classes)
        return cross_entropy(scaled_cosines(images, texts, scale=self.clip.scale), batch.labels)

    @torch.no_grad()
    def prepared(self, classes: ClassSet) -> Tensor:
        """Unit vectors of the classes. -> [C, d]"""
        return self.text_features(classes)

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: Tensor) -> Tensor:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        return scaled_cosines(self.image_features(pixels), prepared, scale=self.clip.scale)

    def image_features(self, pixels: Tensor) -> Tensor:
        """Unit vectors of photos. [B, 3, S, S] -> [B, d]"""
        return self.clip.image(pixels, edits=ImagePrompts(self.prompts.image()))

    def text_features(self, classes: ClassSet) -> Tensor:
        """Unit vectors of classes. -> [C, d]"""
        return self.clip.text(self.sentence_ids(classes), edits=TextPrompts(self.prompts.text()))

    def tokenize(self, classes: ClassSet) -> Tensor:
        """With the context's words. -> [C, L]"""
        own = ClassSet(classes.names, self.config.context.replace("{", "{{").replace("}", "}}") + " {}.")
        return self.clip.tokens(own.prompts())


@torch.no_grad()
def first_words(clip: ClipModel, context: str, *, count: int) -> Tensor:
    """Embeddings of a context's first tokens, those of a class name not among them. -> [count, W]"""
    tokens = clip.tokens([context])[0]
    inside = len(tokens) - 2  # without start and end
    if inside < count:
        raise UsageError(
            f"method.tokens is {count}, {context!r} has {inside} tokens — set method.tokens to at most {inside}, "
            "or give method.context more words"
        )
    found: Tensor = word_table(clip.backbone.text)(tokens[1 : 1 + count])
    return found
