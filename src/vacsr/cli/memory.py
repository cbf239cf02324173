"""Memory that runs out is one message with what to change, not a trace through torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vacsr.errors import EnvironmentProblem


@contextmanager
def memory_told(advice: str) -> Iterator[None]:
    """Inside, a GPU or a processor without room for a tensor is an environment's problem that ends in ``advice``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        found = shortage(error)
        if found is None:
            raise
        raise EnvironmentProblem(f"{found} — {advice}") from error


def shortage(error: Exception) -> str | None:
    """What ran out, by the error that said so; None for any other error.

    >>> shortage(MemoryError()), shortage(RuntimeError("no such operator"))
    ('out of memory', None)
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return str(error).split(". ")[0]
    # On a processor torch has no class of its own for it.
    none_left = isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
    return "out of memory" if none_left else None
