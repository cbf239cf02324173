"""Data that cannot be printed: one line on stderr and exit code 3, however Python holds its output back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vacsr

HELD_BACK = pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])


def version(*flags: str, shell: str = "", **options: Any) -> tuple[int, str, str]:
    """`vacsr --version` in a process, started by a line of shell where one is given."""
    command = [sys.executable, *flags, "-m", "vacsr", "--version"]
    done = subprocess.run(["sh", "-c", shell, "sh", *command] if shell else command, text=True, **options)
    return done.returncode, done.stdout, done.stderr


@HELD_BACK
def test_no_room_for_stdout(flags: list[str], tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as file:
        code, _, error = version("-B", *flags, shell='ulimit -f 0; exec "$@"', stdout=file, stderr=subprocess.PIPE)
    assert (code, error.count("\n")) == (3, 1)
    assert error.startswith("EnvironmentProblem: cannot write everything to stdout: File too large — redirect it")


@HELD_BACK
def test_nobody_reads_stdout(flags: list[str]) -> None:
    """As in `vacsr … | head`: no complaint."""
    reader, writer = os.pipe()
    os.close(reader)
    assert version(*flags, stdout=writer, stderr=subprocess.PIPE) == (1, None, "")
    os.close(writer)


def test_stdout_is_closed_or_read() -> None:
    assert version(shell='exec "$@" >&-', capture_output=True) == (0, "", "")
    assert version(capture_output=True) == (0, f"vacsr {vacsr.__version__}\n", "")
