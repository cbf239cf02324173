"""`vacsr fewshot` as a person types it: tables on stdout, one clear message and exit code for what is wrong."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from vacsr.fewshot.methods.clip import ClipModel
from vacsr.fewshot.methods.prompts import Coop

Command = Callable[..., Any]


@pytest.fixture
def recipe(raw: dict[str, Any], tmp_path: Path) -> Path:
    raw["data"] |= {"spec": "scenes:classes=4,train=4,test=2,size=32", "shots": 2}
    raw["train"]["batch_size"] = 2
    path = tmp_path / "few.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


def test_a_run_prints_its_table(vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = vacsr("fewshot", recipe, "--set", "train.epochs=1")
    assert answer.code == 0
    (tmp_path / "runs" / "few").rename(tmp_path / "run")  # named after the recipe
    lines = answer.out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["split", "---", "base", "new", "HM"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert f"{report['hm']:.2f}" in lines[-1]
    assert "epoch 1/1" in answer.err
    resumed = vacsr("fewshot", recipe, "--out", tmp_path / "run", "--set", "train.epochs=1", "--resume")
    assert resumed.out == answer.out


def test_ctrl_c_tells_how_to_go_on(
    vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after_step(self: Coop, step: int, steps: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Coop, "after_step", after_step)
        answer = vacsr("fewshot", recipe, "--out", tmp_path / "run")
    assert answer.code == 130
    assert answer.out == ""
    assert "stopped after step 2" in answer.err
    assert answer.err.rstrip().endswith(f"{tmp_path / 'run' / 'config.yaml'} --out {tmp_path / 'run'} --resume")
    words = answer.err.rpartition("vacsr fewshot")[2].split()
    assert vacsr("fewshot", *words).code == 0


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("method=copo", 2, ["unknown few-shot method 'copo'", "coop"]),
        ("method.contxt=x", 2, ["method.contxt:", "did you mean 'context'?"]),
        ("backbone.start=", 2, ["clip"]),
        ("data.spec=folder:nowhere", 4, ["nowhere"]),
        ("data.shots_file=nowhere.json", 4, ["nowhere.json"]),
        ("data.sentences=nowhere.json", 4, ["nowhere.json"]),
        ("backbone.start=nowhere", 4, ["nowhere"]),
        ("train.device=cuda:99", 3, ["GPU"]),
    ],
)
def test_what_is_wrong_is_said_once(
    vacsr: Command, recipe: Path, tmp_path: Path, change: str, code: int, words: list[str]
) -> None:
    overrides = ["--set", change]
    if change == "backbone.start=":
        overrides += ["--set", "backbone.spec=tiny:"]
    assert vacsr("fewshot", recipe, "--out", tmp_path / "run", *overrides).refused(code, *words)
    assert not (tmp_path / "run").exists()


def test_folders_and_flags_that_do_not_fit(vacsr: Command, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert vacsr("fewshot", recipe, "--out", run).code == 0
    assert vacsr("fewshot", recipe, "--out", run).refused(2, "already holds a run", "--resume")
    other = vacsr("fewshot", recipe, "--out", run, "--resume", "--set", "train.lr=0.2")
    assert other.refused(4, "another configuration or data", "train.lr was", "is now 0.2")
    assert vacsr("fewshot", tmp_path / "none.yaml").refused(2, "no such file")
    (tmp_path / "file").write_text("")
    assert vacsr("fewshot", recipe, "--out", tmp_path / "file" / "run").refused(2, "is a file")


def test_a_broken_photo_is_named(vacsr: Command, recipe: Path, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    change = ["--set", f"data.spec=folder:{tmp_path / 'photos'}", "--set", "data.protocol=all"]
    assert vacsr("fewshot", recipe, "--out", tmp_path / "run", *change).code == 0
    for path in (tmp_path / "photos" / "dog").iterdir():
        path.write_bytes(b"no photo")
    assert vacsr("fewshot", recipe, "--out", tmp_path / "broken", *change).refused(4, "dog", "cannot be read")


def test_memory_that_runs_out_is_told_with_what_takes_less(
    vacsr: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU while training, on a processor while testing; other errors of torch are left as they are."""
    monkeypatch.setattr(ClipModel, "image", lambda *_, **__: torch.empty(10**15))
    tested = vacsr("fewshot", recipe, "--out", tmp_path / "run", "--set", "method=zeroshot")
    assert tested.refused(3, "out of memory", "smaller evaluate.batch_size")

    def image(self: ClipModel, pixels: Tensor, edits: Any = None) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB.")

    monkeypatch.setattr(ClipModel, "image", image)
    answer = vacsr("fewshot", recipe, "--out", tmp_path / "full")
    assert answer.refused(3, "CUDA out of memory — try --set", "method.pair_chunk=4096", "train.batch_size")
    monkeypatch.setattr(ClipModel, "image", lambda *_, **__: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        vacsr("fewshot", recipe, "--out", tmp_path / "broken")
