"""Which towers rest in an epoch, and how far the loss counts while they wake: pure functions of the place in a run."""

from __future__ import annotations

from vacsr.config import TowersConfig


def resting(epoch: int, config: TowersConfig) -> frozenset[str]:
    """Towers without gradient in this epoch, counted from 0.

    >>> config = TowersConfig(freeze_image=2)
    >>> [sorted(resting(epoch, config)) for epoch in (0, 1, 2)]
    [['image'], ['image'], []]
    """
    plan = {"image": (config.image_lr, config.freeze_image), "text": (config.text_lr, config.freeze_text)}
    return frozenset(name for name, (rate, epochs) in plan.items() if rate == 0 or epoch < epochs)


def loss_ramp(step: int, *, steps_per_epoch: int, config: TowersConfig) -> float:
    """What the loss is multiplied with at a step: 1, but rising linearly to it in an epoch that wakes a tower.

    >>> config = TowersConfig(freeze_image=2)
    >>> [loss_ramp(step, steps_per_epoch=4, config=config) for step in (7, 8, 9, 11, 12)]
    [1.0, 0.25, 0.5, 1.0, 1.0]
    """
    epoch, place = divmod(step, steps_per_epoch)
    wakes = epoch > 0 and resting(epoch, config) != resting(epoch - 1, config)
    return (place + 1) / steps_per_epoch if config.ramp and wakes else 1.0
