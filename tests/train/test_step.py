"""One step: clipping, accumulation, precision; what happens when a number breaks, or the compiler."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import TrainConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import NonFiniteLoss
from vacsr.files import read_tensors
from vacsr.methods.base import Embedding
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.objective import LossTerms, PairBlock
from vacsr.train import fit
from vacsr.train.data import Batch, batch_order
from vacsr.train.trainer import Trainer

from .conftest import FEATURES, TINY, make


def batches(pairs: PairSet) -> list[Tensor]:
    return list(batch_order(len(pairs), batch=8, seed=0, epoch=0))


def gradient(trainer: Trainer, rows: Tensor, step: int) -> dict[str, Tensor]:
    """The plain gradient of one batch."""
    trainer.task.model.zero_grad(set_to_none=True)
    trainer.task.loss(Batch(rows), torch.tensor(step)).total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in trainer.task.model.named_parameters() if p.grad is not None}


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt())


@pytest.mark.parametrize("limit", [0.5, 1e6, 0.0])
def test_the_norm_is_of_before_clipping_and_the_update_obeys_the_clip(pairs: PairSet, limit: float) -> None:
    trainer = make(pairs, clip_norm=limit)
    rows = batches(pairs)[0]
    plain = gradient(trainer, rows, 0)
    trainer.task.model.zero_grad(set_to_none=True)
    # Plain descent makes the update the clipped gradient itself.
    trainer.step.optimizer = torch.optim.SGD(trainer.step.params, lr=1.0)
    before = {name: p.detach().clone() for name, p in trainer.task.model.named_parameters()}
    reported = float(trainer.step(Batch(rows), 0)[-1])
    moved = {name: before[name] - p.detach() for name, p in trainer.task.model.named_parameters()}
    assert reported == pytest.approx(norm(plain), rel=1e-5)
    assert reported > 0.5
    expected = 1.0 if limit in (0.0, 1e6) else limit / norm(plain)
    for name, value in plain.items():
        torch.testing.assert_close(moved[name], value * expected, rtol=1e-4, atol=1e-5)
    if limit == 0.5:
        assert norm(moved) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("method", ["vacsr", "infonce"])
def test_two_accumulated_batches_are_the_mean_of_their_gradients(pairs: PairSet, method: str) -> None:
    first, second = batches(pairs)[:2]
    alone = make(pairs, method)
    parts = [gradient(alone, first, 0), gradient(alone, second, 1)]
    trainer = make(pairs, method, accumulate=2, clip_norm=0)
    trainer.step.optimizer = torch.optim.SGD(trainer.step.params, lr=1.0)
    before = {name: p.detach().clone() for name, p in trainer.task.model.named_parameters()}
    values = [trainer.step(Batch(first), 0), trainer.step(Batch(second), 1)]
    assert float(values[0][-1]) == 0, "no update after the first"
    assert float(values[1][-1]) > 0
    for name, p in trainer.task.model.named_parameters():
        if name in parts[0]:
            mean = 0.5 * (parts[0][name] + parts[1][name])
            torch.testing.assert_close(before[name] - p.detach(), mean, rtol=1e-4, atol=1e-5)


def test_an_optimiser_step_never_crosses_an_epoch(pairs: PairSet) -> None:
    trainer = make(pairs, accumulate=2)  # 40 captions: 5 batches, of which 4 make two steps
    assert (trainer.task.steps_per_epoch, trainer.total_steps) == (4, 8)
    run = trainer.run(progress=False)
    assert run.state.step == 8
    updates = [row["grad_norm"] > 0 for row in run.history if "loss" in row]
    assert updates == [False, True] * 4


def test_the_logged_parts_add_up(pairs: PairSet) -> None:
    row = make(pairs, epochs=1).run(progress=False).history[0]
    parts = {"recon": 1.0, "kl": 5e-4, "sigma_pos": 1.0, "sigma_neg": 1.0, "cosine": 0.3}
    assert {"step", "epoch", "lr", "loss", "grad_norm", *parts} == row.keys()
    assert row["loss"] == pytest.approx(sum(weight * row[name] for name, weight in parts.items()), rel=1e-5)


@pytest.mark.parametrize("method", ["vacsr", "sigmoid", "infonce"])
def test_bf16_stays_close_on_a_cpu(pairs: PairSet, method: str) -> None:
    exact_run, rough_run = (make(pairs, method, precision=name).run(progress=False) for name in ("fp32", "bf16"))
    for exact, rough in zip(exact_run.history, rough_run.history, strict=True):
        if "loss" in exact:
            assert rough["loss"] == pytest.approx(exact["loss"], rel=0.05, abs=0.05)
    weights, expected = rough_run.model.state_dict(), exact_run.model.state_dict()
    assert all(tensor.dtype != torch.bfloat16 for tensor in weights.values())
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0.05, atol=0.02)
    assert any(not torch.equal(weights[name], tensor) for name, tensor in expected.items())


class Breaking(Sigmoid):
    """A sigmoid loss that breaks at one step, in its value or in its gradient alone."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(SigmoidConfig(), dim=8)
        self.at, self.what = at, what

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        terms = super().loss(v, t, pairs)
        if int(pairs.noise.step) != self.at:
            return terms
        if self.what == "total":
            return LossTerms(terms.total * torch.nan, terms.parts)
        zero = (self.affine[0] * 0.0).abs().sqrt()  # 0, but its derivative is 0/0
        if self.what == "gradient":
            return LossTerms(terms.total + zero, terms.parts)
        broken = terms.total / 0.0 - terms.total / 0.0 if self.what == "value" else terms.total
        parts = {**terms.parts, "extra": broken.detach() if self.what == "value" else terms.total.detach() * torch.inf}
        return LossTerms(broken, parts)


