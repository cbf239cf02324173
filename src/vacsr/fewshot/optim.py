"""The learning rate of few-shot training as a pure function of the step."""

from __future__ import annotations

import math

from vacsr.fewshot.config import FewshotTrainConfig


def learning_rate(step: int, *, steps_per_epoch: int, config: FewshotTrainConfig) -> float:
    """The base rate at a step.

    After the warm-up the cosine starts from its beginning and has a period of all epochs, so that it is cut off before
    its end by as many epochs as the warm-up took: the public frame counts so.

    >>> config = FewshotTrainConfig(epochs=4, lr=1.0, warmup_epochs=1)
    >>> [round(learning_rate(10 * epoch, steps_per_epoch=10, config=config), 3) for epoch in range(4)]
    [0.0, 1.0, 0.854, 0.5]
    """
    first = config.warmup_epochs * steps_per_epoch
    if step < first:
        return config.warmup_lr
    if config.schedule == "constant":
        return config.lr
    total = config.epochs * steps_per_epoch
    done = step - first
    if config.schedule == "cosine-epoch":
        done = done // steps_per_epoch * steps_per_epoch
    return 0.5 * config.lr * (1.0 + math.cos(math.pi * done / total))
