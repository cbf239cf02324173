"""The state file: whole or not there, and nothing of the run is missing from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import vacsr.files
from vacsr.config import BackboneConfig, DataConfig, TrainConfig
from vacsr.data import PairSet, load_pairs
from vacsr.errors import DataError, OtherRun
from vacsr.files import read_tensors
from vacsr.methods.base import ParamGroup
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.train.checkpoint import FILE, TrainState, check_checkpoint, load_checkpoint, save_checkpoint
from vacsr.train.optim import build_optimizer
from vacsr.train.retrieval import RetrievalTask

from .conftest import Outcome

CPU = torch.device("cpu")
SPEC = "synthetic:images=8,held_out=6,per_image=2"


def trained(optimizer: str, *, steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    groups = [ParamGroup("all", list(model.parameters()))]
    built = build_optimizer(groups, optimizer, lr=0.01, weight_decay=0.01, momentum=0.9)
    train(model, built, steps)
    return model, built


def save(folder: Path, description: dict[str, Any]) -> None:
    """A checkpoint of a model after one step."""
    model, optimizer = trained("adamw", steps=1)
    groups = {"model": model.state_dict()}
    save_checkpoint(folder, groups, optimizer, state=TrainState(), description=description, device=CPU)


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(step + 1))).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "adamp", "sgd"])
def test_everything_comes_back(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(name, steps=3)
    state = TrainState(step=7, best=123.5, best_step=4, best_weights={"weight": torch.ones(2, 3)})
    torch.manual_seed(5)
    groups = {"model": model.state_dict(), "training": {"seen": torch.arange(2)}}
    save_checkpoint(tmp_path, groups, optimizer, state=state, description={}, device=CPU)
    drawn = torch.rand(3)
    fresh, other = trained(name, steps=0)
    loaded, groups = load_checkpoint(tmp_path, other, description={}, device=CPU)
    assert torch.equal(torch.rand(3), drawn), "torch's generator goes on where it was"
    assert groups.keys() == {"model", "training"}
    fresh.load_state_dict(groups["model"])
    assert (loaded.step, loaded.best, loaded.best_step, loaded.stopped) == (7, 123.5, 4, False)
    assert torch.equal(loaded.best_weights["weight"], torch.ones(2, 3))
    for part, optim in ((model, optimizer), (fresh, other)):
        train(part, optim, 2)
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(fresh.bias, model.bias)


def test_a_run_on_the_processor_leaves_cuda_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("takes memory on the GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    save(tmp_path, {})
    tensors, metadata = read_tensors(tmp_path / FILE)
    assert "rng.cuda" not in tensors
    vacsr.files.write_tensors(tmp_path / FILE, {**tensors, "rng.cuda": torch.zeros(16)}, metadata=metadata)
    load_checkpoint(tmp_path, trained("adamw", steps=0)[1], description={}, device=CPU)  # a run that moved off its GPU


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    check_checkpoint(tmp_path, {})  # none is no error
    (tmp_path / FILE).write_bytes(b"torn")
    with pytest.raises(DataError, match="delete"):
        check_checkpoint(tmp_path, {})
    save_file({"x": torch.zeros(1)}, tmp_path / FILE)  # of a state that described itself otherwise
    with pytest.raises(DataError, match="delete"):
        check_checkpoint(tmp_path, {})


# ------------------------------------------------------------------------------------------------------ another run


def worded(split: str, *words: str) -> PairSet:
    """Pairs of features, with words for the first captions and the same for the others; none without words."""
    pairs = load_pairs(SPEC, split=split)
    others = ("a dog",) * (len(pairs) - len(words))
    return replace(pairs, captions=(*words, *others) if words else None)


def described(**changes: Any) -> dict[str, Any]:
    """The description of a retrieval run."""
    defaults = {
        "method": SigmoidConfig(), "pairs": worded("train", "a dog"), "config": TrainConfig(batch_size=4),
        "dev": worded("dev", "a dog"), "backbone": BackboneConfig(), "reading": DataConfig(),
    }  # fmt: skip
    return RetrievalTask(**(defaults | changes)).description


DEV = worded("dev", "a dog")
OTHER: list[tuple[str, dict[str, Any]]] = [
    ("method.name was 'sigmoid' and is now 'infonce'", {"method": InfoNCEConfig()}),
    ("backbone.pooling was 'gpo' and is now 'mean'", {"backbone": BackboneConfig(pooling="mean")}),
    ("train.lr was 0.0005 and is now 0.1", {"config": TrainConfig(batch_size=4, lr=0.1)}),
    ("training data.features was", {"pairs": worded("test", "a dog")}),
    ("photo_size was 0 and is now 64", {"reading": DataConfig(photo_size=64)}),
    ("dev data.features was", {"dev": replace(DEV, caption_image=DEV.caption_image.flip(0))}),
    ("dev data was", {"dev": None}),
    *(
        (f"{name} data.captions was", {part: worded(split, *words)})
        for part, split, name in (("pairs", "train", "training"), ("dev", "dev", "dev"))
        for words in (("a cat",), ("a dog", "a dog "), ("a do", "ga dog"), ("\ud800",), ())
    ),
]


@pytest.mark.parametrize(("message", "change"), OTHER, ids=[name for name, _ in OTHER])
def test_a_refusal_names_what_differs(tmp_path: Path, message: str, change: dict[str, Any]) -> None:
    """The same features with other words are another run too: a method may read them."""
    save(tmp_path, described())
    check_checkpoint(tmp_path, described())
    with pytest.raises(OtherRun, match="another configuration or data") as refused:
        check_checkpoint(tmp_path, described(**change))
    assert f": {message}" in str(refused.value)


def test_what_changes_nothing_may_change() -> None:
    free = TrainConfig(batch_size=4, device="cpu", log_every=3, checkpoint_every=4, trackers=("tensorboard",))
    assert described() == described(config=free) == described(method=Sigmoid(SigmoidConfig(), dim=256))


def test_a_full_disk(launch: Any, reference: Any, tmp_path: Path) -> None:
    """A real limit of the system: the state does not fit, the small files do."""
    file, expected = reference({"method.name": "vacsr"})
    done = launch("train", file, "--out", tmp_path, limit=8000)
    assert (done.code, done.out) == (3, ""), done.err
    messages = [line for line in done.err.splitlines() if "epoch" not in line]
    assert len(messages) == 1, done.err
    assert messages[0].startswith("DiskFull: ")
    assert "run the same command again" in messages[0]
    assert list((tmp_path / "checkpoint").iterdir()) == []
    assert not (tmp_path / "model").exists()
    assert launch("train", file, "--out", tmp_path, "--resume").code == 0
    assert Outcome.of(tmp_path).same(expected)
