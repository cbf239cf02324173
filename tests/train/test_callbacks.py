"""Trackers, Ctrl-C, and which towers are frozen when."""

import json
import multiprocessing
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vacsr.config import TowersConfig
from vacsr.errors import DiskFull
from vacsr.train.callbacks import JsonlTracker, catch_interrupt, frozen_towers, loss_warmup


def at(step: int) -> Any:
    """A trainer whose next step is this."""
    return SimpleNamespace(state=SimpleNamespace(step=step))


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', "{", '{"step": 3}'])
@pytest.mark.parametrize(("step", "kept"), [(2, [0, 1, 1]), (0, [])])
def test_a_resumed_run_removes_the_later_rows(tmp_path: Path, torn: str, step: int, kept: list[int]) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.path.write_text("".join(f'{{"step": {n}}}\n' for n in (0, 1, 1, 2, 3)) + torn, encoding="utf-8")
    tracker.on_train_start(at(step))
    assert steps(tracker.path) == kept
    tracker.on_log(at(step), {"step": step})
    assert steps(tracker.path) == [*kept, step]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.path = Path("/dev/full")
    with pytest.raises(DiskFull, match="/dev/full"):
        tracker.on_log(at(0), {"step": 0})


@pytest.mark.parametrize(
    ("parent", "first", "second"),
    [
        (None, signal.SIGINT, signal.SIGINT),
        (None, signal.SIGTERM, signal.SIGTERM),
        ("a worker", signal.SIGTERM, signal.SIGINT),
    ],
)
def test_the_second_signal_stops_at_once(
    monkeypatch: pytest.MonkeyPatch, parent: str | None, first: signal.Signals, second: signal.Signals
) -> None:
    """A worker may be told twice to end, by its parent and by whoever ends all processes: it still saves."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    before = signal.getsignal(first)
    with catch_interrupt() as interrupt:
        for _ in range(2 if parent else 1):
            signal.raise_signal(first)
        assert interrupt.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert signal.getsignal(first) is before


def plan(image: int, text: int, *, image_lr: float = 0.1, text_lr: float = 0.1, ramp: bool = True) -> TowersConfig:
    return TowersConfig(freeze_image=image, freeze_text=text, image_lr=image_lr, text_lr=text_lr, ramp=ramp)


@pytest.mark.parametrize(
    ("config", "frozen", "scales"),  # by epoch; by step, two an epoch
    [
        (TowersConfig(), [{"image"}, {"image"}, set(), set()], [1, 1, 1, 1, 0.5, 1, 1, 1]),
        (plan(0, 0), [set()] * 4, [1] * 8),
        (plan(1, 3), [{"image", "text"}, {"text"}, {"text"}, set()], [1, 1, 0.5, 1, 1, 1, 0.5, 1]),
        (plan(2, 0, ramp=False), [{"image"}, {"image"}, set(), set()], [1] * 8),
        (plan(2, 0, image_lr=0.0), [{"image"}] * 4, [1] * 8),  # never unfrozen
        (plan(0, 0, image_lr=0.0, text_lr=0.0), [{"image", "text"}] * 4, [1] * 8),
    ],
)
def test_frozen_towers_and_the_warm_up_of_the_loss(
    config: TowersConfig, frozen: list[set[str]], scales: list[float]
) -> None:
    assert [set(frozen_towers(epoch, config)) for epoch in range(4)] == frozen
    assert [loss_warmup(step, steps_per_epoch=2, config=config) for step in range(8)] == scales
