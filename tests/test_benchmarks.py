"""`make bench` on a bare machine: scripts that need runs or a GPU say so and stand in nobody's way."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("abstain", 0, "nothing to do without them"),
        ("audit", 0, "nothing to do without them"),
        ("averaged_runs", 0, "nothing to do without them"),
        ("readings", 0, "nothing to do without them"),
        ("fused_latents", 3, "no CUDA GPU"),
        ("gpo", 3, "CUDA GPU"),
        ("image_step", 3, "CUDA GPU"),
        ("score_tiles", 3, "CUDA GPU"),
    ],
)
def test_a_script_without_what_it_needs(
    name: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found: object = 0
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    except SystemExit as error:
        found = error.code
    told = capsys.readouterr()
    assert (found, said in told.out + told.err) == (code, True)
