"""Files on disk: atomic writes, JSON, safetensors, and a lock for folders that one process at a time may change.

An atomic write goes to a temporary name, is flushed and then renamed, so a reader never sees half a file.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vacsr.errors import DataError, DiskFull, EnvironmentProblem, FolderInUse, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = ("No space left", "StorageFull", "os error 28", "os error 27", "os error 122")  # in safetensors' messages
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space left" into :class:`DiskFull`, whichever library raised it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) in _FULL or any(words in str(error) for words in _FULL_WORDS):
            message = f"no space left while writing {path} — free some space, then run the same command again"
            raise DiskFull(message) from error
        raise


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``target``; on success it becomes ``target``, on failure it is removed."""
    with atomic_paths(target) as (temporary,):
        yield temporary


@contextmanager
def atomic_paths(*targets: Path) -> Iterator[tuple[Path, ...]]:
    """The same for files that belong together: all are on disk before the first is renamed.

    A symbolic link stays, and the file it points to is replaced.
    """
    for target in targets:
        _check_regular(target, name=str(target))
    resolved = [Path(os.path.realpath(target)) if target.is_symlink() else target for target in targets]
    temporaries = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in resolved]
    try:
        for path in resolved:
            make_folder(path.parent)
        with disk_errors(targets[0]):
            yield tuple(temporaries)
            for temporary in temporaries:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
            for temporary, path in zip(temporaries, resolved, strict=True):
                os.replace(temporary, path)
    finally:
        for temporary in temporaries:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _check_regular(path: Path, *, name: str) -> None:
    """Only a regular file, or a name that is free, can be replaced by a rename."""
    if os.path.isdir(path):
        raise UsageError(f"{name} is a folder — name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{name} is not a regular file — name a file, then read it from there")


def check_output(option: str, out: Path, *, inputs: Iterable[Path] = ()) -> None:
    """Before any work: refuse an output that cannot be written, or that the command itself reads.

    An input that is a folder stands for all files in it.
    """
    _check_regular(out, name=f"{option} {out}")
    real = Path(os.path.realpath(out))
    if os.path.isfile(out):
        for path in inputs:
            if os.path.exists(path) and (os.path.samefile(out, path) or path.resolve() in real.parents):
                message = f"{option} {out} would replace what the command reads, {path}"
                raise UsageError(f"{message} — name another file")
    parent = next(parent for parent in real.parents if os.path.exists(parent))
    if not parent.is_dir():
        raise EnvironmentProblem(f"{option} {out}: cannot make the folder {out.parent} — choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{option} {out}: {parent} is not writable — choose another folder")


@contextmanager
def lock_file(
    path: Path, *, wait: str, elsewhere: str, patience: float = 0.0, required: bool = False, remove: bool = False
) -> Iterator[None]:
    """Hold the lock on ``path``; wait up to ``patience`` seconds while another process or thread holds it.

    The operating system releases it when its holder ends, however that happens. ``wait`` and ``elsewhere`` are the
    actions that errors end in: the folder is in use, or cannot be locked. A file system without locks is an error only
    if the lock is ``required``. ``remove`` deletes the file at the end.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=patience, poll_interval=0.02)
    except Timeout as error:
        holder = ""
        with suppress(OSError):  # it ended a moment ago
            holder = path.read_text(encoding="utf-8", errors="replace").strip()
        holder = holder.removesuffix(f" on {socket.gethostname()}") or "pid unknown"
        raise FolderInUse(f"another process ({holder}) is using {path.parent} — {wait}") from error
    except (OSError, NotImplementedError) as error:
        if required or getattr(error, "errno", errno.ENOSYS) not in _NO_LOCKS:
            raise EnvironmentProblem(f"cannot lock {path} ({error}) — {elsewhere}") from error
    try:
        with suppress(OSError):  # on a full disk the lock works without the note
            path.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        if remove:
            path.unlink(missing_ok=True)
        lock.release()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents."""
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"cannot make the folder {folder} ({error.strerror}) — choose another folder"
        raise EnvironmentProblem(message) from error


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically."""
    try:
        with atomic_path(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {target} ({error.strerror}) — choose another folder") from error


def write_json(target: Path, value: Any) -> None:
    """Write JSON atomically, indented, with keys in their order."""
    write_text(target, json_text(value))


def json_text(value: Any) -> str:
    """JSON for strict readers: NaN and infinity become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_tensors(
    target: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically."""
    with atomic_path(target) as temporary:
        save_tensors(temporary, tensors, metadata=metadata)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file in place with the permissions of the umask (safetensors itself makes it private)."""
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
        raise DataError(f"{path} is not a complete safetensors file ({error}) — write or copy it again") from error
