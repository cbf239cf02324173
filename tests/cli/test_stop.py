"""Ctrl-C before a command has begun its work, and --resume where nothing was saved."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import vacsr.doctor
from vacsr.cli import app


def test_ctrl_c_is_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(vacsr.doctor, "run_checks", interrupted)
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.stderr) == (130, "stopped\n")


def test_resume_says_where_nothing_was_saved(tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text("data: {pairs: 'synthetic:images=40'}\ntrain: {epochs: 1, batch_size: 20, device: cpu}\n")
    command = ["train", str(recipe), "--out", str(tmp_path / "run"), "--resume"]
    first, again = CliRunner().invoke(app, command), CliRunner().invoke(app, command)
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert "nothing is saved" in first.stderr
    assert "nothing is saved" not in again.stderr
