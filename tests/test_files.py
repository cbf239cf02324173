"""Atomic writes, outputs that are refused, locks between processes, and files that are broken or hostile."""

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from vacsr.errors import DataError, DiskFull, EnvironmentProblem, FolderInUse, UsageError
from vacsr.files import (
    atomic_paths,
    check_output,
    disk_errors,
    lock_file,
    read_tensors,
    write_json,
    write_tensors,
    write_text,
)

WRITERS: dict[str, Callable[[Path], None]] = {
    "text": lambda target: write_text(target, "new"),
    "json": lambda target: write_json(target, {"a": 1}),
    "tensors": lambda target: write_tensors(target, {"a": torch.ones(2)}),
}
every_writer = pytest.mark.parametrize("kind", list(WRITERS))


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(target: Path, error: BaseException) -> None:
    with atomic_paths(target) as (temporary,):
        temporary.write_text("half")
        raise error


def test_a_reader_never_sees_half(tmp_path: Path) -> None:
    """Also through a link, which stays while the file it points to is replaced."""
    target, link = tmp_path / "deep" / "er" / "a.txt", tmp_path / "link"
    link.symlink_to(target)
    for path in (target, link):
        write_text(path, "één\n")
        with atomic_paths(path) as (temporary,):
            temporary.write_text("half")
            assert target.read_text(encoding="utf-8") == "één\n"
            assert temporary.parent == target.parent  # a rename is atomic only within a file system
            temporary.write_text("whole")
        assert (link.is_symlink(), target.is_symlink(), target.read_text()) == (True, False, "whole")
    assert names(target.parent) == ["a.txt"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), PermissionError(errno.EACCES, "no")])
def test_a_failing_writer_leaves_what_was_there(error: BaseException, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        with pytest.raises(type(error)):
            half_written(tmp_path / name, error)
    assert (tmp_path / "old").read_text() == "old"
    assert names(tmp_path) == ["old"]


@every_writer
@pytest.mark.parametrize("linked", [False, True])
def test_pipes_and_folders_are_refused_and_left_alone(kind: str, linked: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, reason in (("pipe", "is not a regular file"), ("folder", "is a folder")):
        target = tmp_path / name
        if linked:
            target = tmp_path / f"link-{name}"
            target.symlink_to(name)
        with pytest.raises(UsageError, match=reason):
            WRITERS[kind](target)
        with pytest.raises(UsageError, match=f"--json .*{reason}"):
            check_output("--json", target)
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path / "folder") == []


def test_what_a_command_reads_is_not_its_output(tmp_path: Path) -> None:
    own, model = tmp_path / "own.npy", tmp_path / "model"
    own.write_text("mine")
    (model / "deep").mkdir(parents=True)
    (model / "deep" / "a.json").write_text("mine")
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "other").write_text("old")
    os.link(own, tmp_path / "hard")
    inputs = [tmp_path / "absent", own, model]
    for name in ("own.npy", "link", "hard", "model/deep/a.json", "model/../own.npy"):
        with pytest.raises(UsageError, match=r"--json .* — name another file"):
            check_output("--json", tmp_path / name, inputs=inputs)
    for name in ("other", "new", "model/new.json", "new/deep/a.json", "absent"):
        check_output("--json", tmp_path / name, inputs=inputs)
    assert names(tmp_path) == ["hard", "link", "model", "other", "own.npy"], "nothing is made"


