"""Training in strips is training: one step, two ranks, a broken compiler, a captured graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, load_pairs
from vacsr.errors import UsageError
from vacsr.strips import StripLoss
from vacsr.train import fit
from vacsr.train.data import Batch
from vacsr.train.retrieval import retrieval_task
from vacsr.train.trainer import Trainer

BACKBONE = BackboneConfig(head=HeadConfig(dim=8))
ROWS = torch.arange(12)
PLAIN = {"data.dev": "", "evaluate.splits": ["test"]}


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    return load_pairs("synthetic:images=20,per_image=2", split="train")


def make(pairs: PairSet, method: str, **fields: Any) -> Trainer:
    config = TrainConfig(**{"batch_size": 12, "device": "cpu", **fields})
    return Trainer(retrieval_task(method_config(method), pairs, config, backbone=BACKBONE), config)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.task.model.named_parameters()}


@pytest.mark.parametrize("method", ["vacsr", "sigmoid", "pcme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_in_strips_takes_the_steps_of_a_dense_one(pairs: PairSet, method: str, precision: str) -> None:
    dense, strips = (make(pairs, method, tile=tile, precision=precision, optimizer="adamw") for tile in (0, 5))
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


def test_gradients_accumulate_and_warm_up(pairs: PairSet) -> None:
    dense, strips = (make(pairs, "vacsr", tile=tile, accumulate=2) for tile in (0, 5))
    found = []
    for trainer in (strips, dense):
        trainer.step.loss_scale.fill_(0.25)
        trainer.step(Batch(ROWS), 0)
        found.append({n: p.grad.clone() for n, p in trainer.task.model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_auto_takes_small_batches_whole(pairs: PairSet) -> None:
    assert not isinstance(make(pairs, "vacsr", tile="auto").task.pair_loss, StripLoss)
    assert not isinstance(make(pairs, "infonce", tile="auto").task.pair_loss, StripLoss)


def test_a_method_without_strips_refuses_a_number(pairs: PairSet) -> None:
    with pytest.raises(UsageError, match=r"set train.tile=0 or auto"):
        make(pairs, "vse", tile=4)


METHODS: dict[str, dict[str, Any]] = {
    "vacsr": {"method.name": "vacsr", "method.objective": {"hard_negatives": 2}},
    "sigmoid": {"method.name": "sigmoid"},
}


@pytest.mark.parametrize("method", list(METHODS))
def test_two_ranks_in_strips_have_the_gradients_of_one_dense_process(
    launch: Any, recipes: Any, tmp_path: Path, method: str
) -> None:
    dense, strips = (recipes.file(PLAIN | METHODS[method] | {"train.tile": tile}) for tile in (0, 3))
    launch.assert_same_gradients(dense, strips, tmp_path, within=2e-6)


def refuse(*_: object, **__: object) -> None:
    raise torch._dynamo.exc.TorchDynamoException("no compiler here")


def test_a_broken_compiler_leaves_the_strips(pairs: PairSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    plain, broken = make(pairs, "vacsr", tile=5), make(pairs, "vacsr", tile=5, compile=True)
    broken.step.falls_back = True
    with pytest.warns(UserWarning, match="no compiler here"):
        first = broken.step(Batch(ROWS), 0)
    assert isinstance(broken.task.pair_loss, StripLoss)
    torch.testing.assert_close(first, plain.step(Batch(ROWS), 0), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("tile", "compiled"), [(24, False), (32, True)])
def test_a_captured_step_in_strips_trains_like_an_eager_dense_one(tile: int, compiled: bool) -> None:
    """Ragged strips as they are; equal ones compiled, as each shape is a compilation."""
    pairs = load_pairs("synthetic:images=100", split="train")

    def trained(**changes: Any) -> dict[str, Tensor]:
        config = TrainConfig(epochs=2, batch_size=64, device="cuda", **changes)
        return fit("vacsr", pairs, config, backbone=BACKBONE, progress=False).model.cpu().state_dict()

    dense, strips = trained(), trained(tile=tile, cuda_graph=True, compile=compiled)
    for name, weight in dense.items():
        torch.testing.assert_close(strips[name], weight, rtol=2e-3, atol=2e-3, msg=name)
