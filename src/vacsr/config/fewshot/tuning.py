"""Few-shot methods that learn prompts for both towers (MaPLe, CoPrompt) or the image tower itself (CLIPood)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config


class DeepPromptConfig(Config):
    """Learned tokens in the first blocks of both towers, the image's made from the text's."""

    tokens: Annotated[int, Field(ge=1)] = 2
    """How many there are in each block; they take the places of the context's first tokens."""
    depth: Annotated[int, Field(ge=1)] = 9
    """Blocks that get tokens of their own, the first among them; all of the shallower tower where it has fewer."""
    context: str = "a photo of a"
    """A class is described as these words, its name and a full stop; the first block's tokens start as its first."""


class MapleConfig(DeepPromptConfig):
    """MaPLe. Defaults as published for base-to-novel; its ImageNet run for other domains has depth 3."""

    name: Literal["maple"] = "maple"
    """Tells the methods apart."""


class CopromptConfig(DeepPromptConfig):
    """CoPrompt: MaPLe, adapters on the features, and a pull towards the frozen towers.

    Defaults are those of its configuration file; its runs set tokens, depth and consistency per data set.
    """

    name: Literal["coprompt"] = "coprompt"
    """Tells the methods apart."""
    reduction: Annotated[int, Field(ge=1)] = 4
    """The adapters' middle is the features' dimension divided by this."""
    image_blend: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the adapter's output in an image's feature."""
    text_blend: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of the adapter's output in a class's feature."""
    consistency: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the two cosine terms."""


class ClipoodConfig(Config):
    """CLIPood: the image tower learns, the text tower rests. Defaults as published for base-to-novel."""

    name: Literal["clipood"] = "clipood"
    """Tells the methods apart."""
    margin: Annotated[float, Field(ge=0)] = 0.3
    """λ: how much of its own class's text is taken off an image before the loss compares it with all classes."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weights after step i of N are averaged by the Beta(β, β) density at (i+½)/(N+1); below 1 both ends count most.

    The published runs for other domains have 0.5; 1 is the plain mean.
    """
