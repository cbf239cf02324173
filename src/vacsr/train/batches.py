"""Which captions meet in a batch, and whether the data can fill one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vacsr.config import TrainConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError


def batch_order(count: int, *, batch: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """The caption rows of each batch of an epoch (from 0): a function of (seed, epoch), so resuming needs no state.

    A last, smaller batch is left out: its pair matrix would weigh differently. It comes round in other epochs.
    """
    mixed = (seed * 1_000_003 + epoch) % 2**64  # more bits than these a generator refuses
    order = torch.randperm(count, generator=torch.Generator().manual_seed(mixed))
    for start in range(0, count - batch + 1, batch):
        yield order[start : start + batch]


def check_batches(pairs: PairSet | PhotoSet, config: TrainConfig) -> None:
    """Enough captions for one optimiser step, and of two images at least."""
    _check_size(len(pairs), config)
    if bool((pairs.caption_image == pairs.caption_image[0]).all()):
        image = pairs.image_ids[int(pairs.caption_image[0])]
        raise DataError(
            f"all {len(pairs)} training captions are of one image ('{image}'), so no batch can hold a pair that does "
            "not match — give captions of at least two images"
        )


def _check_size(captions: int, config: TrainConfig) -> None:
    needed = config.batch_size * config.accumulate
    if captions < needed:
        step = (
            f"one batch of {config.batch_size}"
            if config.accumulate == 1
            else (f"one optimiser step of {config.accumulate} batches of {config.batch_size}")
        )
        raise DataError(
            f"{captions} captions do not fill {step} — "
            f"set train.batch_size={max(2, captions // (2 * config.accumulate))} or give more data"
        )
