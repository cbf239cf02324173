"""The state file: whole or not there, and nothing of the run is missing from it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

import vacsr.files
from vacsr.cli import main
from vacsr.config import BackboneConfig, TrainConfig
from vacsr.data import PairSet, load_pairs
from vacsr.errors import DataError, EnvironmentProblem, OtherRun
from vacsr.methods.base import ParamGroup
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.train import fit
from vacsr.train.checkpoint import (
    FILE,
    TrainState,
    check_checkpoint,
    describe,
    fingerprint,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from vacsr.train.optim import build_optimizer

SPEC = "synthetic:images=8,held_out=6,per_image=2"


def trained(optimizer: str, *, steps: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    groups = [ParamGroup("all", list(model.parameters()))]
    built = build_optimizer(groups, optimizer, lr=0.01, weight_decay=0.01, momentum=0.9)
    train(model, built, steps)
    return model, built


def save(
    folder: Path,
    model: nn.Linear,
    optimizer: torch.optim.Optimizer,
    *,
    state: TrainState | None = None,
    mark: str = "f",
) -> None:
    groups = {"model": model.state_dict()}
    device = torch.device("cpu")
    save_checkpoint(folder, groups, optimizer, state=state or TrainState(), fingerprint=mark, device=device)


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
    save(tmp_path, model, optimizer, state=state)
    drawn = torch.rand(3)
    fresh, other = trained(name, steps=0)
    checkpoint = load_checkpoint(tmp_path, fingerprint="f")
    assert checkpoint is not None
    fresh.load_state_dict(checkpoint.groups["model"])
    checkpoint.restore(other, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn), "torch's generator goes on where it was"
    found = checkpoint.state
    assert (found.step, found.best, found.best_step, found.stopped) == (7, 123.5, 4, "")
    assert torch.equal(found.best_weights["weight"], torch.ones(2, 3))
    for part, optim in ((model, optimizer), (fresh, other)):
        train(part, optim, 2)
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(fresh.bias, model.bias)


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert not has_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path, fingerprint="f") is None
    check_checkpoint(tmp_path, fingerprint="f")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained("adamw", steps=1)
    save(tmp_path, model, optimizer, mark="one")
    for refuse in (load_checkpoint, check_checkpoint):
        with pytest.raises(OtherRun, match="another configuration or data"):
            refuse(tmp_path, fingerprint="two")
    check_checkpoint(tmp_path, fingerprint="one")
    (tmp_path / "state.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="delete"):
        check_checkpoint(tmp_path, fingerprint="one")


def test_a_run_on_the_processor_leaves_cuda_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("takes memory on the GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, optimizer = trained("adamw", steps=1)
    save(tmp_path, model, optimizer)
    tensors, metadata = vacsr.files.read_tensors(tmp_path / FILE)
    assert "rng.cuda" not in tensors
    vacsr.files.write_tensors(tmp_path / FILE, {**tensors, "rng.cuda": torch.zeros(16)}, metadata=metadata)
    checkpoint = load_checkpoint(tmp_path, fingerprint="f")
    assert checkpoint is not None
    checkpoint.restore(optimizer, torch.device("cpu"))  # a run that moved off its GPU


def mark(**changes: Any) -> str:
    """The fingerprint of a retrieval run."""
    given: dict[str, Any] = {
        "method": SigmoidConfig(), "pairs": load_pairs(SPEC, split="train"), "dev": load_pairs(SPEC, split="dev"),
        "config": TrainConfig(), "backbone": BackboneConfig(), **changes,
    }  # fmt: skip
    return fingerprint(describe(given.pop("method"), given.pop("pairs"), **given))


def worded(split: str, *words: str) -> PairSet:
    """Pairs of features, with words for the first captions and the same for the others; none without words."""
    pairs = load_pairs(SPEC, split=split)
    others = ("a dog",) * (len(pairs) - len(words))
    return replace(pairs, captions=(*words, *others) if words else None)


BEFORE = {"pairs": worded("train", "a dog"), "dev": worded("dev", "a dog")}
OTHER: list[tuple[str, dict[str, Any]]] = [
    ("method", {"method": InfoNCEConfig()}),
    ("backbone", {"backbone": BackboneConfig(spec="tiny:")}),
    ("training fields", {"config": TrainConfig(lr=0.1)}),
    ("training data", {"pairs": worded("test", "a dog")}),
    ("data.photo_size", {"photo_size": 64}),
    ("dev data", {"dev": replace(BEFORE["dev"], caption_image=BEFORE["dev"].caption_image.flip(0))}),
    *(
        (f"words of the {name} captions", {part: worded(split, *words)})
        for part, split, name in (("pairs", "train", "training"), ("dev", "dev", "dev"))
        for words in (("a cat",), ("a dog", "a dog "), ("a do", "ga dog"), ("\ud800",), ())
    ),
]


@pytest.mark.parametrize(("name", "change"), OTHER, ids=[name for name, _ in OTHER])
def test_a_refusal_names_the_part_that_differs(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    """The same features with other words are another run too: a method may read them."""
    model, optimizer = trained("adamw", steps=1)
    save(tmp_path, model, optimizer, mark=mark(**BEFORE))
    assert load_checkpoint(tmp_path, fingerprint=mark(**{part: replace(pairs) for part, pairs in BEFORE.items()}))
    with pytest.raises(OtherRun) as refused:
        load_checkpoint(tmp_path, fingerprint=mark(**BEFORE | change))
    named = [other for other in dict(OTHER) if f"other {other}" in str(refused.value)]
    assert named == [name] or (name == "training data" and name in named), "and no other part"
    with pytest.raises(OtherRun, match="other dev data"):
        load_checkpoint(tmp_path, fingerprint=mark(**BEFORE | {"dev": None}))


def test_daa_does_not_go_on_with_other_words(tmp_path: Path) -> None:
    config = TrainConfig(epochs=2, batch_size=8, device="cpu")
    given = {"backbone": BackboneConfig(head={"dim": 8}), "out": tmp_path, "progress": False}
    run = fit("daa", worded("train", "two cats", "a red kite"), config, **given)
    again = fit("daa", worded("train", "two cats", "a red kite"), config, resume=True, **given)
    assert again.state.step == run.state.step
    with pytest.raises(OtherRun, match="other words of the training captions"):
        fit("daa", worded("train", "two dogs", "a red kite"), config, resume=True, **given)


def test_a_fingerprint_is_the_same_tomorrow() -> None:
    """Each part by itself, so that no order and no process is in it."""
    prints = json.loads(mark(pairs=worded("train", "ein Hündchen"), dev=worded("dev")))
    text = '["ein H\\u00fcndchen"' + ', "a dog"' * (len(worded("train")) - 1) + "]"
    assert prints["words of the training captions"] == hashlib.sha256(text.encode()).hexdigest()
    assert prints["words of the dev captions"] == hashlib.sha256(b"null").hexdigest(), "features without words"


def test_the_fingerprint_does_not_mind_what_changes_nothing() -> None:
    free = TrainConfig(device="cuda", log_every=3, checkpoint_every=4, trackers=("csv",))
    assert mark() == mark(config=free) == mark(method=Sigmoid(SigmoidConfig(), dim=8))


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    model, optimizer = trained("adamw", steps=1)
    for folder in (tmp_path / "checkpoint", tmp_path / "checkpoint" / "deep"):
        with pytest.raises(EnvironmentProblem, match=r"cannot make the folder .*checkpoint"):
            save(folder, model, optimizer)


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    model, optimizer = trained("adamw", steps=1)
    save(tmp_path, model, optimizer)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(DataError, match=FILE):
        load_checkpoint(tmp_path, fingerprint="f")


def test_what_a_kill_left_behind_is_cleared(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}.123.tmp").write_bytes(b"half")
    model, optimizer = trained("adamw", steps=1)
    save(tmp_path, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


class Full:
    """A disk that is full from the ``number``-th checkpoint on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, number: int, where: str) -> None:
        self.seen, self.number = 0, number
        self.sync = os.fsync
        self.error: Exception = OSError(errno.ENOSPC, "No space left on device")
        if where == "safetensors":
            self.error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        monkeypatch.setattr(vacsr.files, "save_file", self.save_file)
        if where == "fsync":
            monkeypatch.setattr(os, "fsync", self.fsync)
        self.where = where

    def save_file(self, tensors: Any, path: Path, metadata: Any = None) -> None:
        self.seen += "state.safetensors" in str(path)
        if self.seen >= self.number and self.where != "fsync":
            Path(path).write_bytes(b"half of it")
            raise self.error
        save_file(tensors, path, metadata=metadata)

    def fsync(self, descriptor: int) -> None:
        if self.seen >= self.number:
            raise self.error
        self.sync(descriptor)


