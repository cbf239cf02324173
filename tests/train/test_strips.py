"""Training in strips is training: steps, accumulated gradients, a broken compiler."""

import pytest
import torch
from torch import Tensor

from vacsr.data import PairSet
from vacsr.strips import StripLoss
from vacsr.train.data import Batch
from vacsr.train.trainer import Trainer

from .conftest import make

ROWS = torch.arange(12)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.task.model.named_parameters()}


@pytest.mark.parametrize("method", ["vacsr", "sigmoid", "pcme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_in_strips_takes_the_steps_of_a_dense_one(pairs: PairSet, method: str, precision: str) -> None:
    dense, strips = (make(pairs, method, batch_size=12, tile=tile, precision=precision) for tile in (0, 5))
    assert not isinstance(dense.task.pair_loss, StripLoss)
    assert isinstance(strips.task.pair_loss, StripLoss)
    assert strips.task.pair_loss.rows == 4
    within = 1e-5 if precision == "fp32" else 2e-2
    for step in range(3):
        ours, theirs = (trainer.step(Batch(ROWS + step), step) for trainer in (strips, dense))
        torch.testing.assert_close(ours, theirs, rtol=within, atol=within)
    assert strips.step.names == dense.step.names
    if precision == "fp32":  # Adam turns a gradient's rounding near 0 into a step's sign, so weights need the exact one
        for name, weight in weights(dense).items():
            torch.testing.assert_close(weights(strips)[name], weight, rtol=0, atol=2e-5, msg=name)


def refuse(*_: object, **__: object) -> None:
    raise torch._dynamo.exc.TorchDynamoException("no compiler here")


def test_a_broken_compiler_leaves_the_strips(pairs: PairSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    plain, broken = (make(pairs, batch_size=12, tile=5, compile=on) for on in (False, True))
    broken.step.falls_back = True
    with pytest.warns(UserWarning, match="no compiler here"):
        first = broken.step(Batch(ROWS), 0)
    assert isinstance(broken.task.pair_loss, StripLoss)
    torch.testing.assert_close(first, plain.step(Batch(ROWS), 0), rtol=0, atol=0)
