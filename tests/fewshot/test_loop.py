"""The loop: what a step sees, what a log and a checkpoint hold, and that a stopped run ends as an unbroken one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from vacsr.errors import DataError, NonFiniteLoss, OtherRun
from vacsr.fewshot.model import FewshotModel
from vacsr.fewshot.optim import learning_rate
from vacsr.files import read_tensors
from vacsr.train.checkpoint import check_checkpoint
from vacsr.train.trainer import Trainer

from .conftest import CLASSES, TRANSFORM, Make, Toy, colours


def toy(trainer: Trainer) -> Toy:
    assert isinstance(trainer.task.model, Toy)
    return trainer.task.model


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_it_learns(make_trainer: Make) -> None:
    trainer = make_trainer(colours(30), epochs=10, lr=2.0)
    run = trainer.run(progress=False)
    model = FewshotModel(run.model, CLASSES, TRANSFORM, {})
    found = model.evaluate(colours(30, seed=1), CLASSES, batch_size=7)
    assert float(found.correct.double().mean()) > 0.9
    assert run.history[0]["loss"] > 2 * run.history[-2]["loss"]
    assert not run.interrupted
    assert not run.model.training


def test_a_run_is_a_plain_loop_over_its_batches(make_trainer: Make) -> None:
    trainer = make_trainer(momentum=0.9, weight_decay=0.01, clip_norm=0.05)
    config, feed = trainer.task.config, trainer.task.feed
    trainer.run(progress=False)
    weights = list(Toy(torch.Generator().manual_seed(config.seed)).map.parameters())
    speeds = [torch.zeros_like(weight) for weight in weights]
    mean = torch.zeros(3, 3)
    for step, batch in enumerate(feed.stream(0, 9)):
        pixels = TRANSFORM.normalize(batch.first).mean(dim=(2, 3))
        labels = feed.shots.labels[batch.rows]
        loss = functional.cross_entropy(functional.linear(pixels, *weights), labels)
        grads = torch.autograd.grad(loss, weights)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        lr = learning_rate(step, steps_per_epoch=3, config=config)
        with torch.no_grad():
            for weight, speed, grad in zip(weights, speeds, grads, strict=True):
                speed.mul_(0.9).add_(grad * min(1.0, 0.05 / float(norm)) + 0.01 * weight)
                weight.sub_(lr * speed)
        mean += weights[0].detach() / 9
    torch.testing.assert_close(toy(trainer).mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(toy(trainer).map.bias, weights[1])
    assert torch.equal(toy(trainer).map.weight, toy(trainer).mean)  # what `finish` does


def test_batches_carry_what_methods_ask_for(make_trainer: Make) -> None:
    trainer = make_trainer(seed=7)
    trainer.run(progress=False)
    batches = toy(trainer).batches
    assert [batch.step for batch in batches] == toy(trainer).after == list(range(9))
    assert {(batch.seed, batch.steps, batch.second) for batch in batches} == {(7, 9, None)}
    assert toy(trainer).finished == 1
    colour = torch.stack([batch.pixels.mean(dim=(2, 3)).argmax(dim=1) for batch in batches])
    assert torch.equal(colour, torch.stack([batch.labels for batch in batches]))


def test_a_second_view_reaches_the_loss(make_trainer: Make) -> None:
    trainer = make_trainer()
    trainer.task.feed = type(trainer.task.feed)(colours(14), trainer.task.config, transform=TRANSFORM, second=True)
    trainer.run(progress=False)
    second = toy(trainer).batches[0].second
    assert second is not None
    assert second.shape == (4, 3, 8, 8)


def test_the_log(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(out=tmp_path, log_every=2, warmup_epochs=1)
    history = trainer.run(progress=False).history
    assert rows(tmp_path) == history
    assert [row["step"] for row in history if "loss" in row] == [0, 2, 4, 6, 8]
    assert [row["step"] for row in history if "steps_per_second" in row] == [2, 5, 8]
    assert {row["lr"] for row in history if row["epoch"] == 1 and "lr" in row} == {1e-5}
    assert history[0]["loss"] == history[0]["ce"]


# -------------------------------------------------------------------------------------------------- stop and go on


def stopped(make_trainer: Make, out: Path, step: int, **fields: Any) -> Trainer:
    """A run that is asked to stop while ``step`` is in hand."""
    trainer = make_trainer(out=out, **fields)
    method = toy(trainer)
    counted = method.after_step

    def after_step(at: int, steps: int) -> None:
        counted(at, steps)
        if at == step:
            os.kill(os.getpid(), signal.SIGINT)

    method.after_step = after_step  # type: ignore[method-assign]
    run = trainer.run(progress=False)
    assert run.interrupted
    assert run.state.step == step + 1
    assert method.finished == 0
    return trainer


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_stopped_run_ends_as_an_unbroken_one(make_trainer: Make, tmp_path: Path, step: int, optimizer: str) -> None:
    fields = {"optimizer": optimizer, "lr": 0.1}
    whole = make_trainer(out=tmp_path / "whole", **fields)
    whole.run(progress=False)
    stopped(make_trainer, tmp_path / "cut", step, **fields)
    again = make_trainer(out=tmp_path / "cut", **fields)
    again.resume()
    run = again.run(progress=False)
    assert toy(again).after == list(range(step + 1, 9))
    for name, tensor in whole.task.state_dict().items():
        assert torch.equal(tensor, again.task.state_dict()[name]), name
    figures = [[{k: v for k, v in row.items() if k != "steps_per_second"} for row in rows(tmp_path / name)]
               for name in ("whole", "cut")]  # fmt: skip
    assert figures[0] == figures[1]
    assert run.state.step == 9


def test_a_finished_run_resumes_to_itself(make_trainer: Make, tmp_path: Path) -> None:
    whole = make_trainer(out=tmp_path)
    whole.run(progress=False)
    again = make_trainer(out=tmp_path)
    again.resume()
    again.run(progress=False)
    assert toy(again).after == []
    assert toy(again).finished == 1
    assert torch.equal(toy(again).map.weight, toy(whole).map.weight)


def test_a_checkpoint_holds_what_learns_and_buffers(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(out=tmp_path, checkpoint_epochs=2)
    trainer.run(progress=False)
    tensors, metadata = read_tensors(tmp_path / "checkpoint" / "state.safetensors")
    assert {name for name in tensors if name.startswith("model.")} == {
        "model.map.weight",
        "model.map.bias",
        "model.mean",
    }
    assert json.loads(metadata["state"])["step"] == 9
    check_checkpoint(tmp_path / "checkpoint", fingerprint=trainer.fingerprint)
    check_checkpoint(tmp_path / "nothing", fingerprint=trainer.fingerprint)
    with pytest.raises(OtherRun, match="another configuration or data"):
        check_checkpoint(tmp_path / "checkpoint", fingerprint="other")
    (tmp_path / "checkpoint" / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="not a whole checkpoint"):
        check_checkpoint(tmp_path / "checkpoint", fingerprint=trainer.fingerprint)


def test_checkpoints_may_be_left_out(make_trainer: Make, tmp_path: Path) -> None:
    make_trainer(out=tmp_path, checkpoint_epochs=0).run(progress=False)
    assert not (tmp_path / "checkpoint").exists()
    stopped(make_trainer, tmp_path / "cut", 4, checkpoint_epochs=0)  # but Ctrl-C always leaves one
    assert (tmp_path / "cut" / "checkpoint").exists()


# --------------------------------------------------------------------------------------------------------- refusals


def test_a_loss_that_is_not_finite_says_what_to_do(make_trainer: Make, tmp_path: Path) -> None:
    trainer = make_trainer(out=tmp_path)
    method = toy(trainer)
    counted = method.after_step

    @torch.no_grad()
    def after_step(at: int, steps: int) -> None:
        counted(at, steps)
        if at == 4:
            method.map.bias.fill_(torch.nan)

    method.after_step = after_step  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLoss, match="'ce' is not finite at step 5") as caught:
        trainer.run(progress=False)
    for words in ("epoch 2", "colour ", "checkpoint is in", "lower train.lr", "train.clip_norm=1"):
        assert words in str(caught.value)
    assert caught.value.exit_code == 4


# --------------------------------------------------------------------------------------------------------- evaluate


def test_answers_do_not_depend_on_the_batch() -> None:
    method, photos = Toy(torch.Generator().manual_seed(0)), colours(11)
    model = FewshotModel(method, CLASSES, TRANSFORM, {})
    one, many = (model.evaluate(photos, CLASSES, batch_size=size) for size in (1, 4))
    assert torch.equal(one.predicted, many.predicted)
    for row in range(11):
        square = TRANSFORM.pixels(photos.photos.open(row))
        logits = method.logits(TRANSFORM.normalize(square[None]), method.prepare(CLASSES))[0]
        assert int(one.predicted[row]) == int(logits.argmax())
        assert float(many.confidence[row]) == pytest.approx(logits.detach().softmax(0).max().item(), abs=1e-5)
