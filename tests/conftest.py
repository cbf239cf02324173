"""One thread for all tests, and the command line as a fixture."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from vacsr.cli import main

torch.set_num_threads(1)  # operations this small only wait for each other on several threads
_KINDS = ("Error:", "Mismatch:", "Extra:", "Problem:", "Split:")


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> bool:
        """The exit code, one message on stderr that holds the words, and no data."""
        assert self.code == code, self.err
        assert self.out == ""
        assert "Traceback" not in self.err
        assert sum(any(kind in line for kind in _KINDS) for line in self.err.splitlines()) == 1, self.err
        assert all(word in self.err for word in words), self.err
        return True


@pytest.fixture
def vacsr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command line in this process."""
    monkeypatch.setenv("COLUMNS", "400")

    def command(*argv: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["vacsr", *map(str, argv)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        plain = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capsys.readouterr())  # some CI services force colours
        return Answer(int(left.value.code or 0), *plain)

    return command
