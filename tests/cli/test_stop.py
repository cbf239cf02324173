"""Ctrl-C before a command has begun its work."""

from __future__ import annotations

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
