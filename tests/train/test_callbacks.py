from __future__ import annotations

import csv
import json
import multiprocessing
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vacsr.config import TowersConfig
from vacsr.errors import DiskFull, MissingExtra
from vacsr.train.callbacks import (
    CsvTracker,
    JsonlTracker,
    catch_interrupt,
    check_trackers,
    frozen_towers,
    loss_warmup,
    open_trackers,
)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, before=0)
    tracker.on_log(None, {"step": 0, "loss": 1.5})
    tracker.on_log(None, {"step": 1, "loss": 1.25})
    tracker.on_train_end(None)
    assert path.read_text(encoding="utf-8") == '{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.25}\n'


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', "{", "4", '{"step": null}', '{"loss": 1}', '{"step": 3}'])
def test_a_resumed_run_removes_the_later_rows(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in (0, 1, 1, 2, 3)) + torn, encoding="utf-8")
    tracker = JsonlTracker(path, before=2)
    assert steps(path) == [0, 1, 1]
    tracker.on_log(None, {"step": 2})
    assert steps(path) == [0, 1, 1, 2]


def test_a_fresh_run_starts_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n', encoding="utf-8")
    JsonlTracker(tmp_path / "metrics.jsonl", before=0)
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == ""


def test_csv_has_every_column(tmp_path: Path) -> None:
    lines, table = open_trackers(["jsonl", "csv"], tmp_path, step=0, config={})
    for row in ({"step": 0, "loss": 1.5}, {"step": 0, "epoch": 1, "dev_rsum": 300.0}):
        lines.on_log(None, row)
        table.on_log(None, row)
    table.on_train_end(None)
    with (tmp_path / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "0", "loss": "1.5", "epoch": "", "dev_rsum": ""},
        {"step": "0", "loss": "", "epoch": "1", "dev_rsum": "300.0"},
    ]


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_tracker_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'vacsr\[{name}\]'") as caught:
        check_trackers(["jsonl", "csv", name])
    with pytest.raises(MissingExtra, match=rf"pip install 'vacsr\[{name}\]'"):
        open_trackers([name], tmp_path, step=0, config={})
    assert caught.value.exit_code == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", before=0)
    tracker.path = Path("/dev/full")
    with pytest.raises(DiskFull, match="no space left while writing /dev/full"):
        tracker.on_log(None, {"step": 0})


def test_trackers_without_extras_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_trackers(["jsonl", "csv"])


def test_the_table_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_text("old", encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n{"step": 1, "lo', encoding="utf-8")
    tracker = CsvTracker(tmp_path / "metrics.csv", tmp_path / "metrics.jsonl")

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(csv.DictWriter, "writerows", broken)
        with pytest.raises(RuntimeError, match="broken"):
            tracker.on_train_end(None)
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]
    tracker.on_train_end(None)
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8").split() == ["step,loss", "0,1.5"], "no torn line"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_stops_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    before = signal.getsignal(number)
    with catch_interrupt() as interrupt:
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_worker_signalled_twice_still_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    with catch_interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def plan(image: int, text: int, *, image_lr: float = 0.1, text_lr: float = 0.1, ramp: bool = True) -> TowersConfig:
    return TowersConfig(freeze_image=image, freeze_text=text, image_lr=image_lr, text_lr=text_lr, ramp=ramp)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TowersConfig(), [{"image"}, {"image"}, set(), set()]),
        (plan(0, 0), [set(), set(), set(), set()]),
        (plan(1, 3), [{"image", "text"}, {"text"}, {"text"}, set()]),
        (plan(1, 0, image_lr=0.0), [{"image"}] * 4),
        (plan(0, 0, image_lr=0.0, text_lr=0.0), [{"image", "text"}] * 4),
    ],
)
def test_which_towers_are_frozen(config: TowersConfig, expected: list[set[str]]) -> None:
    assert [set(frozen_towers(epoch, config)) for epoch in range(4)] == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TowersConfig(), [1, 1, 1, 1, 0.5, 1, 1, 1]),  # two steps an epoch: the third unfreezes the image tower
        (plan(0, 0), [1] * 8),
        (plan(1, 2), [1, 1, 0.5, 1, 0.5, 1, 1, 1]),
        (plan(2, 0, ramp=False), [1] * 8),
        (plan(2, 0, image_lr=0.0), [1] * 8),  # never unfrozen
        (plan(9, 9), [1] * 8),
    ],
)
def test_the_loss_warms_up(config: TowersConfig, expected: list[float]) -> None:
    assert [loss_warmup(step, steps_per_epoch=2, config=config) for step in range(8)] == expected


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 9))
def test_the_warm_up_grows_to_one_within_an_epoch(image: int, text: int, steps: int) -> None:
    config = plan(image, text)
    for epoch in range(6):
        values = [loss_warmup(epoch * steps + index, steps_per_epoch=steps, config=config) for index in range(steps)]
        assert values[-1] == 1.0
        assert all(value > 0 for value in values)
        unfreezes = epoch > 0 and epoch in (image, text)
        assert values == ([(index + 1) / steps for index in range(steps)] if unfreezes else [1.0] * steps)
