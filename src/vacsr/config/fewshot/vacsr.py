"""The paper's method for recognition: the variational adapter on photos and class prompts, and blocks that learn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vacsr.adapter import AdapterConfig
from vacsr.config.base import Config
from vacsr.objective import ObjectiveConfig

Blocks = Annotated[str, Field(pattern=r"^((first|last) [0-9]+|all|none)$")] | tuple[Annotated[int, Field(ge=0)], ...]
"""`first 2`, `last 3`, `all`, `none`, or the numbers of blocks from 0. A count beyond the tower means all of it."""


class FewshotVacsrConfig(Config):
    """Adapter and objective as in retrieval, on CLIP's own features. The defaults are the preset `default`."""

    name: Literal["vacsr"] = "vacsr"
    """Tells the methods apart."""
    adapter: AdapterConfig = AdapterConfig()
    """The model."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    image_blocks: Blocks = "first 2"
    """Blocks of the image tower that learn; the paper's words, taken literally."""
    text_blocks: Blocks = "first 3"
    """Blocks of the text tower that learn."""
    pairs: Literal["classes", "batch"] = "classes"
    """What photos are compared with: every class's prompt, or the prompts of the batch's own labels."""
    cosine_start: Literal["clip", "adapter"] = "clip"
    """Start of the residual a·cos+b (ours): CLIP's scale, and at the first step the b that makes the mean probability
    of the batch's pairs the share of matches among them; or the adapter's `residual_scale` and `residual_bias`."""
    decoder_zero: bool = True
    """With the cosine residual the decoder's last layer starts at 0 (ours): training begins at zero-shot CLIP."""
    adapter_lr: Annotated[float, Field(gt=0)] = 1.0
    """The adapter's learning rate relative to train.lr."""
    tower_lr: Annotated[float, Field(ge=0)] = 0.1
    """The learning blocks' rate relative to train.lr; 0 keeps them as they are."""
    text_chunk: Annotated[int, Field(ge=0)] = 0
    """Prompts encoded at a time and recomputed in the backward pass: less memory for many classes; 0 takes all."""
    pair_chunk: Annotated[int, Field(ge=0)] = 0
    """Pairs of photo and class in the loss at a time, in strips of whole rows: less memory; 0 takes all."""

    @model_validator(mode="after")
    def _fits(self) -> FewshotVacsrConfig:
        if self.pairs == "classes" and self.objective.positives == "diagonal":
            raise ValueError(
                "objective.positives=diagonal has no meaning for photos × classes — use pairs=batch or ids"
            )
        if self.pair_chunk and self.objective.negative_direction == "both":
            raise ValueError("objective.negative_direction=both looks along whole columns — set pair_chunk=0")
        return self


VACSR_READINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"adapter": {"residual": "none"}, "objective": {"cosine_weight": 0.0, "correction": 0.0}},
}
"""Adapter and objective fields of `default` (ours) and `paper` (as printed: no cosine residual, labels as they are)."""
