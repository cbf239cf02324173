from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from vacsr.errors import DataError, DiskFull, EnvironmentProblem, FolderInUse, UsageError
from vacsr.files import (
    atomic_path,
    check_output,
    disk_errors,
    lock_file,
    read_tensors,
    write_json,
    write_tensors,
    write_text,
)

PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_written(target: Path, error: BaseException) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        raise error


WRITERS: dict[str, Callable[[Path], None]] = {
    "text": lambda target: write_text(target, "new"),
    "json": lambda target: write_json(target, {"a": 1}),
    "tensors": lambda target: write_tensors(target, {"a": torch.ones(2)}),
}


def test_a_written_file_is_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "a.txt"
    write_text(target, "één\n")
    write_text(target, "twee\n")
    assert target.read_text(encoding="utf-8") == "twee\n"
    assert names(target.parent) == ["a.txt"]


def test_a_reader_never_sees_half(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_text(target, "old")
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        assert target.read_text() == "old"
        assert temporary.parent == target.parent  # a rename is atomic only within a file system
        temporary.write_text("whole")
    assert target.read_text() == "whole"


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), PermissionError(errno.EACCES, "no")])
def test_a_failing_writer_leaves_the_old_file(error: BaseException, tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(type(error)):
        half_written(target, error)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_failing_writer_leaves_no_new_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        half_written(tmp_path / "a.txt", RuntimeError())
    assert names(tmp_path) == []


# ---------------------------------------------------------------------------------------------- not a plain file


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_replaced(there: bool, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, second, link = tmp_path / "far" / "a.txt", tmp_path / "second", tmp_path / "link"
    if there:
        target.write_text("old")
    second.symlink_to(Path("far") / "a.txt")
    link.symlink_to(second)
    write_text(link, "new")
    assert (link.is_symlink(), second.is_symlink(), target.is_symlink()) == (True, True, False)
    assert target.read_text() == "new"
    assert (names(tmp_path), names(tmp_path / "far")) == (["far", "link", "second"], ["a.txt"])


def test_the_target_of_a_link_is_replaced_at_once(tmp_path: Path) -> None:
    target, link = tmp_path / "a.txt", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with target.open() as reader:
        write_text(link, "new")
        assert reader.read() == "old", "who reads keeps the old file"
    with pytest.raises(RuntimeError):
        half_written(link, RuntimeError())
    assert (target.read_text(), names(tmp_path)) == ("new", ["a.txt", "link"])


@pytest.mark.parametrize("kind", list(WRITERS))
@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_refused_and_left_alone(kind: str, linked: bool, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    with pytest.raises(UsageError, match="not a regular file"):
        WRITERS[kind](link if linked else pipe)
    with pytest.raises(UsageError, match=r"--json .*not a regular file"):
        check_output("--json", link if linked else pipe)
    assert pipe.is_fifo()
    assert names(tmp_path) == ["link", "pipe"]


@pytest.mark.parametrize("kind", list(WRITERS))
def test_a_folder_is_no_file(kind: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("folder", "link"):
        with pytest.raises(UsageError, match=f"{name} is a folder.* — name a file in it"):
            WRITERS[kind](tmp_path / name)
    assert (names(tmp_path), names(tmp_path / "folder")) == (["folder", "link"], [])


# ----------------------------------------------------------------------------------------- before there is any work


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
        with pytest.raises(UsageError, match=r"--json .* would replace what the command reads.* — name another file"):
            check_output("--json", tmp_path / name, inputs=inputs)
    for name in ("other", "new", "model/new.json", "new/deep/a.json", "absent"):
        check_output("--json", tmp_path / name, inputs=inputs)
    assert names(tmp_path) == ["hard", "link", "model", "other", "own.npy"], "nothing is made"


@pytest.mark.parametrize(
    ("own", "command"),
    [
        ("wrong.csv", ("audit", "absent", "--pairs", "csv:wrong.csv", "--out", ".")),
        ("index.html", ("audit", "absent", "--pairs", "csv:index.html", "--out", ".")),
        ("a.safetensors", ("embed", "--backbone", "clip:.", "--pairs", "folder:photos", "--out", "a.safetensors")),
        ("a-captions.jsonl", ("embed", "--backbone", "clip:absent", "--pairs", "jsonl:a-captions.jsonl",
                              "--out", "a.safetensors")),
        ("query.jpg", ("search", "absent", "--index", "exact:absent", "--image", "query.jpg", "--json", "query.jpg")),
        ("i/x", ("search", "absent", "--index", "exact:i", "--text", "a dog", "--json", "i/x")),
        ("run/config.yaml", ("evaluate", "run", "--json", "run/config.yaml")),
        ("run/model/model.safetensors", ("evaluate", "run", "--json", "run/model/model.safetensors")),
        ("f.csv", ("evaluate", "run", "--json", "f.csv")),
        ("g.csv", ("evaluate", "run", "--judgments", "g.csv", "--json", "g.csv")),
    ],
)  # fmt: skip
def test_commands_do_not_replace_what_they_read(
    own: str, command: tuple[str, ...], vacsr: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say so first: nothing else that these name is there."""
    monkeypatch.chdir(tmp_path)
    write_text(Path("run/config.yaml"), "data: {pairs: 'csv:f.csv'}\n")
    if not Path(own).exists():
        write_text(Path(own), "mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert vacsr(*command).refused(2, f"{own} would replace what the command reads")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_place_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a folder — name a file in it"):
        check_output("--json", tmp_path)
    with pytest.raises(EnvironmentProblem, match="cannot make the folder"):
        check_output("--json", tmp_path / "file" / "deep" / "a.json")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(EnvironmentProblem, match="not writable"):
        check_output("--json", tmp_path / "new" / "a.json")


# ------------------------------------------------------------------------------------------------------- full disk


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("kind", list(WRITERS))
def test_a_full_disk_leaves_the_old_file(call: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a"
    target.write_text("old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(DiskFull) as caught:
        WRITERS[kind](target)
    assert caught.value.exit_code == 3
    assert str(target) in str(caught.value)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_every_kind_of_full(code: int, tmp_path: Path) -> None:
    with pytest.raises(DiskFull), disk_errors(tmp_path):
        raise OSError(code, os.strerror(code))


def test_other_errors_keep_their_kind(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "no")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a device that is always full")
def test_the_real_thing(tmp_path: Path) -> None:
    with pytest.raises(DiskFull), disk_errors(tmp_path / "a"), open("/dev/full", "w") as file:
        file.write("x" * 100_000)


@pytest.mark.parametrize("message", ["Error: StorageFull", "I/O error: No space left on device (os error 28)"])
def test_a_full_disk_as_safetensors_reports_it(message: str, tmp_path: Path) -> None:
    with pytest.raises(DiskFull), disk_errors(tmp_path):
        raise SafetensorError(message)
    with pytest.raises(SafetensorError), disk_errors(tmp_path):
        raise SafetensorError("invalid header")


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
def test_a_second_process_learns_who_holds_the_lock(remove: bool, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, remove=remove) as process:
        for _ in range(2):  # a refused attempt must not erase the note
            with pytest.raises(FolderInUse) as caught, lock_file(path, **ACTIONS):
                pass
            assert str(caught.value) == f"another process (pid {process.pid}) is using {tmp_path} — wait for it"
        assert caught.value.exit_code == 3
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    assert path.exists() != remove
    with lock_file(path, **ACTIONS, remove=remove):
        assert f"pid {os.getpid()}" in path.read_text()
    assert path.exists() != remove


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with holder(path, remove=True) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    with lock_file(path, **ACTIONS, remove=True):
        pass
    assert not path.exists()


def test_a_holder_on_another_machine_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("pid 77 on elsewhere\n")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FolderInUse, match=r"\(pid 77 on elsewhere\)"), lock_file(path, **ACTIONS):
            pass


def test_threads_take_turns(tmp_path: Path) -> None:
    inside, most, turns = [0], [0], [0]

    def work() -> None:
        for _ in range(20):
            with lock_file(tmp_path / "lock", **ACTIONS, patience=60.0):
                inside[0] += 1
                most[0], turns[0] = max(most[0], inside[0]), turns[0] + 1
                (tmp_path / "seen").write_text("x")  # lets the others run
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most[0], turns[0]) == (1, 80)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(EnvironmentProblem, match=r"cannot lock .* — use another disk"):
        lock_file(tmp_path / "lock", **ACTIONS, required=True).__enter__()
    with lock_file(tmp_path / "lock", **ACTIONS, remove=True):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("required", [True, False])
def test_a_failing_disk_is_an_error(required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(EnvironmentProblem, match=r"broken.* — use another disk"):
        lock_file(tmp_path / "lock", **ACTIONS, required=required).__enter__()


# ------------------------------------------------------------------------------------------------------------ JSON

plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=10,
)


@PROPERTY
@given(value=plain.filter(lambda x: "\\ud" not in ascii(x)))
def test_json_round_trip(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("json") / "a.json"
    write_json(target, value)
    text = target.read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert text.endswith("\n")


def test_json_writes_nan_as_null_and_keeps_order(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"z": math.nan, "a": [1.5, (math.nan, "é")], "m": {"n": math.nan}})
    assert "NaN" not in target.read_text(encoding="utf-8")
    assert list(json.loads(target.read_text(encoding="utf-8")).items()) == [
        ("z", None),
        ("a", [1.5, [None, "é"]]),
        ("m", {"n": None}),
    ]


def test_json_that_cannot_be_written_leaves_the_old(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, 1)
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert json.loads(target.read_text()) == 1
    assert names(tmp_path) == ["a.json"]


# --------------------------------------------------------------------------------------------------------- tensors


def test_tensors_round_trip_bit_by_bit(tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    tensors = {
        "plain": base,
        "strided": base.T,
        "sliced": base[1:, ::2],
        "low": base.bfloat16(),
        "ids": torch.tensor([-(1 << 60), 3]),
        "mask": base > 0,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "learnt": torch.nn.Parameter(base * 2),
    }
    write_tensors(target, tensors, metadata={"backbone": "tiny:"})
    got, metadata = read_tensors(target)
    assert metadata == {"backbone": "tiny:"}
    assert set(got) == set(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert names(tmp_path) == ["a.safetensors"]


def test_tensors_are_as_readable_as_text(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.ones(1)})
    write_text(tmp_path / "b", "x")
    assert oct((tmp_path / "a").stat().st_mode) == oct((tmp_path / "b").stat().st_mode)


def test_no_metadata_reads_as_none_given(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.ones(1)})
    assert read_tensors(tmp_path / "a")[1] == {}


@pytest.mark.parametrize("keep", [0, 4, 8, 20, -1, -100])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    write_tensors(target, {"x": torch.ones(100)})
    target.write_bytes(target.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"a\.safetensors") as caught:
        read_tensors(target)
    assert caught.value.exit_code == 4


def test_garbage_and_absence(tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(b"\xff" * 400)
    for name in ("garbage", "absent", "."):
        with pytest.raises(DataError):
            read_tensors(tmp_path / name)
