"""Writing files so that a reader never sees half of one: write to a temporary name, flush, then rename."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vacsr.errors import DataError, DiskFull

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_MARKS = ("No space left", "StorageFull", "os error 28")  # how safetensors' own writer reports the same


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" into :class:`DiskFull`, whichever library met it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) in _FULL or any(mark in str(error) for mark in _FULL_MARKS):
            message = f"no space left while writing {path} — free some space, then run the same command again"
            raise DiskFull(message) from error
        raise


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``target``; on success it becomes ``target``, on failure it is removed.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_path(folder / "a.txt") as temporary:
    ...     _ = temporary.write_text("whole")
    >>> (folder / "a.txt").read_text()
    'whole'
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(target):
            yield temporary
            _sync(temporary)
            os.replace(temporary, target)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Push one file to the disk before it takes its final name."""
    if path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write JSON atomically, indented, keys in the order given. NaN is written as null: strict readers choke on it."""
    write_text(target, json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def write_tensors(
    target: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(target) as temporary:
        save_file(ready, temporary, metadata=dict(metadata or {}))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its metadata. A broken file is a :class:`DataError` that names it."""
    if not path.is_file():
        raise DataError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}) — write or copy it again") from error
