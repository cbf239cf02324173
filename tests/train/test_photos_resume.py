"""Training on photos that is stopped and resumed ends where the uninterrupted run ends, bit for bit.

A run has 4 epochs of 4 steps. The text tower rests in the first, the image tower in the first two, and in the epochs
that wake them the loss is ramped. Augmentation is on. Photos that are decoded again for every batch ("streamed") must
end where those that were decoded once end.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

PHOTOS: dict[str, Any] = {
    "data.pairs": "scenes:images=16,held_out=6,per_image=2,size=32",
    "backbone.spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
    "train.epochs": 4,
    "train.towers": {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 2, "freeze_text": 1},
    "train.checkpoint_every": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"method.name": "vacsr"},
    "adamp": {"method.name": "vacsr", "train.optimizer": "adamp", "data.photo_size": 40},
    "accumulate": {"method.name": "sigmoid", "train.accumulate": 2, "backbone.checkpointing": True},
    "mean": {"method.name": "infonce", "backbone.pooling": "mean", "train.schedule": "cosine"},
}
STREAMED = ["--set", "data.cache_gb=0", "--set", "data.workers=2"]


@pytest.mark.parametrize(
    ("case", "streamed"),
    [
        ("adamw", True),
        pytest.param("adamp", False, marks=pytest.mark.slow),
        pytest.param("adamw", False, marks=pytest.mark.slow),
        pytest.param("adamp", True, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_towers_rest_wake_and_learn(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, case: str, streamed: bool
) -> None:
    """Steps done at each stop: 2 (both towers rest), 6 (the text tower wakes), 10 (the image tower wakes), 14."""
    file, expected = reference(PHOTOS | CASES[case])
    command = ["train", file, "--out", tmp_path / "run", "--resume", *(STREAMED if streamed else [])]
    for number, step in enumerate((2, 6, 10, 14)):
        done = launch(*command, kill=("ctrl-c", 2 if number == 0 else 4))
        assert done.code == 130, done
        assert f"stopped after step {step};" in done.err
    done = launch(*command)
    assert done.code == 0, done.err
    assert outcome.of(tmp_path / "run").same(expected)


@pytest.mark.parametrize("step", [4, 8])
def test_ctrl_c_at_the_end_of_an_epoch_that_rests(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, step: int
) -> None:
    """The next process begins with the towers that wake."""
    file, expected = reference(PHOTOS | CASES["adamw"])
    command = ["train", file, "--out", tmp_path / "run", "--resume"]
    assert launch(*command, kill=("ctrl-c", step)).code == 130
    assert launch(*command, *STREAMED).code == 0
    assert outcome.of(tmp_path / "run").same(expected)


def test_a_kill_while_photos_are_read_ahead(launch: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(PHOTOS | CASES["adamp"])
    command = ["train", file, "--out", tmp_path / "run", "--resume", *STREAMED]
    done = launch(*command, "--set", "train.checkpoint_every=3", kill=("after step", 11))
    assert done.code == -signal.SIGKILL
    assert launch(*command).code == 0
    assert outcome.of(tmp_path / "run").same(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "streamed"), [(5, False), (11, True)], ids=["cached", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_ctrl_c_in_any_step(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, case: str, step: int, streamed: bool
) -> None:
    file, expected = reference(PHOTOS | CASES[case])
    command = ["train", file, "--out", tmp_path / "run", "--resume", *(STREAMED if streamed else [])]
    assert launch(*command, kill=("ctrl-c", step)).code == 130
    assert launch(*command).code == 0
    assert outcome.of(tmp_path / "run").same(expected)


def test_photos_that_changed_are_another_run(launch: Any, recipes: Any, tmp_path: Path) -> None:
    """Same captions and ids, another picture world: its checkpoint is refused."""
    file = recipes.file(PHOTOS | {"method.name": "sigmoid"})
    command = ["train", file, "--out", tmp_path / "run", "--resume"]
    assert launch(*command, kill=("ctrl-c", 5)).code == 130
    for change in ("data.pairs=scenes:images=16,held_out=6,per_image=2,size=48", "data.photo_size=40"):
        done = launch(*command, "--set", change)
        assert (done.code, done.out) == (4, "")
        assert "another configuration or data" in done.err
