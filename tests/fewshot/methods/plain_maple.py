"""MaPLe's prompts as plain edits of one row of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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

    def over(x: Tensor, prompts: Tensor) -> Tensor:
        return torch.stack(
            [prompts[position - 1] if 1 <= position <= len(prompts) else token for position, token in enumerate(x)]
        )

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
