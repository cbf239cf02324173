"""The local index against a dict and a full sort; damaged files, readers beside writers, and what stays on disk."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from vacsr.errors import DataError, DiskFull, EnvironmentProblem, UsageError
from vacsr.search import local, open_index
from vacsr.search.local import ExactIndex

DIM = 4
ONES = torch.ones(1, DIM)
Rows = dict[str, tuple[Tensor, dict[str, Any]]]


def made(folder: Path, **options: Any) -> ExactIndex:
    index = open_index(f"exact:{folder}", dim=options.pop("dim", DIM), create=True, **options)
    assert isinstance(index, ExactIndex)
    return index


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small integers: products are exact in any order, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def names(count: int, start: int = 0) -> list[str]:
    return [f"image {number}" for number in range(start, start + count)]


def files(folder: Path) -> list[str]:
    """Without the lock, and SQLite's log, which exists while somebody has the index open."""
    listed = (path.name for path in folder.iterdir())
    return sorted(name for name in listed if name != "writer.lock" and not name.endswith(("-wal", "-shm")))


def check_search(index: ExactIndex, rows: Rows, queries: Tensor, k: int) -> None:
    """A dict keeps the order of insertion, and Python's sort keeps the order of equals."""
    hits = index.search(queries, k)
    assert hits.scores.shape == (len(queries), min(k, len(rows)))
    for n, query in enumerate(queries):
        expected = sorted(rows, key=lambda name: -float(rows[name][0].double() @ query.double()))[:k]
        assert hits.ids[n] == expected
        assert hits.metadata[n] == [rows[name][1] for name in expected]
        assert hits.scores[n].tolist() == [float(rows[name][0] @ query) for name in expected]
        assert hits.vectors[n].tolist() == [rows[name][0].tolist() for name in expected]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True)),
        st.tuples(st.just("delete"), st.lists(st.integers(0, 30), min_size=1, max_size=12)),
        st.tuples(st.just("reopen"), st.just([])),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, k=st.integers(1, 40), seed=st.integers(0, 1000))
def test_any_history_is_a_dict_in_order_of_insertion(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[int]]], k: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("index") / "i"
    index, rows = made(folder), Rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        for n, (action, numbers) in enumerate(steps):
            ids = [str(number) for number in numbers]
            if action == "add":
                vectors, metadata = whole(len(ids), DIM, seed=seed + n), [{"step": n, "id": name} for name in ids]
                existing = sum(name in rows for name in ids)
                assert index.add(ids, vectors, metadata) == (len(ids) - existing, existing)
                for name, vector, item in zip(ids, vectors, metadata, strict=True):
                    rows.pop(name, None)
                    rows[name] = vector, item
            elif action == "delete":
                assert index.delete(ids) == len({name for name in ids if name in rows})
                rows = {name: row for name, row in rows.items() if name not in ids}
            else:
                index = made(folder)
            assert index.known(["0", "30", "none"]) == ["0" in rows, "30" in rows, False]
            assert list(index.records()) == [(name, item) for name, (_, item) in rows.items()]
            check_search(index, rows, whole(3, DIM, seed=seed - n - 1), k)
            assert index.info().dead <= index.info().vectors / 3, "compacted beyond a quarter"
            longest = max((float(vector.norm()) for vector, _ in rows.values()), default=0.0)
            assert index._snapshot.state.max_norm >= longest, "or the rounding of products is not bounded"
    assert len(files(folder)) == 2, "a pair of files, whatever happened"


