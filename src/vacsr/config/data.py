"""Which pairs, and what is done to their labels."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config


class NoiseConfig(Config):
    """Label noise injected into the training captions."""

    protocol: Literal["permute-captions", "derange-captions"] = "permute-captions"
    """Choose int(ratio·M) captions and permute them among their slots; `derange-captions` lets none come home."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of captions chosen."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The permutation is a function of it, saved and hashed beside the run."""
    file: str = ""
    """A permutation that others published (.safetensors, .npy, .json or .txt) instead of ratio and seed."""


class DataConfig(Config):
    """Which pairs to train, tune and report on."""

    pairs: str = "synthetic:"
    """SPEC string, e.g. `features:FILE,captions=FILE`."""
    train: str = "train"
    """Split to train on; `all` for data without splits."""
    dev: str = "dev"
    """Split for model choice; empty for none."""
    dev_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of training images held out as dev where the data has no such split."""
    noise: NoiseConfig = NoiseConfig()
    """For experiments on robustness; dev and test stay clean."""
    on_error: Literal["fail", "skip"] = "fail"
    """A photo that cannot be read or a blank caption: stop, or leave it out, counted and named in skipped.json."""
    photo_size: Annotated[int, Field(ge=0)] = 0
    """Side to which training photos are read before the random crop; 0 takes the image tower's own."""
    cache_gb: Annotated[float, Field(ge=0)] = 4.0
    """Photos are decoded once and kept if all fit into this; beyond it they are decoded again in every epoch."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Threads that decode photos; 0 takes one per core."""
