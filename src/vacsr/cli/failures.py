"""Failures of the machine as one message with an action: memory that runs out, a full disk behind stdout."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vacsr.errors import EnvironmentProblem

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Turn "out of memory", on a GPU or a CPU, into an :class:`EnvironmentProblem` that ends in ``advice``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            message = str(error).split(". ")[0]
        elif isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
            message = "out of memory"  # torch has no class of its own for it on a CPU
        else:
            raise
        raise EnvironmentProblem(f"{message} — {advice}") from error


@contextmanager
def stdout_errors() -> Iterator[None]:
    """Turn a full disk behind stdout into an :class:`EnvironmentProblem`: half of the data must not look like all."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:  # of another file
            raise
        sys.stdout = io.StringIO()  # Python would flush again when it exits, and complain
        message = f"cannot write everything to stdout: {error.strerror or error}"
        raise EnvironmentProblem(f"{message} — redirect it to a disk with free space, then run it again") from error
