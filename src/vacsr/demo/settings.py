"""Every setting of the demo, in one place. recipes/scenes-tiny.yaml holds the same for `vacsr train`."""

from __future__ import annotations

from vacsr.config import AugmentConfig, BackboneConfig, DataConfig, HeadConfig, Recipe, TowersConfig, TrainConfig
from vacsr.recipes import method_config

METHODS = ("infonce", "sigmoid", "vacsr")
"""All three train on the same pairs with the same towers, heads and schedule; only head and loss differ."""
WORLD = "scenes:images=2000,held_out=300"
"""Training images, and images in dev and in test; five captions each."""


def demo_recipes(seed: int) -> dict[str, Recipe]:
    """By method. The seed is the world's and the training's."""
    data = DataConfig(pairs=f"{WORLD},seed={seed}")
    return {
        name: Recipe(data=data, backbone=_backbone(), method=method_config(name), train=_train(seed))
        for name in METHODS
    }


def _backbone() -> BackboneConfig:
    """Small towers that start from nothing."""
    return BackboneConfig(
        spec="tiny:",
        image_output="norm",
        text_output="norm",
        pooling="gpo",
        # All off: captions speak of left and right, of place and of number, and every word counts.
        augment=AugmentConfig(crop=(1.0, 1.0), flip=0.0, image_tokens=0.0, text_tokens=0.0),
        head=HeadConfig(kind="linear", dim=64),
    )


def _train(seed: int) -> TrainConfig:
    """On the CPU, so that the table is the same with and without a GPU."""
    return TrainConfig(
        epochs=10,
        batch_size=128,
        lr=5e-4,
        # Fresh towers know nothing yet: they learn at the full rate, in every block, from the first step.
        towers=TowersConfig(image_lr=1.0, text_lr=1.0, layer_decay=1.0, freeze_image=0, ramp=False),
        weight_decay=0.01,
        schedule="cosine",
        warmup_steps=50,
        seed=seed,
        device="cpu",
    )
