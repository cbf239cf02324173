"""Files on disk: atomic writes, bounded reads, and a lock for folders that one process at a time may change.

An atomic write goes to a temporary name, is flushed and then renamed, so a reader never sees half a file. A read is
refused before it happens if the file is not a regular one, or larger than a stated limit.
"""

import csv
import errno
import json
import os
import socket
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vacsr.errors import DataError, DiskFull, EnvironmentProblem, FolderInUse, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = ("No space left", "StorageFull", "os error 28", "os error 27", "os error 122")  # in safetensors' messages
TABLE_BYTES = 1 << 30  # the largest CSV, JSONL or text file that is read
JSON_BYTES = 1 << 28  # the largest JSON file, which is parsed as a whole
_NPY_HEADER = 10_000  # bytes, NumPy's own limit, which it applies after reading the header
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
def atomic_paths(*targets: Path) -> Iterator[tuple[Path, ...]]:
    """Yield a temporary sibling of each target; on success they become the targets, on failure they are removed.

    Of files that belong together, all are on disk before the first is renamed. A symbolic link stays, and the file it
    points to is replaced.
    """
    for target in targets:
        _check_regular(target, name=str(target))
    resolved = [Path(os.path.realpath(target)) for target in targets]
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
    for path in inputs if os.path.isfile(out) else ():
        if os.path.exists(path) and (os.path.samefile(out, path) or path.resolve() in real.parents):
            raise UsageError(f"{option} {out} would replace what the command reads, {path} — name another file")
    parent = next(parent for parent in real.parents if os.path.exists(parent))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise EnvironmentProblem(f"{option} {out}: {parent} is not a writable folder — choose another one")


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
    try:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make the folder {folder} ({error.strerror}) — choose another one") from error


def write_text(target: Path, text: str) -> None:
    try:
        with atomic_paths(target) as (temporary,):
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
    with atomic_paths(target) as (temporary,):
        save_tensors(temporary, tensors, metadata=metadata)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file in place with the permissions of the umask (safetensors itself makes it private)."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    save_file(ready, path, metadata=dict(metadata or {}))
    path.chmod(mode)


@contextmanager
def reading(path: Path, *, limit: int = TABLE_BYTES, action: str = "write or copy it again") -> Iterator[None]:
    """Read ``path`` inside: refuse it first if it is no regular file of at most ``limit`` bytes.

    What goes wrong while it is read becomes a :class:`DataError` that ends in ``action``.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'} — name a file")
        if status.st_size > limit:
            message = f"{path} has {status.st_size:,} bytes, {limit:,} are the limit"
            raise DataError(f"{message} — check that it is the right file, or split it")
        yield
    except FileNotFoundError as error:
        raise DataError(f"no such file: {path} — check the path") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error}) — {action}") from error


def csv_cell(text: str) -> str:
    """Text of others for a CSV file: never a formula to a spreadsheet, nor the end of a line.

    >>> csv_cell("=1+1"), csv_cell("one\\rtwo"), {csv_cell(start)[0] for start in "=+-@\\t\\r\\n"}
    ("'=1+1", 'one two', {"'"})
    """
    return (f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text).replace("\r", " ")


def read_text(path: Path, *, limit: int = TABLE_BYTES, action: str = "save it as UTF-8 text") -> str:
    with reading(path, limit=limit, action=action):
        return path.read_text(encoding="utf-8-sig")


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    return [line for line in read_text(path).split("\n") if line.strip()]


def read_json(path: Path, *, lists: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON object; these keys hold lists."""
    value = load_json(read_text(path, limit=JSON_BYTES, action="copy it again"), source=path)
    if not isinstance(value, dict) or not all(isinstance(value.get(key), list) for key in lists):
        expected = f"an object with lists {' and '.join(lists)}" if lists else "an object"
        raise DataError(f"{path} does not hold {expected} — give the file as it was published")
    return value


def load_json(text: str, *, source: object) -> Any:
    """Parse JSON and refuse duplicate keys; ``source`` names the file in messages.

    >>> load_json('{"a": 1, "b": 2, "a": 3}', source="a.json")
    Traceback (most recent call last):
    vacsr.errors.DataError: a.json: duplicate key 'a' — keep one of them
    """

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise DataError(f"{source}: duplicate key '{key}' — keep one of them")
        return fields

    try:
        return json.loads(text, object_pairs_hook=as_dict)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and lists as deep
        raise DataError(f"{source} is not JSON ({error}) — write or copy it again") from error


def read_npy(path: Path) -> npt.NDArray[Any]:
    """One array; nothing in the file is executed, and no more is read than the file holds."""
    with reading(path, limit=memory_bytes()):
        return np.array(map_npy(path))


def map_npy(path: Path) -> npt.NDArray[Any]:
    """One array, mapped copy-on-write: a mapping cannot exceed the file, and torch has no read-only memory."""
    with reading(path, limit=1 << 50):
        with path.open("rb") as file:
            start = file.read(12)
        length = int.from_bytes(start[8:10] if start[6:7] == b"\x01" else start[8:12], "little")
        if start[:6] != b"\x93NUMPY" or length > _NPY_HEADER:
            raise DataError(f"{path} is not a .npy file, or has an endless header — save it with numpy.save")
        try:
            return np.load(path, mmap_mode="c", allow_pickle=False)  # type: ignore[no-any-return]
        except Exception as error:  # NumPy meets broken headers with errors of any kind
            raise DataError(f"{path} is not a whole .npy array ({error}) — write or copy it again") from error


def memory_bytes() -> int:
    """What this machine has: arrays in larger files cannot be used."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file: its tensors and its metadata. A broken file is a :class:`DataError` that names it."""
    with reading(path, limit=memory_bytes()):
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        except SafetensorError as error:
            raise DataError(f"{path} is not a complete safetensors file ({error}) — write or copy it again") from error