@pytest.mark.parametrize(
    ("what", "term"), [("value", "extra"), ("part", "extra"), ("gradient", "grad_norm"), ("total", "loss")]
)
def test_a_broken_number_stops_the_run_and_names_the_place(
    pairs: PairSet, tmp_path: Path, what: str, term: str
) -> None:
    config = TrainConfig(batch_size=8, epochs=4, device="cpu", checkpoint_every=2, log_every=1)
    with pytest.raises(NonFiniteLoss) as caught:
        fit(Breaking(8, what), pairs, config, backbone=FEATURES, out=tmp_path, progress=False)
    message, rows = str(caught.value), list(batch_order(len(pairs), batch=8, seed=0, epoch=1))[3]
    assert f"'{term}' is not finite at step 8 (epoch 2)" in message
    assert ", ".join(pairs.caption_ids[row] for row in rows.tolist()) in message
    assert str(tmp_path / "checkpoint") in message
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 8 + 1, "steps 0 to 7, an epoch's end"
    assert caught.value.exit_code == 4
    tensors, metadata = read_tensors(tmp_path / "checkpoint" / "state.safetensors")
    assert '"step": 7' in metadata["state"] or '"step": 8' in metadata["state"]
    assert all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point())


@pytest.mark.parametrize("what", ["value", "gradient"])
def test_a_broken_gradient_does_not_reach_the_weights(pairs: PairSet, what: str) -> None:
    trainer = make(pairs, Breaking(3, what))
    for step, rows in enumerate(batches(pairs)[:3]):
        trainer.step(Batch(rows), step)
    before = {name: tensor.clone() for name, tensor in trainer.task.model.state_dict().items()}
    assert not bool(trainer.step(Batch(batches(pairs)[3]), 3).isfinite().all())
    for name, tensor in trainer.task.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert bool(trainer.step(Batch(batches(pairs)[4]), 4).isfinite().all()), "nor the next step's gradients"


# ------------------------------------------------------------------------------------------------ a broken compiler


def towers_trainer(photos: PhotoSet, *, checkpointing: bool = False, **train: Any) -> Trainer:
    backbone = TINY.model_copy(update={"checkpointing": checkpointing})
    return make(photos, backbone=backbone, optimizer="adamp", towers={"freeze_image": 0}, **train)


def refuse(*_: object, **__: object) -> None:
    raise torch._dynamo.exc.TorchDynamoException("no compiler here")


def assert_same_steps(broken: Trainer, plain: Trainer, *, said: str) -> None:
    """The first step warns, the second does not, and both end as if nothing had been compiled."""
    batch = Batch(torch.arange(8))
    with pytest.warns(UserWarning, match=said):
        first = broken.step(batch, 0)
    torch.testing.assert_close(first, plain.step(batch, 0), rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(broken.step(batch, 1), plain.step(batch, 1), rtol=0, atol=0)
    for (name, ours), theirs in zip(broken.task.model.named_parameters(), plain.task.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)


def test_auto_goes_on_without_a_compiled_loss(photos: PhotoSet) -> None:
    plain, broken = towers_trainer(photos), towers_trainer(photos)
    broken.step.falls_back = True
    broken.task.pair_loss = refuse  # type: ignore[assignment]
    said = r"torch.compile failed \(no compiler here\); training continues uncompiled"
    assert_same_steps(broken, plain, said=said)


def test_blocks_that_cannot_be_compiled_are_recomputed_without(
    photos: PhotoSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **options, backend=refuse))
    plain, broken = (towers_trainer(photos, checkpointing=True, compile=on) for on in (False, True))
    broken.step.falls_back = True
    assert_same_steps(broken, plain, said="torch.compile failed")


def test_what_was_asked_for_fails_loudly(photos: PhotoSet) -> None:
    broken = towers_trainer(photos)
    broken.task.pair_loss = refuse  # type: ignore[attr-defined]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        broken.step(Batch(torch.arange(8)), 0)
