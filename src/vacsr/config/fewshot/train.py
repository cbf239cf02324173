"""How a few-shot method learns, and what is reported of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config

_Share = Annotated[float, Field(gt=0, le=1)]


class FewshotTrainConfig(Config):
    """The few-shot loop. What it ends with counts: no epoch is chosen by a score."""

    epochs: Annotated[int, Field(ge=1)] = 5
    """Passes over the shots, or runs of steps_per_epoch."""
    steps_per_epoch: Annotated[int, Field(ge=0)] = 0
    """0: as many batches as the shots fill; else so many steps, over the shots again and again."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Photos per step. Shots that do not fill a last batch wait for another epoch; fewer than one batch are one."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD in most of the public code."""
    lr: Annotated[float, Field(gt=0)] = 0.0015
    """Of everything that learns; a method's groups scale it."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Added to the gradient by SGD, decoupled in AdamW."""
    schedule: Literal["cosine-epoch", "cosine-step", "constant"] = "cosine-epoch"
    """A half cosine from lr to 0 that moves after every epoch, as the public frame does, or after every step."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 1
    """First epochs at warmup_lr. As in the public frame the cosine starts after them, so it does not quite end."""
    warmup_lr: Annotated[float, Field(gt=0)] = 1e-5
    """Constant."""
    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Gradient norm bound; 0 for none."""
    view: Literal["crop", "randaugment"] = "crop"
    """What a photo goes through: a random resized crop and a flip; or squeezed whole, then RandAugment."""
    second_view: Literal["crop", "randaugment"] = "randaugment"
    """The same for the other view, where a method asks for one (CoPrompt)."""
    crop: tuple[_Share, _Share] = (0.08, 1.0)
    """Range of the crop's area as a share of the photo's; its aspect is drawn from 3/4 to 4/3."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a left-right flip of a crop."""
    randaugment_operations: Annotated[int, Field(ge=1)] = 2
    """How many of RandAugment's operations, one after the other."""
    randaugment_magnitude: Annotated[int, Field(ge=0, le=30)] = 10
    """Their strength."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` autocasts matrix products."""
    device: str = "auto"
    """`auto` takes CUDA where present."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Of fresh weights, the order of shots and every draw; the draw of shots has its own."""
    cache_gb: Annotated[float, Field(ge=0)] = 4.0
    """Decoded photos are kept while they fit into this; those beyond it are decoded again in every epoch."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Threads that read photos; 0 takes one per core."""
    log_every: Annotated[int, Field(ge=1)] = 20
    """Steps between log rows."""
    checkpoint_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs between checkpoints; 0 for none."""
    trackers: tuple[Literal["jsonl", "csv", "tensorboard", "wandb"], ...] = ("jsonl",)
    """JSON lines are always written; the last two need their extras."""


class FewshotEvaluateConfig(Config):
    """What `report.json` holds after training."""

    batch_size: Annotated[int, Field(ge=1)] = 100
    """Photos at a time; figures do not depend on it."""
    bins: Annotated[int, Field(ge=1)] = 15
    """Of equal width, for the expected calibration error."""
    coverages: tuple[_Share, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Shares of the photos, the surest first, whose accuracy is reported."""
