"""Towers, pooling, heads, and what training does to their inputs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config


class HeadConfig(Config):
    """Projection from tower features to the shared space."""

    kind: Literal["mlp", "linear"] = "mlp"
    """Two layers with GELU, or one linear map."""
    dim: Annotated[int, Field(ge=1)] = 256
    """d of the shared space."""
    hidden: Annotated[int, Field(ge=0)] = 0
    """Width of the middle layer; 0 means dim."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Between the two layers."""
    init: Literal["torch", "xavier"] = "torch"
    """Start of the weights: torch's own, or Xavier uniform with zero biases, as PCME++ has it."""


class AugmentConfig(Config):
    """What training does to photos and captions; every draw is a function of seed, step and place in the batch."""

    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.6, 1.0)
    """Both sides are cropped by one ratio drawn from here, at a random place; (1, 1) for none."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a left-right flip."""
    image_tokens: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """p: with u drawn from (0, 1), a photo with u > p loses each token with probability p·u before pooling."""
    text_tokens: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Probability that a word token is masked, replaced or dropped; start and end are left alone."""
    text_mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of these that become the mask token."""
    text_random: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of these that become a random token; the rest are dropped."""


class BackboneConfig(Config):
    """Towers, pooling and heads."""

    spec: str = "features:"
    """`features:` (cached embeddings), `clip:ID_OR_FOLDER`, `towers:IMAGE,TEXT` (two folders or ids), or `tiny:`."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the same architecture with fresh weights, for timing and tests; `tiny:` has no others."""
    start: str = ""
    """A run or model folder whose towers, pooling and heads training starts from; the method starts afresh."""
    image_scaling: Literal["standardize", "unit", "none"] = "standardize"
    """Of cached features: per-dimension mean and deviation of the training images, kept with the model."""
    text_scaling: Literal["standardize", "unit", "none"] = "unit"
    """Of cached features: unit vectors × √D; sentence embeddings are already comparable in direction."""
    image_output: Literal["hidden", "norm", "projected"] = "hidden"
    """Image tokens after the last block, after the final norm too, or projected as well; PCME++ takes the first."""
    text_output: Literal["hidden", "norm", "projected"] = "norm"
    """Text tokens likewise; PCME++ takes them after the final norm."""
    pooling: Literal["gpo", "mean", "cls"] = "gpo"
    """Tokens to one vector: learned weights over sorted values, the mean, or the class (CLIP text: end) token."""
    image_size: Annotated[int, Field(ge=0)] = 0
    """Side of the square the image tower sees; 0 takes the tower's own."""
    resize: Literal["whole", "center"] = "whole"
    """The whole photo squeezed into the square, or its centre crop as the towers' own processors have it."""
    pixel_stats: Literal["own", "imagenet"] = "own"
    """Mean and deviation of pixels: the tower's own, or ImageNet's, as PCME++ has with CLIP."""
    context: Annotated[int, Field(ge=0)] = 0
    """Longest caption in tokens, start and end included; 0 takes the text tower's own. Longer ones are cut."""
    checkpointing: bool = False
    """Recompute the towers' activations in the backward pass: less memory, a third more time."""
    augment: AugmentConfig = AugmentConfig()
    """Used in training only, and by towers only."""
    head: HeadConfig = HeadConfig()
    """One for images, one for texts, of the same shape."""
