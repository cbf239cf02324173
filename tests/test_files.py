from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from vacsr.errors import DataError, DiskFull
from vacsr.files import atomic_path, disk_errors, read_tensors, write_json, write_tensors, write_text

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
