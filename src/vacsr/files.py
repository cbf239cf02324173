"""Writing files so that a reader never sees half of one: write to a temporary name, flush, then rename.

What cannot be renamed over, a pipe or a terminal, is sent the whole content at the end.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vacsr.errors import DataError, DiskFull, EnvironmentProblem, UsageError

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
    """The same for files that belong together: all are whole on the disk before the first takes its name.

    A link stays, and what it points to is replaced.
    """
    with ExitStack() as stack:
        places = [_place(target, stack) for target in targets]
        with disk_errors(targets[0]):
            yield tuple(place.temporary for place in places)
            for place in places:
                _sync(place.temporary)
            for place in places:
                if place.streams:
                    _send(place.temporary, place.target)
                else:
                    os.replace(place.temporary, place.target)


class _Place(NamedTuple):
    """Where a file goes, links followed, and where it is written first."""

    target: Path
    temporary: Path
    streams: bool


def _place(target: Path, stack: ExitStack) -> _Place:
    """``stack`` removes what is left of the temporary file."""
    if os.path.isdir(target):
        raise UsageError(f"{target} is a folder, expected a file's name — name a file in it")
    if _streams(target):  # nothing can be made beside it
        folder = stack.enter_context(TemporaryDirectory(prefix="vacsr-"))
        return _Place(target, Path(folder) / "content", streams=True)
    target = _followed(target)
    make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    stack.callback(temporary.unlink, missing_ok=True)
    return _Place(target, temporary, streams=False)


def _followed(path: Path) -> Path:
    """The file that a link points to, there or not yet."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _streams(path: Path) -> bool:
    """Neither a plain file nor one to be made: a pipe, a device, or the file that stdout or stderr goes to."""
    return os.path.exists(path) and (not os.path.isfile(path) or _own_stream(path) is not None)


def _own_stream(path: Path) -> int | None:
    """The number of this process's stdout or stderr, if the path is another name of it."""
    there = path.stat()
    for number in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(there, os.fstat(number)):
                return number
    return None


def _send(content: Path, target: Path) -> None:
    """Write it straight. Of our own streams the descriptor is used, since it knows how far the file has come."""
    own = _own_stream(target)
    if own is not None:
        (sys.stdout if own == 1 else sys.stderr).flush()
    with content.open("rb") as source, open(target if own is None else os.dup(own), "wb") as sink:
        shutil.copyfileobj(source, sink)


def check_output(option: str, out: Path, *, inputs: Iterable[Path] = ()) -> None:
    """Before any work: refuse a file that cannot be written where it is asked for, or that the command itself reads.

    An input that is a folder stands for all files in it.
    """
    if os.path.isdir(out):  # unlike pathlib's it says no where nobody may look
        raise UsageError(f"{option} {out} is a folder — name a file in it")
    if _streams(out):
        return
    real = Path(os.path.realpath(out))
    if os.path.isfile(out):
        for path in inputs:
            if os.path.exists(path) and (os.path.samefile(out, path) or path.resolve() in real.parents):
                message = f"{option} {out} would replace what the command reads, {path}"
                raise UsageError(f"{message} — name another file")
    place = next(parent for parent in real.parents if os.path.exists(parent))
    if not place.is_dir():
        raise EnvironmentProblem(f"{option} {out}: cannot make the folder {out.parent} — choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{option} {out}: nothing can be written into {place} — choose another place")


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
