"""One writer of an exact index at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from vacsr.locks import Purpose, file_lock

_WRITING = Purpose(
    doing="written to",
    wait="wait until it is done, then run the same again",
    elsewhere="check the folder's rights, or fill an index elsewhere",
    without="use a local disk of Linux or macOS, or a Milvus server: milvus:URI",
)


def writer_lock(path: Path, *, patience: float) -> AbstractContextManager[None]:
    """Hold the lock of this file, which stays; wait up to ``patience`` seconds for another holder."""
    return file_lock(path, _WRITING, patience=patience)