@pytest.mark.parametrize(
    ("own", "command"),
    [
        ("wrong.csv", "audit absent --pairs csv:wrong.csv --out ."),
        ("index.html", "audit absent --pairs csv:index.html --out ."),
        ("a.safetensors", "embed --backbone clip:. --pairs folder:photos --out a.safetensors"),
        ("a-captions.jsonl", "embed --backbone clip:absent --pairs jsonl:a-captions.jsonl --out a.safetensors"),
        ("query.jpg", "search absent --index exact:absent --image query.jpg --json query.jpg"),
        ("i/x", "search absent --index exact:i --text dog --json i/x"),
        ("run/config.yaml", "evaluate run --json run/config.yaml"),
        ("run/model/model.safetensors", "evaluate run --json run/model/model.safetensors"),
        ("f.csv", "evaluate run --json f.csv"),
        ("g.csv", "evaluate run --judgments g.csv --json g.csv"),
    ],
)
def test_commands_do_not_replace_what_they_read(
    own: str, command: str, vacsr: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say so first: nothing else that these name is there."""
    monkeypatch.chdir(tmp_path)
    write_text(Path("run/config.yaml"), "data: {pairs: 'csv:f.csv'}\n")
    if not Path(own).exists():
        write_text(Path(own), "mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert vacsr(*command.split()).refused(2, f"{own} would replace what the command reads")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="not a writable folder"):
        check_output("--json", tmp_path / "file" / "deep" / "a.json")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(EnvironmentProblem, match="not a writable folder"):
        check_output("--json", tmp_path / "new" / "a.json")


# ------------------------------------------------------------------------------------------------------- full disks


@pytest.mark.parametrize("call", ["fsync", "replace"])
@every_writer
def test_a_full_disk_leaves_the_old_file(call: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    target.write_text("old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(DiskFull, match=str(target)):
        WRITERS[kind](target)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a"]


FULL: list[Exception] = [OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
FULL += [SafetensorError(text) for text in ("Error: StorageFull", "I/O error: No space left on device (os error 28)")]
OTHER = [PermissionError(errno.EACCES, "no"), SafetensorError("invalid header")]


@pytest.mark.parametrize("error", [*FULL, *OTHER], ids=str)
def test_every_kind_of_full_and_nothing_else(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(DiskFull if error in FULL else type(error)), disk_errors(tmp_path):
        raise error


def test_a_disk_too_full_for_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(DiskFull):
        write_text(tmp_path / "new" / "a.txt", "x")


# ------------------------------------------------------------------------------------------------------------ locks

ACTIONS: Any = {"wait": "wait for it", "elsewhere": "use another disk"}
HOLD = """
import sys
from pathlib import Path
from vacsr.files import lock_file
with lock_file(Path(sys.argv[1]), wait="", elsewhere="", remove=sys.argv[2] == "True"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path, *, remove: bool) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its stdin ends."""
    command = [sys.executable, "-c", HOLD, str(path), str(remove)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


@pytest.mark.parametrize("remove", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_a_second_process_learns_who_holds_the_lock(remove: bool, killed: bool, tmp_path: Path) -> None:
    """When the holder ends, or is killed, the lock is free."""
    path = tmp_path / "lock"
    with holder(path, remove=remove) as process:
        for _ in range(2):  # a refused attempt must not erase the note
            with (
                pytest.raises(FolderInUse, match=rf"\(pid {process.pid}\) .* — wait for it"),
                lock_file(path, **ACTIONS),
            ):
                pass
        with pytest.raises(FolderInUse), lock_file(path, **ACTIONS, patience=0.1):
            pass
        if killed:
            process.send_signal(signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    assert path.exists() == (killed or not remove)
    with lock_file(path, **ACTIONS, remove=remove):
        assert f"pid {os.getpid()}" in path.read_text()
    assert path.exists() != remove


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a lock is not required it is not needed; a failing disk is an error all the same."""

    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    for required in (True, False) if code == errno.EIO else (True,):
        with pytest.raises(EnvironmentProblem, match=r"cannot lock .* — use another disk"):
            lock_file(tmp_path / "lock", **ACTIONS, required=required).__enter__()
    if code != errno.EIO:
        with lock_file(tmp_path / "lock", **ACTIONS, remove=True):
            pass
        assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------- JSON and tensors


def test_json_writes_nan_as_null_keeps_order_and_the_old_file_where_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"z": math.nan, "a": [1.5, (math.inf, "é")], "m": {"n": math.nan}})
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    items = json.loads(target.read_text(encoding="utf-8"), parse_constant=pytest.fail).items()
    assert list(items) == [("z", None), ("a", [1.5, [None, "é"]]), ("m", {"n": None})]
    assert names(tmp_path) == ["a.json"]


def test_tensors_round_trip_bit_by_bit(tmp_path: Path) -> None:
    """As readable for others as text is."""
    target = tmp_path / "a.safetensors"
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "plain": base, "strided": base.T, "sliced": base[1:, ::2], "low": base.bfloat16(),
        "ids": torch.tensor([-(1 << 60), 3]), "mask": base > 0, "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3), "learnt": torch.nn.Parameter(base * 2),
    }  # fmt: skip
    for metadata in ({"backbone": "tiny:"}, {}):
        write_tensors(target, tensors, metadata=metadata or None)
        read, stored = read_tensors(target)
        assert (stored, set(read)) == (metadata, set(tensors))
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), name
    write_text(tmp_path / "b", "x")
    assert oct(target.stat().st_mode) == oct((tmp_path / "b").stat().st_mode)


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1, -100])
def test_a_broken_or_missing_file_is_named(keep: int, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    write_tensors(target, {"x": torch.ones(100)})
    target.write_bytes(target.read_bytes()[:keep])
    (tmp_path / "garbage").write_bytes(b"\xff" * 400)
    for name in ("a.safetensors", "garbage", "absent", "."):
        with pytest.raises(DataError, match=str(tmp_path / name)):
            read_tensors(tmp_path / name)