def command(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["vacsr", *map(str, argv)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize("where", ["write", "fsync", "safetensors"])
def test_a_full_disk(
    recipes: Any, reference: Any, outcome: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    file, expected = reference({"method.name": "vacsr"})
    with pytest.MonkeyPatch.context() as patched:
        Full(patched, number=3, where=where)
        assert command(patched, "train", file, "--out", tmp_path) == 3
    out, err = capsys.readouterr()
    assert out == ""
    messages = [line for line in err.splitlines() if "epoch" not in line]
    assert len(messages) == 1, err
    assert messages[0].startswith("DiskFull: no space left while writing ")
    assert "run the same command again" in messages[0]
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [FILE]
    assert not (tmp_path / "model").exists()
    _, metadata = vacsr.files.read_tensors(tmp_path / "checkpoint" / FILE)
    assert json.loads(metadata["state"])["step"] == 6
    with pytest.MonkeyPatch.context() as patched:
        assert command(patched, "train", file, "--out", tmp_path, "--resume") == 0
    assert outcome.of(tmp_path).same(expected)


def test_a_file_that_may_not_grow(launch: Any, recipes: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    """A real limit of the system: the state does not fit, the small files do."""
    file, expected = reference({"method.name": "vacsr"})
    done = launch("train", file, "--out", tmp_path, limit=8000)
    assert (done.code, done.out) == (3, ""), done.err
    assert "DiskFull: no space left while writing" in done.err
    assert launch("train", file, "--out", tmp_path, "--resume").code == 0
    assert outcome.of(tmp_path).same(expected)
