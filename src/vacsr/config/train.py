"""The one loop."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config


class TowersConfig(Config):
    """How the towers learn beside the heads; cached features have none."""

    image_lr: Annotated[float, Field(ge=0)] = 0.01
    """Image tower's rate relative to train.lr; 0 keeps the tower as it is."""
    text_lr: Annotated[float, Field(ge=0)] = 0.1
    """Text tower's."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Block ℓ of L learns at ×decay^(L−ℓ): early blocks change least. Embeddings and norms outside blocks do not."""
    freeze_image: Annotated[int, Field(ge=0)] = 2
    """First epochs in which the image tower rests, until the new heads make sense."""
    freeze_text: Annotated[int, Field(ge=0)] = 0
    """First epochs in which the text tower rests."""
    ramp: bool = True
    """In the epoch that wakes a tower the loss grows linearly from 0."""


class TrainConfig(Config):
    """The one loop."""

    epochs: Annotated[int, Field(ge=1)] = 20
    """Passes over the captions."""
    batch_size: Annotated[int, Field(ge=2)] = 128
    """Captions per step, over all ranks."""
    lr: Annotated[float, Field(gt=0)] = 5e-4
    """Of the heads and the method; groups scale it."""
    towers: TowersConfig = TowersConfig()
    """Rates and rest of the towers."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled, of matrices; biases, norms and scalars have none, here and in the towers (PCME++ decays these too)."""
    optimizer: Literal["adamw", "adamp"] = "adamw"
    """AdamP is the paper's."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Adam's, the paper's and everyone's."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """`step` multiplies lr by decay from decay_at on."""
    decay_at: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Share of the epochs after which `step` decays (12 of 20; the paper: 15 of 25)."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """What `step` multiplies with."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear ramp of lr from 0."""
    clip_norm: Annotated[float, Field(ge=0)] = 2.0
    """Gradient norm bound; 0 for none."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Batches per optimiser step; each keeps its own pair matrix."""
    tile: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Rows of a strip of the pair matrix. Strips give the same gradients (to rounding) in the memory of one strip; 0
    takes the matrix whole; `auto` chooses, and takes it whole where it is small or the loss cannot be split by rows."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """`tf32` lets CUDA round matrix products; `bf16` autocasts them."""
    device: str = "auto"
    """`auto` takes CUDA where present."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of weights, data order and every draw."""
    select: Literal["best", "last"] = "best"
    """Weights kept: best dev RSUM, or the last epoch's."""
    eval_every: Annotated[int, Field(ge=0)] = 1
    """Epochs between dev evaluations; 0 for never."""
    dev_images: Annotated[int, Field(ge=0)] = 0
    """First so many dev images choose the weights; 0 takes all. PCME++ looks at 1,000 of COCO's 5,000."""
    log_every: Annotated[int, Field(ge=1)] = 50
    """Steps between log rows."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 500
    """Steps between checkpoints besides those at epoch ends; 0 for epoch ends only."""
    checkpoint_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs between checkpoints at an epoch's end; 0 for none, as trained towers make them large."""
    compile: bool | Literal["auto"] = False
    """torch.compile towers and loss; `auto` does so on CUDA, and goes on without where it fails."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph: small steps are launch-bound."""
    trackers: tuple[Literal["jsonl", "csv", "tensorboard", "wandb"], ...] = ("jsonl",)
    """JSON lines are always written; the last two need their extras."""
