"""Few-shot methods that leave both towers alone: zero-shot CLIP, and learned words in front of the class name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config


class ZeroshotConfig(Config):
    """Scaled cosines with the data set's own sentences; nothing learns."""

    name: Literal["zeroshot"] = "zeroshot"
    """Tells the methods apart."""


class CoopConfig(Config):
    """Context words shared by all classes are learned as vectors (CoOp). Defaults as published for base-to-novel."""

    name: Literal["coop"] = "coop"
    """Tells the methods apart."""
    context: Annotated[str, Field(min_length=1)] = "a photo of a"
    """Words whose embeddings the context starts at, one vector per token; the class name and a full stop follow."""


class CocoopConfig(Config):
    """CoOp's context, moved by a small network that sees the photo (CoCoOp). Defaults as published."""

    name: Literal["cocoop"] = "cocoop"
    """Tells the methods apart."""
    context: Annotated[str, Field(min_length=1)] = "a photo of a"
    """As in CoOp."""
    reduction: Annotated[int, Field(ge=1)] = 16
    """The network's middle is d divided by this: 32 for CLIP's 512."""
    chunk: Annotated[int, Field(ge=1)] = 2048
    """Prompts encoded at a time, of photos × classes; where more are needed, training recomputes them."""
