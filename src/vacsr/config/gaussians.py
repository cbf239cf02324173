"""Methods that make every photo and every caption a Gaussian: PCME and PCME++."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config, MethodConfig


class MixConfig(Config):
    """Blending images of a batch with each other, and their labels with them; the partner of place i is B−1−i."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Probability that an image is mixed; 0 for none."""
    alpha: Annotated[int, Field(ge=1)] = 2
    """The image's own part is drawn from Beta(alpha, alpha)."""
    cutmix: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Of mixed photos, the share that gets a rectangle of its partner pasted; the others, and features, are blended."""
    labels: Literal["ids", "diagonal"] = "ids"
    """Mix the labels of all captions of both images, or forget all but the two own ones, as the public code does."""


class PcmeConfig(MethodConfig):
    """Probabilistic embeddings compared by samples (PCME)."""

    name: Literal["pcme"] = "pcme"
    """Of the method."""
    samples: Annotated[int, Field(ge=1, le=64)] = 8
    """J draws of each item; a pair is judged by J² distances."""
    scale: Annotated[float, Field(gt=0)] = 5.0
    """a at the start, of the logit b − a·distance."""
    shift: float = 5.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    vib_weight: Annotated[float, Field(ge=0)] = 1e-3
    """Weight of the KL to N(0, I)."""
    vib_reduction: Literal["mean", "sum"] = "mean"
    """Of the KL, over items and dimensions; PCME's and DAA's own code has sums."""
    reduction: Literal["sum", "rows", "mean"] = "sum"
    """Over pairs: summed, summed and divided by B, or averaged."""
    log_var_start: float = -8.0
    """logσ² at the start is around this; the public code starts at 0, and short runs do not recover from that."""


class PcmeppConfig(MethodConfig):
    """Probabilistic embeddings compared in closed form (PCME++)."""

    name: Literal["pcmepp"] = "pcmepp"
    """Of the method."""
    scale: Annotated[float, Field(gt=0)] = 5.0
    """a at the start, of the logit b − a·CSD."""
    shift: float = 5.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    vib_weight: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the KL to N(0, I), averaged over items and dimensions."""
    pseudo_weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the loss with pseudo-positives, in each direction."""
    smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 1e-4
    """Labels become (1−ε)y + ε(1−y)."""
    reduction: Literal["rows", "mean"] = "rows"
    """BCE summed over pairs and divided by B; `mean` averages over pairs, and VIB then weighs B times as much."""
    log_var_start: float = -8.0
    """logσ² at the start is around this; the public code starts at 0, and short runs do not recover from that."""
    mix: MixConfig = MixConfig()
    """Mixup and cutmix."""
