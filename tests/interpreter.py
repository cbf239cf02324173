"""Triton's interpreter for tests: without a GPU it runs the kernels, slowly.

It must be switched on before Triton is imported, so the tests that want it run in a process of their own: they are
named `test_interpreted_…`, and another test of their file calls :func:`run_interpreted`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by a test ..._in_the_interpreter")
GPU = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA GPU")


def run_interpreted(file: str, *, marks: str = "not slow and not gpu") -> None:
    """Run the interpreted tests of a file that have these marks; their failure is ours."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    if INTERPRETED:
        pytest.skip("the interpreter is on already")
    command = [sys.executable, "-m", "pytest", file, "-k", "interpreted", "-m", marks, "-p", "no:cacheprovider"]
    command += ["-n", "0"]  # one process: this one runs beside others
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
