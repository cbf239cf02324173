"""MaPLe's prompts as plain edits of one row of tokens, and a tiny CLIP of four blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vacsr.backbones import TowerBackbone, load_backbone
from vacsr.config import BackboneConfig
from vacsr.fewshot.methods.base import ClassSet
from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.maple import Maple

from .plain_clip import Plain


class PlainPrompts(NamedTuple):
    """The edits of each tower."""

    image: Plain
    text: Plain


def prompt_rows(clip: ClipModel, classes: ClassSet) -> Tensor:
    return clip.tokens([f"a photo of a {name.replace('_', ' ')}." for name in classes.names])


def plain_prompts(method: Maple) -> PlainPrompts:
    """The edits of the image and of the text, each on one row of tokens."""
    texts = list(method.prompts.tokens)
    images = [
        torch.stack([layer.weight @ token + layer.bias for token in tokens])
        for layer, tokens in zip(method.prompts.maps, texts, strict=True)
    ]

    def over(x: Tensor, own: Tensor) -> Tensor:
        return torch.stack([own[place - 1] if 1 <= place <= len(own) else token for place, token in enumerate(x)])

    def last(x: Tensor, own: Tensor) -> Tensor:
        return torch.stack([*x[: len(x) - len(own)], *own])

    return PlainPrompts(
        Plain(
            entry=lambda x: torch.stack([*x, *images[0]]),
            before=lambda depth, x: last(x, images[depth]) if 1 <= depth < len(images) else x,
        ),
        Plain(
            words=lambda x: over(x, texts[0]),
            before=lambda depth, x: over(x, texts[depth]) if 1 <= depth < len(texts) else x,
        ),
    )


def tiny_clip() -> ClipModel:
    """Towers of four blocks and heads, all weights drawn."""
    spec = "tiny:width=16,depth=4,text_depth=4,heads=2,size=32"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = load_backbone(BackboneConfig(spec=spec, pooling="cls", weights="random"))
        maps = [nn.Linear(16, 8) for _ in range(2)]
    assert isinstance(backbone, TowerBackbone)
    backbone.fit_words(["a photo of a night heron", "a plum of a cat"])
    clip = ClipModel(backbone, image_map=maps[0], text_map=maps[1], dim=8, scale=20.0).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in clip.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return clip
