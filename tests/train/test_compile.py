"""What a run does where the compiler gives up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig, TowersConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.train.data import Batch
from vacsr.train.retrieval import retrieval_task
from vacsr.train.trainer import Trainer

TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(kind="linear", dim=8))


def trainer(**train: Any) -> Trainer:
    pairs = load_pairs("scenes:images=8,held_out=2,size=32", split="train")
    config = TrainConfig(batch_size=8, device="cpu", optimizer="adamp", towers=TowersConfig(freeze_image=0), **train)
    return Trainer(retrieval_task(method_config("vacsr"), pairs, config, backbone=TINY), config)


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


def test_auto_goes_on_without_a_compiled_loss() -> None:
    plain, broken = trainer(), trainer()
    broken.step.falls_back = True
    broken.task.pair_loss = refuse  # type: ignore[assignment]
    said = r"torch.compile failed \(no compiler here\); training continues uncompiled"
    assert_same_steps(broken, plain, said=said)


def test_what_was_asked_for_fails_loudly() -> None:
    broken = trainer()
    broken.task.pair_loss = refuse  # type: ignore[attr-defined]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        broken.step(Batch(torch.arange(8)), 0)
