"""Few-shot methods that add something inside both frozen towers: MMA's adapters, MMRL's representation tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config


class MmaConfig(Config):
    """Small adapters beside the upper blocks of both towers; their middle layer is shared. Defaults as published."""

    name: Literal["mma"] = "mma"
    """Tells the methods apart."""
    layers: Annotated[int, Field(ge=1)] = 8
    """The last so many blocks of each tower: of twelve the fifth and on. A tower with fewer sets the limit for both.

    The published ImageNet run for other domains starts at the ninth of twelve: 4.
    """
    width: Annotated[int, Field(ge=1)] = 32
    """Of the adapters' middle."""
    scale: Annotated[float, Field(gt=0)] = 0.001
    """What an adapter gives is multiplied by this; its own gradients are not made smaller by it."""
    template: Annotated[str, Field(pattern=r"^$|\{\}")] = "a photo of a {}."
    """Sentence of a class, the same for all data sets as published; empty: the data set's own."""


class MmrlConfig(Config):
    """Tokens shared by both towers, inserted into their upper blocks. Defaults as published for base-to-novel."""

    name: Literal["mmrl"] = "mmrl"
    """Tells the methods apart."""
    tokens: Annotated[int, Field(ge=1)] = 5
    """How many representation tokens."""
    rep_dim: Annotated[int, Field(ge=1)] = 512
    """Of the space that they share; 2048 in the published EuroSAT run."""
    layers: Annotated[int, Field(ge=1)] = 7
    """The last so many blocks of each tower: of twelve the sixth and on. A tower with fewer sets the limit for both."""
    class_weight: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Share of the class token's feature in the loss and in the mixed logits; the representation's has the rest."""
    consistency: Annotated[float, Field(ge=0)] = 1.0
    """λ of both cosine terms that hold the features near the frozen towers'; the published runs set it per data set."""
    projection: Literal["random", "clip"] = "random"
    """Start of the representation's own projection: a fresh draw as published, or a copy of the tower's."""
    mixed: Literal["trained", "always", "never"] = "trained"
    """Which class lists are scored by both features: that of training as published, all, or none."""
