"""Writing files so that a reader never sees half of one: write to a temporary name, flush, then rename."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vacsr.errors import DataError, DiskFull, EnvironmentProblem

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# How safetensors' own writer reports the same: no space, file too large, over quota.
_FULL_MARKS = ("No space left", "StorageFull", "os error 28", "os error 27", "os error 122")


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
    with atomic_paths(target) as (temporary,):
        yield temporary


@contextmanager
def atomic_paths(*targets: Path) -> Iterator[tuple[Path, ...]]:
    """The same for files that belong together: all are whole on the disk before the first takes its name."""
    temporaries = tuple(target.with_name(f".{target.name}.{os.getpid()}.tmp") for target in targets)
    for target in targets:
        make_folder(target.parent)
    try:
        with disk_errors(targets[0]):
            yield temporaries
            for temporary in temporaries:
                _sync(temporary)
            for temporary, target in zip(temporaries, targets, strict=True):
                os.replace(temporary, target)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; where that cannot be, say so."""
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the folder {folder} ({error.strerror}) — choose another place"
        raise EnvironmentProblem(message) from error


def _sync(path: Path) -> None:
    """Push one file to the disk before it takes its final name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically."""
    try:
        with atomic_path(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {target} ({error.strerror}) — choose another place") from error


def write_json(target: Path, value: Any) -> None:
    """Write JSON atomically, indented, keys in the order given."""
    write_text(target, json_text(value))


def json_text(value: Any) -> str:
    """JSON that strict readers take: NaN and infinity become null.

    >>> json_text({"a": float("nan")})
    '{\\n  "a": null\\n}\\n'
    """
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
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
    with atomic_path(target) as temporary:
        save_tensors(temporary, tensors, metadata=metadata)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file in place, readable by whom the umask lets read (safetensors itself makes it private)."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    save_file(ready, path, metadata=dict(metadata or {}))
    path.chmod(mode)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its metadata. A broken file is a :class:`DataError` that names it."""
    if not path.is_file():
        raise DataError(f"no such file: {path} — check the path")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}) — write or copy it again") from error