def test_more_than_a_quarter_deleted_is_compacted(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.add(names(8), whole(8, DIM))
    index.delete(names(2))
    assert index.info().dead == 2
    index.delete(names(1, 2))
    assert index.info().dead == 0


def test_float16_stores_half_precision(tmp_path: Path) -> None:
    vectors = torch.randn(20, DIM, generator=torch.Generator().manual_seed(0))
    index = made(tmp_path / "i", dtype="float16")
    index.add(names(20), vectors)
    hits = index.search(vectors[:1], 20)
    assert torch.equal(hits.vectors[0, hits.ids[0].index("image 0")], vectors[0].half().float())
    entry = index.get(["image 1"])["image 1"]
    entry.vector.fill_(9)
    assert torch.equal(index.get(["image 1"])["image 1"].vector, vectors[1].half().float()), "entries are copies"
    assert index.info().dtype == "float16"
    with pytest.raises(DataError, match="too large for torch"):
        index.add(["a"], torch.full((1, DIM), 1e6))


def test_lone_surrogates_are_stored(tmp_path: Path) -> None:
    """Names of files may hold them."""
    index, other = made(tmp_path / "i"), made(tmp_path / "i")
    index.add(["\udc80", "nul\0"], whole(2, DIM), [{"caption": "\ud83d"}, {}])
    index.note_source("folder:/b")
    for source in ("folder:/b", "folder:/a\udc80"):
        other.note_source(source)  # by an index that has not seen the first
    index.delete(["nul\0"])  # compacts
    opened = made(tmp_path / "i")
    assert list(opened.records()) == [("\udc80", {"caption": "\ud83d"})]
    assert opened.known(["\udc80", "\udc81"]) == [True, False]
    assert opened.sources == index.sources == ("folder:/b", "folder:/a\udc80")
    opened.note_source("folder:/b")
    assert not index.refresh(), "nothing is written for a source that is known"


def test_a_name_that_no_folder_may_have() -> None:
    with pytest.raises(EnvironmentProblem, match="too long"):
        open_index(f"exact:{'y' * 5000}", dim=2, create=True)


def test_folders_that_cannot_become_an_index(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    for folder in (tmp_path / "photos", tmp_path / "photos" / "cat.jpg"):
        with pytest.raises(UsageError, match=r"cat\.jpg"):
            made(folder)
    assert files(tmp_path / "photos") == ["cat.jpg"]


def filled(folder: Path) -> tuple[Path, Path]:
    """The items and the vectors of an index with one deleted row of five."""
    index = made(folder)
    index.add(names(5), torch.ones(5, DIM), [{"n": n} for n in range(5)])
    index.delete(names(1))
    index.close()
    items, vectors = (folder / name for name in files(folder))
    return items, vectors


def execute(items: Path, statement: str, values: tuple[Any, ...] = ()) -> None:
    with sqlite3.connect(items) as connection:
        connection.execute(statement, values)
    connection.close()


def move_and_link(path: Path) -> None:
    outside = path.parent.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


STATEMENTS = {
    "view": ("ALTER TABLE state RENAME TO s", "CREATE VIEW state AS SELECT * FROM s"),
    "trigger": ("CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items; END",),
    "no state": ("DELETE FROM state",),
    "two states": ("INSERT INTO state SELECT * FROM state",),
}
STATES: dict[str, list[Any]] = {
    "dim": ["four", 0, 2**62, None],
    "rows": [2**31, -1, 2.5],
    "dtype": ["float64", 1],
    "max_norm": [None, float("inf"), -1.0],
    "deleted": [b"\1" * 10**6, "1"],
    "sources": ["{", "[1]", "[" * 10**5, None],
    "generation": [-1, "x"],
    "id": [None],
}
FILES: dict[str, Callable[[Path, Path], object]] = {
    "no vectors": lambda _, vectors: vectors.unlink(),
    "short vectors": lambda _, vectors: os.truncate(vectors, vectors.stat().st_size - 8),
    "linked vectors": lambda _, vectors: move_and_link(vectors),
    "linked items": lambda items, _: move_and_link(items),
    "linked log": lambda items, _: (items.parent / f"{items.name}-wal").symlink_to("/etc/hostname"),
    "fifo": lambda _, vectors: (vectors.unlink(), os.mkfifo(vectors)),
    "not SQLite": lambda items, _: items.write_bytes(b"x" * 9000),
    "half SQLite": lambda items, _: os.truncate(items, 5000),
    "empty": lambda items, _: items.write_bytes(b""),
}


@pytest.mark.parametrize(
    "damage",
    [*FILES, *STATEMENTS, *((name, value) for name, values in STATES.items() for value in values)],
    ids=lambda damage: str(damage)[:30],
)
def test_a_damaged_index_is_a_data_error(tmp_path: Path, damage: Any) -> None:
    items, vectors = filled(tmp_path / "i")
    if damage in FILES:
        FILES[damage](items, vectors)
    elif damage in STATEMENTS:
        for statement in STATEMENTS[damage]:
            execute(items, statement)
    else:
        execute(items, f"UPDATE state SET {damage[0]} = ?", (damage[1],))
    with pytest.raises(DataError, match="again"):
        open_index(f"exact:{tmp_path / 'i'}")


@pytest.mark.parametrize(
    "value", ["{", "[]", '{"a": NaN}', b"\x80", 7, "[" * 10**5, '{"a": ' + "9" * 5000 + "}"], ids=range(7)
)
def test_damaged_metadata_and_ids_are_data_errors(tmp_path: Path, value: Any) -> None:
    items, _ = filled(tmp_path / "i")
    execute(items, "UPDATE items SET metadata = ? WHERE row = 1", (value,))
    execute(items, "UPDATE items SET id = ? WHERE row = 2", (b"\xff",))
    execute(items, "DELETE FROM items WHERE row = 3")
    index = made(tmp_path / "i")
    hits = index.search(ONES, 5)
    reads: list[Callable[[], object]] = [
        lambda: hits.metadata[0][0], lambda: hits.ids[0][1], lambda: hits.ids[0][2], lambda: hits.metadata[0][2],
        lambda: list(index.records()),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(DataError, match="damaged"):
            read()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("row", [0, 3])
def test_vectors_that_are_not_finite_are_a_data_error(tmp_path: Path, bad: float, row: int) -> None:
    """Also in a deleted row, 0."""
    _, vectors = filled(tmp_path / "i")
    stored = np.memmap(vectors, np.float32, "r+").reshape(5, DIM)
    stored[row, 1] = bad
    stored.flush()
    index = made(tmp_path / "i")
    with pytest.raises(DataError, match="damaged"):
        index.search(ONES, 2)
    if row:
        with pytest.raises(DataError, match="damaged"):
            index.get([f"image {row}"])


def test_vectors_that_are_cut_off_while_they_are_mapped_are_a_data_error(tmp_path: Path) -> None:
    _, vectors = filled(tmp_path / "i")
    index = made(tmp_path / "i")
    os.truncate(vectors, 0)
    for read in (lambda: index.search(ONES, 2), lambda: index.get(["image 3"])):
        with pytest.raises(DataError, match="damaged"):
            read()


def test_vectors_without_their_items_are_not_overwritten(tmp_path: Path) -> None:
    items, vectors = filled(tmp_path / "i")
    stored, before = items.read_bytes(), vectors.read_bytes()
    items.unlink()
    with pytest.raises(DataError, match="copy the whole index again"):
        made(tmp_path / "i")
    assert vectors.read_bytes() == before
    items.write_bytes(stored)
    assert made(tmp_path / "i").known(names(2)) == [False, True]


def test_files_of_others_stay(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    (tmp_path / "outside").write_bytes(b"mine")
    others = ["vectors-mine.bin", "items-1.sqlite", ".vectors-notes", "vectors-00000009.bin.bak"]
    for name in others:
        (tmp_path / "i" / name).write_bytes(b"mine")
    (tmp_path / "i" / "vectors-00000009.bin").symlink_to(tmp_path / "outside")
    (tmp_path / "i" / "vectors-00000008.bin").mkdir()
    index.add(["a"], ONES)
    index.delete(["a"])
    left = set(files(tmp_path / "i")) - {"items-00000001.sqlite", "vectors-00000001.bin"}
    assert left == {*others, "vectors-00000009.bin", "vectors-00000008.bin"}
    assert (tmp_path / "outside").read_bytes() == b"mine"


@pytest.mark.parametrize("change", [{}, {"dim": DIM + 1}, {"provenance": "images:two"}])
def test_a_new_index_in_the_same_folder_is_not_taken_for_the_old_one(tmp_path: Path, change: dict[str, Any]) -> None:
    opened = made(tmp_path / "i", provenance="images:one")
    opened.add(["old"], ONES)
    shutil.rmtree(tmp_path / "i")
    new = made(tmp_path / "i", **{"provenance": "images:one", **change})
    new.add(["new"], torch.full((1, new.dim), 2.0))  # the same generation, file names and sizes
    for act in (opened.refresh, lambda: opened.add(["more"], ONES), lambda: opened.delete(["old"])):
        with pytest.raises(DataError, match="another index"):
            act()
    assert opened.search(ONES, 5).ids == [["old"]]
    assert made(tmp_path / "i", dim=new.dim).search(torch.ones(1, new.dim), 5).ids == [["new"]]


def test_what_a_killed_writer_left_goes_at_the_next_change(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.add(["a"], ONES)
    left = [
        ".vectors-00000001.bin.1.tmp", "vectors-00000001.bin", ".items-00000001.sqlite.7.tmp",
        ".items-00000001.sqlite.7.tmp-wal", "items-00000007.sqlite-wal", "items-00000007.sqlite-shm",
    ]  # fmt: skip
    for name in left:
        (tmp_path / "i" / name).write_bytes(b"torn")
    with (tmp_path / "i" / "vectors-00000000.bin").open("ab") as file:
        file.write(b"torn" * 100)
    assert made(tmp_path / "i").search(ONES, 5).ids == [["a"]]
    index.add(["b"], ONES * 2)
    assert not set(left) & {path.name for path in (tmp_path / "i").iterdir()}
    assert (tmp_path / "i" / "vectors-00000000.bin").stat().st_size == 2 * DIM * 4
    assert made(tmp_path / "i").search(ONES, 5).ids == [["b", "a"]]


def test_the_log_of_sqlite_goes_with_the_last_reader(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.add(names(4), whole(4, DIM))
    hits = made(tmp_path / "i").search(ONES, 2)
    index.delete(names(3))  # compacts
    index.close()
    assert files(tmp_path / "i") == ["items-00000001.sqlite", "vectors-00000001.bin"]
    assert len(hits.ids[0]) == 2
    del hits
    assert {path.name for path in (tmp_path / "i").iterdir()} == {*files(tmp_path / "i"), "writer.lock"}


def test_a_reader_keeps_its_generation_until_it_refreshes(tmp_path: Path) -> None:
    writer = made(tmp_path / "i")
    writer.add(names(40), whole(40, DIM), [{"n": n} for n in range(40)])
    reader = made(tmp_path / "i")
    before = reader.search(ONES, 40)
    ids, metadata = list(before.ids[0]), list(before.metadata[0])
    writer.add(names(5), whole(5, DIM, seed=1), [{"n": "new"}] * 5)
    later = reader.search(ONES, 40)
    writer.delete(names(39))  # compacts
    writer.add(["new"], ONES)
    for hits in (before, later, reader.search(ONES, 40)):
        assert (list(hits.ids[0]), list(hits.metadata[0])) == (ids, metadata)
    assert (len(reader), reader.known(["image 3", "new"])) == (40, [True, False])
    assert reader.metadata(["image 3"]) == {"image 3": {"n": 3}}
    assert reader.refresh()
    assert reader.search(ONES, 40).ids == writer.search(ONES, 40).ids
    assert not reader.refresh()
    reader.close()
    assert list(before.ids[0]) == ids, "hits outlive the index"
    with pytest.raises(UsageError, match="open it again"):
        len(reader)


def test_two_writers_take_turns_and_lose_nothing(tmp_path: Path) -> None:
    indexes = [made(tmp_path / "i"), made(tmp_path / "i")]

    def work(number: int) -> None:
        for step in range(12):
            indexes[number].add([f"{number} {step}", "both"], whole(2, DIM, seed=step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(["both", *(f"{number} {step}" for number in range(2) for step in range(12))])
    assert sorted(made(tmp_path / "i").search(ONES, 99).ids[0]) == expected


@pytest.mark.parametrize("where", ["vectors", "items"])
def test_a_full_disk_leaves_the_index_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    index = made(tmp_path / "i")
    index.add(["a"], ONES)
    connection = index._snapshot.database._connection

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if where == "vectors":
            patch.setattr("os.fsync", fail)
        else:
            connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
        with pytest.raises(DiskFull):
            index.add(["c", "b"], torch.ones(2, DIM), [{"text": "x" * 10**5}] * 2)
    connection.execute("PRAGMA max_page_count = 1000000")
    assert index.search(ONES, 5).ids == [["a"]]
    assert made(tmp_path / "i").known(["a", "b", "c"]) == [True, False, False]
    index.add(["c"], ONES)
    assert made(tmp_path / "i").known(["a", "b", "c"]) == [True, False, True]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), EnvironmentProblem("no rights")])
def test_a_failed_compaction_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    index = made(tmp_path / "i")
    index.add(names(10), whole(10, DIM))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(local, "_write_pair", fail)
        with pytest.warns(UserWarning, match="the change is stored"):
            assert index.delete(names(5)) == 5
    assert len(made(tmp_path / "i")) == 5
    assert index.delete(names(1, 5)) == 1
    assert (index.info().dead, index.info().vectors) == (0, 4)


def test_vectors_are_on_the_disk_before_the_items_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    plain_sync, plain_connect = os.fsync, sqlite3.connect

    def sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        events.append(f"sync {name.split('.')[1] if name.startswith('.') else name}")
        plain_sync(descriptor)

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = plain_connect(*args, **options)
        connection.set_trace_callback(lambda sql: events.append("commit") if sql == "COMMIT" else None)
        return connection

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(sqlite3, "connect", connect)
    index = made(tmp_path / "i")
    pair = ["sync vectors-00000000", "commit", "sync i", "sync items-00000000", "sync i", f"sync {tmp_path.name}"]
    assert events == pair
    events.clear()
    index.add(["a"], ONES)
    assert events == ["sync vectors-00000000.bin", "commit"]
    with plain_connect(tmp_path / "i" / "items-00000000.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "i")
    monkeypatch.setattr(os, "access", lambda *_: False)
    index = made(tmp_path / "i")
    assert index.search(ONES, 1).ids == [["image 1"]]
    assert len(list((tmp_path / "i").iterdir())) == 3, "no log was made"
