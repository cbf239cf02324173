"""Towers in training: which move and when, at which rate; photos in memory or streamed are the same run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import DataConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import UsageError
from vacsr.evaluate.report import dev_rsum
from vacsr.scoring import PairScorer
from vacsr.train import fit
from vacsr.train.callbacks import Callback, Row
from vacsr.train.data import Batch, batch_order
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.trainer import Trainer

from .conftest import TINY, make

UNFROZEN = {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 0}


def train_config(**fields: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {"batch_size": 8, "device": "cpu", "epochs": 1, "log_every": 1, "towers": UNFROZEN, **fields}
    )


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.task.model.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Which parts have a parameter that changed: image, text, heads …"""
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {name.split(".")[1] if name.startswith("backbone.") else name.split(".")[0] for name in changed}


def first_batch(photos: PhotoSet) -> Batch:
    return Batch(batch_order(len(photos), batch=8, seed=0, epoch=0)[0])


OTHERS = {"image_head", "text_head", "image_pool", "text_pool", "method"}


@pytest.mark.parametrize("optimizer", ["adamw", "adamp"])
def test_a_frozen_tower_does_not_move_until_it_is_unfrozen(photos: PhotoSet, optimizer: str) -> None:
    """Weight decay would move it too, were its gradient zero instead of absent."""
    plan = {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 2, "freeze_text": 1}
    trainer = make(photos, epochs=4, towers=plan, optimizer=optimizer, weight_decay=0.5, select="last")
    seen: list[set[str]] = []
    scales: list[float] = []
    before = weights(trainer)

    class Watch(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            scales.append(float(trainer.step.loss_scale))

        def on_epoch(self, trainer: Trainer, epoch: int, row: Row) -> None:
            seen.append(moved(before, after := weights(trainer)))
            before.update(after)

    trainer.callbacks.append(Watch())
    trainer.run(progress=False)
    assert seen == [OTHERS, OTHERS | {"text"}, OTHERS | {"text", "image"}, OTHERS | {"text", "image"}]
    assert scales == [1] * 4 + [0.25, 0.5, 0.75, 1] * 2 + [1] * 4, "the loss warms up where a tower unfreezes"


@pytest.mark.parametrize("tower", ["image", "text"])
def test_a_tower_with_rate_0_never_moves_and_has_no_gradient(photos: PhotoSet, tower: str) -> None:
    trainer = make(photos, epochs=2, towers={**UNFROZEN, f"{tower}_lr": 0.0}, weight_decay=0.5)
    before = weights(trainer)
    groups = {group["name"] for group in trainer.step.optimizer.param_groups}
    assert not any(name.startswith(tower) for name in groups)
    trainer.callbacks[0].on_epoch_start(trainer, 0)
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    assert trainer.task.model.backbone.encode_images(pixels).values.requires_grad == (tower != "image"), "no backward"
    trainer.step.run(first_batch(photos), torch.tensor(0), last=False)
    sides = {"image": trainer.task.model.backbone.image, "text": trainer.task.model.backbone.text}
    assert all(parameter.grad is None for parameter in sides[tower].parameters())
    other = sides["text" if tower == "image" else "image"]
    assert all(parameter.grad is not None for parameter in other.parameters())
    trainer.step.optimizer.zero_grad(set_to_none=True)
    trainer.run(progress=False)
    assert moved(before, weights(trainer)) == OTHERS | {"image", "text"} - {tower}


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.01])
def test_the_loss_scale_is_in_the_gradient_and_not_in_the_log(photos: PhotoSet, scale: float) -> None:
    plain, scaled = (make(photos, towers=UNFROZEN, clip_norm=0.0) for _ in range(2))
    for trainer in (plain, scaled):
        trainer.step.optimizer = torch.optim.SGD(trainer.step.params, lr=1.0)
    scaled.step.loss_scale.fill_(scale)
    before = weights(plain)
    values = [trainer.step(first_batch(photos), 0) for trainer in (plain, scaled)]
    assert torch.equal(values[0][:-1], values[1][:-1])
    assert float(values[1][-1]) == pytest.approx(scale * float(values[0][-1]), rel=1e-5)
    one, other = weights(plain), weights(scaled)
    for name, start in before.items():
        torch.testing.assert_close(other[name] - start, scale * (one[name] - start), rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("depths", [(2, 1), (3, 2)])
def test_every_block_has_the_rate_of_the_formula(photos: PhotoSet, depths: tuple[int, int]) -> None:
    """lr · tower's rate · 0.7^(L−ℓ) for block ℓ = 0 … L−1, lr · tower's rate for stem, embeddings and norms."""
    backbone = TINY.model_copy(
        update={"spec": f"tiny:width=16,depth={depths[0]},text_depth={depths[1]},heads=2,size=32"}
    )
    towers = {"image_lr": 0.01, "text_lr": 0.1, "layer_decay": 0.7}
    trainer = make(photos, backbone=backbone, epochs=1, lr=5e-4, towers=towers, weight_decay=0.3, warmup_steps=10)
    trainer.run(progress=False)
    step = 3  # the last of the epoch: four of ten steps of warm-up are done
    rate = {id(p): group for group in trainer.step.optimizer.param_groups for p in group["params"]}
    blocks = {"image": depths[0], "text": depths[1]}
    seen = 0
    for name, parameter in trainer.task.model.named_parameters():
        expected = 5e-4 * (step + 1) / 10
        if name.startswith("backbone."):
            _, tower, rest = name.split(".", 2)
            expected *= {"image": 0.01, "text": 0.1}[tower]
            if rest.startswith("layers."):
                expected *= 0.7 ** (blocks[tower] - int(rest.split(".")[1]))
        group = rate[id(parameter)]
        assert group["lr"] == pytest.approx(expected, rel=1e-9), name
        seen += 1
    assert seen == sum(len(group["params"]) for group in trainer.step.optimizer.param_groups)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("size", [0, 48])
def test_streamed_photos_are_the_same_run(photos: PhotoSet, dev_photos: PhotoSet, accumulate: int, size: int) -> None:
    """Weights, metrics and dev RSUM, bit for bit."""
    runs = [
        fit(
            "vacsr", photos, train_config(epochs=2, accumulate=accumulate), dev=dev_photos, backbone=TINY,
            data=DataConfig(cache_gb=cache, photo_size=size, workers=workers), progress=False,
        )
        for cache, workers in ((1.0, 1), (0.0, 1), (0.0, 4))
    ]  # fmt: skip
    for run in runs[1:]:
        for name, tensor in runs[0].model.state_dict().items():
            assert torch.equal(run.model.state_dict()[name], tensor), name
        for row, expected in zip(run.history, runs[0].history, strict=True):
            assert {**row, "steps_per_second": 0} == {**expected, "steps_per_second": 0}


def test_augmentation_is_in_training_and_only_there(photos: PhotoSet) -> None:
    """Two steps draw differently, the same step draws the same, and without augmentation all are equal."""
    trainer = make(photos, method="sigmoid", backbone=TINY.model_copy(update={"head": HeadConfig(dim=8, dropout=0.0)}))
    batch = first_batch(photos)
    losses = [float(trainer.task.loss(batch, torch.tensor(step)).total.detach()) for step in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    off = TINY.augment.model_copy(update={"crop": (1.0, 1.0), "flip": 0.0, "image_tokens": 0.0, "text_tokens": 0.0})
    plain = TINY.model_copy(update={"augment": off, "head": HeadConfig(dim=8, dropout=0.0)})
    still = make(photos, method="sigmoid", backbone=plain)
    fixed = [float(still.task.loss(batch, torch.tensor(step)).total.detach()) for step in (0, 1)]
    assert fixed[0] == fixed[1]


@pytest.mark.parametrize(("every", "expected"), [(1, [4, 8, 12, 16]), (2, [8, 16]), (3, [12, 16]), (0, [])])
def test_checkpoints_at_epoch_ends(
    photos: PhotoSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    saved: list[int] = []
    monkeypatch.setattr("vacsr.train.trainer.save_checkpoint", lambda *_, state, **__: saved.append(state.step))
    config = train_config(epochs=4, checkpoint_epochs=every, checkpoint_every=0)
    fit("sigmoid", photos, config, backbone=TINY, out=tmp_path / "run", progress=False)
    assert saved == expected


@pytest.mark.parametrize(("number", "images"), [(0, 6), (1, 1), (3, 3), (5, 5), (6, 6), (9, 6)])
def test_the_first_dev_images_choose(photos: PhotoSet, dev_photos: PhotoSet, number: int, images: int) -> None:
    config = train_config(dev_images=number)
    task = RetrievalTask(method_config("sigmoid"), photos, config, backbone=TINY, dev=dev_photos)
    assert task.dev.image_ids == dev_photos.image_ids[:images]
    first = dev_photos.subset(range(images))
    assert task.evaluate() == {"dev_rsum": dev_rsum(PairScorer(task.model, device="cpu").score_set(first), first)}


def test_kinds_that_do_not_fit_are_usage_errors(photos: PhotoSet) -> None:
    features = load_pairs("synthetic:images=10,per_image=2", split="train")
    with pytest.raises(UsageError, match=r"'features:' takes cached embeddings, these data are photos — "):
        fit("sigmoid", photos, train_config(), progress=False)
    with pytest.raises(UsageError, match=r"reads photos, these data are cached features — "):
        fit("sigmoid", features, train_config(), backbone=TINY, progress=False)
