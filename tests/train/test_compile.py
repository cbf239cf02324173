"""What a run does where the compiler gives up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from vacsr.config import BackboneConfig, DataConfig, HeadConfig, TowersConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.train import adamp
from vacsr.train.assemble import Parts, assemble
from vacsr.train.feed import Batch

TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(kind="linear", dim=8))


def parts(**train: Any) -> Parts:
    pairs = load_pairs("scenes:images=8,held_out=2,size=32", split="train")
    config = TrainConfig(batch_size=8, device="cpu", optimizer="adamp", towers=TowersConfig(freeze_image=0), **train)
    return assemble(method_config("vacsr"), pairs, config, backbone=TINY, dev=None, reading=DataConfig())


def refuse(*_: object, **__: object) -> None:
    raise torch._dynamo.exc.TorchDynamoException("no compiler here")


def assert_same_steps(broken: Parts, plain: Parts, *, said: str) -> None:
    """The first step warns, the second does not, and both end as if nothing had been compiled."""
    batch = Batch(torch.arange(8))
    with pytest.warns(UserWarning, match=said):
        first = broken.step(batch, 0)
    torch.testing.assert_close(first, plain.step(batch, 0), rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(broken.step(batch, 1), plain.step(batch, 1), rtol=0, atol=0)
    for (name, ours), theirs in zip(broken.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=name)


def test_auto_goes_on_without_a_compiled_loss() -> None:
    plain, broken = parts(), parts()
    broken.step.may_give_up = True
    broken.step.pair_loss = refuse  # type: ignore[assignment]
    said = r"torch.compile gave up \(no compiler here\); training goes on uncompiled"
    assert_same_steps(broken, plain, said=said)


def test_adamp_goes_on_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, broken = parts(), parts()
    for group in broken.step.optimizer.param_groups:
        group["compiled"] = True
    monkeypatch.setattr(adamp, "_WORTH_COMPILING", 1)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    adamp._compiled_change.cache_clear()
    try:
        assert_same_steps(broken, plain, said=r"torch.compile gave up on AdamP \(no compiler here\)")
    finally:
        adamp._compiled_change.cache_clear()


def test_what_was_asked_for_fails_loudly() -> None:
    step = parts().step
    step.pair_loss = refuse  # type: ignore[assignment]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        step(Batch(torch.arange(8)), 0)
