"""Methods made for training sets in which many captions belong to other images."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import MethodConfig

Share = Annotated[float, Field(ge=0, le=1)]


class NcrConfig(MethodConfig):
    """NCR: two networks, a Gaussian mixture of losses tells clean from noisy, labels become soft margins."""

    name: Literal["ncr"] = "ncr"
    """Of the method."""
    margin: Annotated[float, Field(gt=0)] = 0.2
    """m of the hinge, for a pair that is surely right."""
    warmup: Share = 0.1
    """Share of the epochs, one at least unless 0, in which all pairs count as right, all negatives averaged; NCR: ⅓."""
    noisy_from: Share = 1.0
    """Share of the epochs after warm-up from which pairs called noisy are trained on too; 1 for never. NCR: half."""
    threshold: Share = 0.5
    """A pair is called clean above this probability."""
    base: Annotated[float, Field(gt=1)] = 10.0
    """Soft margin m·(base^y − 1)/(base − 1)."""


class BicroConfig(MethodConfig):
    """BiCro: as NCR, with soft labels from how alike the nearest anchors are on both sides."""

    name: Literal["bicro"] = "bicro"
    """Of the method."""
    margin: Annotated[float, Field(gt=0)] = 0.2
    """m of the hinge, for a pair that is surely right."""
    warmup: Share = 0.2
    """Share of the epochs, one at least unless 0, on each batch's smallest losses; negatives averaged."""
    warmup_keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a batch that warm-up trains on; BiCro: 0.3 on COCO with 40% noise."""
    noisy_from: Share = 1.0
    """Share of the epochs after warm-up from which pairs called noisy are trained on too; 1 for never. BiCro: half."""
    mixture: Literal["gaussian", "beta"] = "gaussian"
    """What is fitted to the losses. BiCro's Betas let too many wrong pairs through here, NCR's Gaussians do not."""
    threshold: Share = 0.5
    """A pair is called clean above this probability."""
    label_threshold: Share = 0.5
    """Soft labels up to this become 0."""
    discard: bool = True
    """Leave out pairs whose label became 0; otherwise a hinge without margin still pulls them together."""
    anchors: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of a batch that serves as anchors: its most trusted clean pairs."""
    base: Annotated[float, Field(gt=1)] = 10.0
    """Soft margin m·(base^y − 1)/(base − 1)."""


class NpcConfig(MethodConfig):
    """NPC: each pair weighs as much as a trial step on the batch helps the trusted pairs most like it."""

    name: Literal["npc"] = "npc"
    """Of the method."""
    scale: Annotated[float, Field(gt=0)] = 14.3
    """exp(log_scale) at the start, as InfoNCE's."""
    learnable: bool = True
    """Does the scale learn?"""
    warmup: Share = 0.1
    """Share of the epochs, one at least unless 0, before the first bank; NPC starts from a trained CLIP instead."""
    refresh: bool = True
    """Build the bank anew before each epoch; otherwise once, after warm-up."""
    threshold: Share = 0.9
    """A pair is in the bank above this probability of being clean."""
    look_ahead: Annotated[float, Field(gt=0)] = 0.1
    """Length of the trial step relative to the length of the heads' weights; 0.02 is about an Adam step."""
    bank_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the bank pairs' own loss, which trains heads and pooling."""
