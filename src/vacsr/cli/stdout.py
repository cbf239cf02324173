"""What cannot be printed is an error with an exit code: stdout is data, and half of it should not look like all."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vacsr.errors import EnvironmentProblem

_LOST = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Within, a full disk behind stdout becomes an :class:`EnvironmentProblem`.

    A reader that has seen enough, as in `vacsr … | head`, is told nothing: the command ends with 1, as typer has it.
    """
    out = sys.stdout
    if out is None:  # closed, as by >&-: who wants no words gets none
        sys.stdout = io.StringIO()
        yield
        return
    try:
        try:
            yield
        finally:
            out.flush()  # what is still held back is written here, or fails here for the second time
    except BrokenPipeError:
        _forget_stdout()
        raise SystemExit(1) from None
    except OSError as error:
        if error.filename is not None or error.errno not in _LOST:  # of another file
            raise
        raise _problem(error.strerror or str(error)) from error


def _forget_stdout() -> None:
    """Python would try again when it leaves, and complain."""
    sys.stdout = io.StringIO()


def _problem(reason: str) -> EnvironmentProblem:
    _forget_stdout()
    return EnvironmentProblem(f"cannot write all to stdout: {reason} — send it where there is room, then run it again")
