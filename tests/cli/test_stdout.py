"""Data that cannot be printed: one line on stderr and exit code 3, however Python holds its output back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vacsr


def command(*argv: str) -> list[str]:
    return [sys.executable, *argv[:-1], "-m", "vacsr", argv[-1]]


def refused(done: subprocess.CompletedProcess[str], reason: str) -> bool:
    return (done.returncode, done.stderr) == (
        3,
        f"EnvironmentProblem: cannot write everything to stdout: {reason}"
        " — redirect it to a disk with free space, then run it again\n",
    )


def in_shell(line: str, words: list[str]) -> list[str]:
    """A command as a shell would start it; a child that is forked from here may inherit threads of other tests."""
    return ["sh", "-c", line, "sh", *words]


def no_room(words: list[str]) -> list[str]:
    return in_shell('ulimit -f 0; exec "$@"', words)


@pytest.mark.parametrize("held_back", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_no_room_for_stdout(held_back: list[str], tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as file:
        words = no_room(command("-B", *held_back, "--version"))
        done = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, text=True)
    assert refused(done, "File too large"), done


@pytest.mark.parametrize("held_back", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_nobody_reads_stdout(held_back: list[str]) -> None:
    """As in `vacsr … | head`: no complaint."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command(*held_back, "--version"), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, ""), done


def test_stdout_is_closed() -> None:
    """As by `>&-`: the work is done without words."""
    words = in_shell('exec "$@" >&-', command("--version"))
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done


def test_with_a_reader_all_is_as_ever() -> None:
    done = subprocess.run(command("--version"), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"vacsr {vacsr.__version__}\n", "")
