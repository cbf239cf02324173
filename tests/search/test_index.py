"""The exact index against a plain dict and a full sort: contents, order, refusals, and what a change leaves on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from vacsr.errors import (
    DataError,
    DiskFull,
    EnvironmentProblem,
    ProvenanceMismatch,
    ShapeMismatch,
    UsageError,
)
from vacsr.files import read_tensors, write_tensors
from vacsr.search import Hits, VectorIndex, compaction, exact, manifest, open_index, segments, snapshot
from vacsr.search.exact import ExactIndex
from vacsr.search.manifest import Part

DIM = 4


def made(folder: Path, **options: Any) -> ExactIndex:
    index = open_index(f"exact:{folder}", dim=options.pop("dim", DIM), create=True, **options)
    assert isinstance(index, ExactIndex)
    return index


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: products are exact in any order, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def names(count: int, start: int = 0) -> list[str]:
    return [f"image {number}" for number in range(start, start + count)]


def by_sorting(rows: dict[str, tuple[Tensor, dict[str, Any]]], query: Tensor, k: int) -> list[str]:
    """A dict keeps the order of insertion, and Python's sort keeps the order of equals."""
    return sorted(rows, key=lambda name: -float(rows[name][0].double() @ query.double()))[:k]


def check(index: ExactIndex, rows: dict[str, tuple[Tensor, dict[str, Any]]], queries: Tensor, k: int) -> None:
    assert len(index) == len(rows)
    found = index.search(queries, k)
    count = min(k, len(rows))
    assert found.scores.shape == (len(queries), count)
    assert found.vectors.shape == (len(queries), count, index.dim)
    for row, query in enumerate(queries):
        assert found.ids[row] == by_sorting(rows, query, k)
        assert found.metadata[row] == [rows[name][1] for name in found.ids[row]]
        for n, name in enumerate(found.ids[row]):
            assert torch.equal(found.vectors[row, n], rows[name][0])
            assert float(found.scores[row, n]) == float(rows[name][0] @ query)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True)),
        st.tuples(st.just("delete"), st.lists(st.integers(0, 30), min_size=1, max_size=12)),
        st.tuples(st.just("compact"), st.just([])),
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
    index, rows = made(folder), dict[str, tuple[Tensor, dict[str, Any]]]()
    for n, (what, numbers) in enumerate(steps):
        ids = [str(number) for number in numbers]
        if what == "add":
            vectors, metadata = whole(len(ids), DIM, seed=seed + n), [{"step": n, "id": name} for name in ids]
            there = sum(name in rows for name in ids)
            assert index.add(ids, vectors, metadata) == (len(ids) - there, there)
            for name, vector, fact in zip(ids, vectors, metadata, strict=True):
                rows.pop(name, None)
                rows[name] = vector, fact
        elif what == "delete":
            assert index.delete(ids) == len({name for name in ids if name in rows})
            rows = {name: row for name, row in rows.items() if name not in ids}
        elif what == "compact":
            index.compact()
            assert index.info().dead == 0
        else:
            index = made(folder)
        assert index.known(["0", "30", "none"]) == ["0" in rows, "30" in rows, False]
        check(index, rows, whole(3, DIM, seed=seed - n - 1), k)
    listed = {part.name for part in index._snapshot.manifest.parts} | {
        part.dead for part in index._snapshot.manifest.parts
    }
    assert {path.name for path in folder.iterdir()} - {"manifest.json", "writer.lock"} == listed - {""}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_many_rows_over_many_blocks_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(compaction, "SEGMENT_BYTES", 900 * DIM * 4)
    monkeypatch.setattr("vacsr.search.blocked._SCORES", 700)
    monkeypatch.setattr("vacsr.search.products._CONVERT", 100)
    monkeypatch.setattr("vacsr.search.blocked._QUERIES", 3)
    index = made(tmp_path / "i", dtype=dtype)
    vectors = whole(5000, DIM)
    assert index.add(names(5000), vectors) == (5000, 0)
    assert index.info().parts >= 3
    dead = names(300, 1000) + names(2, 4990)
    index.delete(dead)
    rows = {name: (vector, {}) for name, vector in zip(names(5000), vectors, strict=True) if name not in set(dead)}
    check(index, rows, whole(8, DIM, seed=1), 120)


def test_real_numbers_agree_with_a_full_product(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    vectors = torch.nn.functional.normalize(torch.randn(3000, 64, generator=generator), dim=1)
    queries = torch.randn(5, 64, generator=generator)
    index = made(tmp_path / "i", dim=64)
    for start in range(0, 3000, 250):
        index.add(names(250, start), vectors[start : start + 250])
    found = index.search(queries, 50)
    exact_scores = queries.double() @ vectors.double().T
    order = exact_scores.argsort(dim=1, descending=True)[:, :50]
    assert found.ids == [[f"image {number}" for number in row] for row in order.tolist()]
    assert torch.equal(found.scores, exact_scores.gather(1, order).float())


def test_equal_vectors_have_equal_scores_wherever_they_lie(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    one = torch.randn(1, 51, generator=generator)
    index = made(tmp_path / "i", dim=51)
    for number, size in enumerate((1, 7, 130, 3)):
        index.add([f"{number} {n}" for n in range(size)], one.expand(size, -1))
    found = index.search(torch.randn(2, 51, generator=generator), 20)
    assert all(len(set(row.tolist())) == 1 for row in found.scores)
    assert found.ids[0][:9] == ["0 0", *(f"1 {n}" for n in range(7)), "2 0"]


def test_float16_keeps_what_half_precision_can(tmp_path: Path) -> None:
    vectors = torch.randn(20, DIM, generator=torch.Generator().manual_seed(0))
    index = made(tmp_path / "i", dtype="float16")
    index.add(names(20), vectors)
    found = index.search(vectors[:1], 20)
    assert torch.equal(found.vectors[0, found.ids[0].index("image 0")], vectors[0].half().float())
    assert found.vectors.dtype == found.scores.dtype == torch.float32
    assert index.info().dtype == "float16"


def test_an_empty_index_and_no_queries(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    assert isinstance(index, VectorIndex)
    found = index.search(torch.ones(2, DIM), 5)
    assert found.ids == [[], []]
    assert found.scores.shape == (2, 0)
    assert found.vectors.shape == (2, 0, DIM)
    assert index.add([], torch.empty(0, DIM)) == (0, 0)
    assert index.delete(["a"]) == 0
    index.add(["a"], torch.ones(1, DIM))
    nothing = index.search(torch.empty(0, DIM), 5)
    assert nothing.ids == []
    assert nothing.scores.shape == (0, 1)
    assert index.delete(["a", "a"]) == 1
    assert len(index) == 0
    assert index.search(torch.ones(1, DIM), 5) == ([[]], *nothing_like(), [[]])


def nothing_like() -> tuple[Any, Any]:
    class Empty:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Tensor) and other.numel() == 0

    return Empty(), Empty()


ODD = ["a/b.jpg", "ü 🐈", "line\nbreak", "\udc80", " ", "x" * 5000, '"],["']


def test_odd_ids_and_metadata_come_back(tmp_path: Path) -> None:
    facts: list[dict[str, Any]] = [{"caption": name, "n": [1, 2.5, None, True, {"deep": name}]} for name in ODD]
    index = made(tmp_path / "i")
    index.add(ODD, whole(len(ODD), DIM), facts)
    found = made(tmp_path / "i").search(torch.ones(1, DIM), 100)
    assert dict(zip(found.ids[0], found.metadata[0], strict=True)) == dict(zip(ODD, facts, strict=True))
    assert index.known([*ODD, "\udc81"]) == [True] * len(ODD) + [False]


def test_ids_with_the_same_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exact, snapshot):
        monkeypatch.setattr(module, "keys_of", lambda ids: segments.keys_of(["same"] * len(list(ids))))
    index = made(tmp_path / "i")
    index.add(["a", "b", "c"], whole(3, DIM))
    assert index.known(["a", "b", "d"]) == [True, True, False]
    assert index.add(["b", "d"], whole(2, DIM)) == (1, 1)
    assert index.delete(["c", "e"]) == 1
    assert sorted(index.search(torch.ones(1, DIM), 9).ids[0]) == ["a", "b", "d"]


def test_entries_by_id_and_everything_in_order(tmp_path: Path) -> None:
    index, vectors = made(tmp_path / "i", dtype="float16"), whole(5, DIM)
    index.add(["a", "b", "c"], vectors[:3], [{"n": 1}, {"n": 2}, {"n": 3}])
    index.add(["d", "b"], vectors[3:], [{"n": 4}, {"n": 5}])
    index.delete(["a"])
    found = index.get(["b", "a", "d", "none", "b"])
    assert {name: entry.metadata for name, entry in found.items()} == {"b": {"n": 5}, "d": {"n": 4}}
    assert torch.equal(found["b"].vector, vectors[4])
    assert found["b"].vector.dtype == torch.float32
    found["d"].vector.fill_(9)
    assert torch.equal(index.get(["d"])["d"].vector, vectors[3])
    assert list(index.records()) == [("c", {"n": 3}), ("d", {"n": 4}), ("b", {"n": 5})]


@pytest.mark.parametrize(
    ("provenance", "kind"), [("images:0a", "images"), ("texts:0a", "texts"), ("x:1", ""), ("", "")]
)
def test_what_it_holds(tmp_path: Path, provenance: str, kind: str) -> None:
    index = made(tmp_path / "i", provenance=provenance)
    assert (index.holds, index.exact) == (index.info().holds, index.info().exact) == (kind, True)


def test_sources_are_kept_in_the_order_of_their_first_use(tmp_path: Path) -> None:
    index, other = made(tmp_path / "i"), made(tmp_path / "i")
    index.add(["a"], torch.ones(1, DIM))
    index.note_source("folder:/b")
    other.note_source("folder:/a")  # who has not seen the first
    other.note_source("folder:/b")
    index.add(["b"], torch.ones(1, DIM))
    index.delete(["a"])
    index.compact()
    found = made(tmp_path / "i")
    assert found.sources == index.sources == found.info().sources == ("folder:/b", "folder:/a")
    generation = found._snapshot.manifest.generation
    found.note_source("folder:/a")
    assert made(tmp_path / "i")._snapshot.manifest.generation == generation


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("ids", "vectors", "metadata", "kind", "words"),
    [
        (["a", "b", "a"], torch.ones(3, DIM), None, DataError, "'a' comes twice"),
        (["a", ""], torch.ones(2, DIM), None, DataError, "id 1 is ''"),
        ("ab", torch.ones(2, DIM), None, UsageError, "one str"),
        (["a", "b"], torch.tensor([[1.0] * DIM, [float("nan")] * DIM]), None, DataError, "'b' holds NaN"),
        (["a"], torch.full((1, DIM), float("inf")), None, DataError, "'a' holds NaN or infinity"),
        (["a"], torch.full((1, DIM), 1e30), None, DataError, "'a' holds values too large"),
        (["a"], torch.ones(1, DIM + 1), None, ShapeMismatch, "dimension 4"),
        (["a"], torch.ones(DIM), None, ShapeMismatch, "dimension 4"),
        (["a"], torch.ones(2, DIM), None, ShapeMismatch, "2 vectors and 1 ids"),
        (["a"], torch.ones(1, DIM, dtype=torch.int64), None, DataError, "expected floating point"),
        (["a"], torch.ones(1, DIM), [], ShapeMismatch, "0 metadata"),
        (["a"], torch.ones(1, DIM), [{"x": float("nan")}], DataError, "'a' are not JSON"),
        (["a"], torch.ones(1, DIM), [{"x": object()}], DataError, "'a' are not JSON"),
        (["a"], torch.ones(1, DIM), [7], DataError, "expected a dict"),
    ],
)
def test_what_cannot_be_added_changes_nothing(
    tmp_path: Path, ids: Any, vectors: Tensor, metadata: Any, kind: type[Exception], words: str
) -> None:
    index = made(tmp_path / "i")
    index.add(["old"], torch.ones(1, DIM))
    before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "i").glob("*s*"))
    with pytest.raises(kind, match=words):
        index.add(ids, vectors, metadata)
    assert sorted((path.name, path.read_bytes()) for path in (tmp_path / "i").glob("*s*")) == before


def test_half_precision_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too large for torch"):
        made(tmp_path / "i", dtype="float16").add(["a"], torch.full((1, DIM), 1e6))


@pytest.mark.parametrize(
    ("queries", "k", "kind"),
    [
        (torch.ones(1, DIM), 0, UsageError),
        (torch.ones(1, DIM), 100_000, UsageError),
        (torch.ones(1, 3), 1, ShapeMismatch),
        (torch.ones(DIM), 1, ShapeMismatch),
        (torch.full((1, DIM), float("nan")), 1, DataError),
    ],
)
def test_what_cannot_be_asked(tmp_path: Path, queries: Tensor, k: int, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        made(tmp_path / "i").search(queries, k)


def test_other_models_and_dimensions_are_refused(tmp_path: Path) -> None:
    made(tmp_path / "i", provenance="images:one")
    spec = f"exact:{tmp_path / 'i'}"
    assert open_index(spec).provenance == "images:one"
    assert open_index(spec, provenance="images:one", dim=DIM).dim == DIM
    for create in (True, False):
        with pytest.raises(ProvenanceMismatch, match="images:two"):
            open_index(spec, provenance="images:two", dim=DIM, create=create)
        with pytest.raises(ShapeMismatch, match="dimension 4, 5"):
            open_index(spec, provenance="images:one", dim=5, create=create)
    with pytest.raises(ProvenanceMismatch, match="holds images, these are texts — fill another"):
        open_index(spec, provenance="texts:one")
    with pytest.raises(UsageError, match="keeps vectors as float32"):
        open_index(spec, dim=DIM, create=True, dtype="float16")


@pytest.mark.parametrize("spec", ["photos", "faiss:photos", "exact:", ":x", "milvus:"])
def test_names_that_are_none(spec: str) -> None:
    with pytest.raises(UsageError, match="write exact:FOLDER"):
        open_index(spec)


def test_places_that_are_no_index(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(f"exact:{tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="dim=512"):
        open_index(f"exact:{tmp_path / 'none'}", create=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"cat\.jpg"):
        made(tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    with pytest.raises(UsageError, match="is a file"):
        made(tmp_path / "photos" / "cat.jpg")


@pytest.mark.parametrize("damage", ["gone", "short", "other", "manifest", "schema", "list"])
def test_a_damaged_index_is_named(tmp_path: Path, damage: str) -> None:
    made(tmp_path / "i").add(["a", "b"], torch.ones(2, DIM))
    (file,) = (tmp_path / "i").glob("vectors-*")
    said = tmp_path / "i" / "manifest.json"
    raw = json.loads(said.read_text(encoding="utf-8"))
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        os.truncate(file, file.stat().st_size - 8)
    elif damage == "other":
        made(tmp_path / "j").add(["a"], torch.ones(1, DIM))
        next((tmp_path / "j").glob("vectors-*")).rename(file)
    else:
        broken = {"manifest": "{", "schema": json.dumps({**raw, "schema": 9}), "list": "[]"}
        said.write_text(broken[damage], encoding="utf-8")
    with pytest.raises(DataError, match="anew"):
        open_index(f"exact:{tmp_path / 'i'}")


@pytest.mark.parametrize(
    ("which", "change"),
    [
        ("vectors", {"keys": None}),
        ("vectors", {"more": torch.ones(1)}),
        ("vectors", {"vectors": torch.ones(4, DIM).double()}),
        ("vectors", {"offsets": torch.arange(4)}),
        ("vectors", {"offsets": torch.arange(5)}),
        ("vectors", {"keys": torch.ones(4)}),
        ("vectors", {"key_rows": torch.ones(3, dtype=torch.int64)}),
        ("dead", {"dead": None}),
        ("dead", {"dead": torch.ones(3, dtype=torch.bool)}),
        ("dead", {"dead": torch.ones(4)}),
    ],
)
def test_malformed_tensors_are_named(tmp_path: Path, which: str, change: dict[str, Tensor | None]) -> None:
    index = made(tmp_path / "i")
    index.add(names(4), torch.ones(4, DIM))
    index.delete(names(1))
    (file,) = (tmp_path / "i").glob(f"{which}-*")
    tensors = {**read_tensors(file)[0], **change}
    write_tensors(file, {name: tensor for name, tensor in tensors.items() if tensor is not None})
    said = tmp_path / "i" / "manifest.json"
    raw = json.loads(said.read_text(encoding="utf-8"))
    if which == "vectors":
        raw["parts"][0]["bytes"] = file.stat().st_size
        said.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(DataError, match=f"{file.name} is damaged"):
        open_index(f"exact:{tmp_path / 'i'}")


def test_a_row_whose_text_is_damaged_is_named(tmp_path: Path) -> None:
    made(tmp_path / "i").add(["a"], torch.ones(1, DIM))
    (file,) = (tmp_path / "i").glob("vectors-*")
    tensors = {name: tensor.clone() for name, tensor in read_tensors(file)[0].items()}
    tensors["text"].fill_(0x80)
    write_tensors(file, tensors)
    found = made(tmp_path / "i").search(torch.ones(1, DIM), 1)
    for column in (found.ids, found.metadata):
        with pytest.raises(DataError, match="row 0"):
            column[0][0]


def test_vectors_that_lost_their_manifest_are_not_swept(tmp_path: Path) -> None:
    made(tmp_path / "i").add(["a"], torch.ones(1, DIM))
    said = tmp_path / "i" / "manifest.json"
    kept = said.read_bytes()
    said.unlink()
    with pytest.raises(DataError, match=r"no manifest\.json — copy manifest\.json back"):
        made(tmp_path / "i")
    assert not said.exists()
    said.write_bytes(kept)
    assert made(tmp_path / "i").known(["a"]) == [True]
    said.unlink()
    for file in (tmp_path / "i").glob("vectors-*"):
        file.unlink()
    (tmp_path / "i" / ".manifest.json.7.tmp").write_bytes(b"torn")  # of one who was killed while making it
    assert len(made(tmp_path / "i")) == 0


def test_what_others_put_beside_the_index_stays(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    (tmp_path / "i" / "vectors-old").mkdir()
    (tmp_path / "i" / "dead-00000009-3.safetensors").mkdir()
    (tmp_path / "i" / "vectors-00000009-3.safetensors").symlink_to(tmp_path / "elsewhere")
    theirs = ["vectors-mine.safetensors", "dead-line.txt", ".vectors-notes", "vectors-00000009-3.safetensors.bak"]
    for name in theirs:
        (tmp_path / "i" / name).write_bytes(b"mine")
    index.add(["a"], torch.ones(1, DIM))
    index.delete(["a"])
    left = {path.name for path in (tmp_path / "i").iterdir()} - {"manifest.json", "writer.lock"}
    assert left == {*theirs, "vectors-old", "dead-00000009-3.safetensors", "vectors-00000009-3.safetensors"}


# ------------------------------------------------------------------------------------------------ writers and readers


@pytest.mark.parametrize("change", [{}, {"dim": DIM + 1}, {"provenance": "images:two"}])
def test_an_index_made_anew_is_not_taken_for_the_one_that_was_opened(tmp_path: Path, change: dict[str, Any]) -> None:
    opened = made(tmp_path / "i", provenance="images:one")
    opened.add(["old"], torch.ones(1, DIM))
    shutil.rmtree(tmp_path / "i")
    new = made(tmp_path / "i", **{"provenance": "images:one", **change})
    new.add(["new"], torch.full((1, new.dim), 2.0))  # the same generation, file name and size
    for act in (opened.refresh, lambda: opened.add(["more"], torch.ones(1, DIM)), lambda: opened.delete(["old"])):
        with pytest.raises(DataError, match="another index than the one that was opened"):
            act()
    assert opened.search(torch.ones(1, DIM), 5).ids == [["old"]]
    assert made(tmp_path / "i", dim=new.dim).search(torch.ones(1, new.dim), 5).ids == [["new"]]


def test_an_index_from_before_ids_and_sources_can_be_read_and_written(tmp_path: Path) -> None:
    made(tmp_path / "i").add(["a"], torch.ones(1, DIM))
    said = tmp_path / "i" / "manifest.json"
    raw = json.loads(said.read_text(encoding="utf-8"))
    assert len(raw.pop("id")) == 32
    assert raw.pop("sources") == []
    said.write_text(json.dumps(raw), encoding="utf-8")
    index = made(tmp_path / "i")
    index.add(["b"], torch.ones(1, DIM))
    assert index.known(["a", "b"]) == [True, True]


def test_what_a_killed_writer_left_is_swept_at_the_next_change(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.add(["a"], torch.ones(1, DIM))
    left = [
        "vectors-00000002-0.safetensors",
        ".vectors-00000002-0.safetensors.1.tmp",
        "dead-00000009-0.safetensors",
        ".manifest.json.7.tmp",
    ]
    for name in left:
        (tmp_path / "i" / name).write_bytes(b"torn")
    assert len(made(tmp_path / "i")) == 1
    index.add(["b"], torch.ones(1, DIM))
    assert len(made(tmp_path / "i")) == 2
    assert not any((tmp_path / "i" / name).exists() for name in left[1:])
    assert (tmp_path / "i" / left[0]).read_bytes() != b"torn"


def test_a_reader_keeps_its_state_until_it_looks_again(tmp_path: Path) -> None:
    writer = made(tmp_path / "i")
    writer.add(names(40), whole(40, DIM))
    reader = made(tmp_path / "i")
    before = reader.search(torch.ones(1, DIM), 40)
    writer.delete(names(39))
    writer.add(["new"], torch.ones(1, DIM))
    writer.compact()
    after = reader.search(torch.ones(1, DIM), 40)
    assert (after.ids, after.scores.tolist()) == (before.ids, before.scores.tolist())
    assert reader.refresh()
    assert reader.search(torch.ones(1, DIM), 40).ids == writer.search(torch.ones(1, DIM), 40).ids
    assert not reader.refresh()


def test_hits_are_those_of_the_moment_of_the_search_whenever_they_are_read(tmp_path: Path) -> None:
    index, other = made(tmp_path / "i"), made(tmp_path / "i")
    index.add(names(40), whole(40, DIM), [{"n": n} for n in range(40)])
    hits = [index.search(torch.ones(1, DIM), 40)]
    first = list(hits[0].ids[0])
    index.add(names(40), whole(40, DIM), [{"n": "new"}] * 40)
    other.delete(names(30))
    other.compact()
    hits.append(index.search(torch.ones(1, DIM), 40))  # it has not looked again
    reader = threading.Thread(target=index.refresh)
    reader.start()
    reader.join()
    index.close()
    assert [one.ids for one in hits] == [[first], [first]]
    assert hits[0].metadata == [[{"n": int(name.split()[1])} for name in first]]
    assert hits[1].metadata == [[{"n": "new"}] * 40]


def test_a_search_reads_no_text_until_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, read = made(tmp_path / "i"), list[str]()
    index.add(names(40), torch.arange(40.0).unsqueeze(1).expand(-1, DIM), [{"n": n} for n in range(40)])
    for name in ("_both", "_first"):
        plain = getattr(segments, name)
        monkeypatch.setattr(segments, name, lambda text, plain=plain: (read.append(text), plain(text))[1])
    found = index.search(torch.ones(2, DIM), 30)
    assert read == []
    assert (found.ids[1][1], found.metadata[0][2]) == ("image 38", {"n": 37})
    assert read == ['["image 38",{"n":38}]', '["image 37",{"n":37}]']


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
    found = made(tmp_path / "i")
    assert sorted(found.search(torch.ones(1, DIM), 99).ids[0]) == sorted(
        ["both", *(f"{number} {step}" for number in range(2) for step in range(12))]
    )


HOLD = """
import sys, time
from pathlib import Path
from vacsr.search.manifest import writer_lock
with writer_lock(Path(sys.argv[1]), patience=0):
    print("held", flush=True)
    time.sleep(120)
"""


def test_another_process_that_writes_is_named_and_one_that_was_killed_is_not_waited_for(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.patience = 0.05
    command = [sys.executable, "-c", HOLD, str(tmp_path / "i")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentProblem, match=rf"\(pid {process.pid}\)"):
            index.add(["a"], torch.ones(1, DIM))
        process.kill()
        process.wait()
    assert index.add(["a"], torch.ones(1, DIM)) == (1, 0)


def test_a_full_disk_leaves_the_index_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = made(tmp_path / "i")
    index.add(["a"], torch.ones(1, DIM))

    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("no space left")

    for name in ("write_segment", "write_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(exact, name, full)
            with pytest.raises(DiskFull):
                index.add(["b"], torch.ones(1, DIM))
        assert index.search(torch.ones(1, DIM), 5).ids == [["a"]]
        assert made(tmp_path / "i").known(["a", "b"]) == [True, False]
    index.add(["c"], torch.ones(1, DIM))
    assert len(list((tmp_path / "i").glob("*.safetensors"))) == 2


def test_a_disk_that_fills_while_tidying_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = made(tmp_path / "i")
    index.add(names(10), whole(10, DIM))

    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("no space left")

    monkeypatch.setattr(exact, "rewrite_segments", full)
    with pytest.warns(UserWarning, match="the change is stored"):
        assert index.delete(names(5)) == 5
    assert len(made(tmp_path / "i")) == 5


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), EnvironmentProblem("no rights")])
def test_any_trouble_of_the_disk_while_tidying_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    index = made(tmp_path / "i")
    index.add(names(10), whole(10, DIM))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(exact, "rewrite_segments", fail)
    with pytest.warns(UserWarning, match="the change is stored"):
        assert index.delete(names(5)) == 5


def test_names_are_on_the_disk_before_the_manifest_tells_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    plain_sync, plain_replace = manifest.sync_folder, os.replace

    def sync(folder: Path) -> None:
        events.append(f"sync {folder.name}")
        plain_sync(folder)

    def rename(source: Path, target: Path) -> None:
        events.append(target.name)
        plain_replace(source, target)

    monkeypatch.setattr(manifest, "sync_folder", sync)
    monkeypatch.setattr(os, "replace", rename)
    index = made(tmp_path / "up" / "i")
    assert events[:3] == ["sync i", "manifest.json", "sync i"]
    assert sorted(events[3:]) == sorted(["sync up", f"sync {tmp_path.name}"])
    events.clear()
    index.add(["a"], torch.ones(1, DIM))
    assert events == ["vectors-00000001-0.safetensors", "sync i", "manifest.json", "sync i"]


def test_adding_after_closing_loses_nothing(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.add(["a"], torch.ones(1, DIM))
    index.close()
    index.add(["b"], torch.ones(1, DIM))
    assert made(tmp_path / "i").known(["a", "b"]) == [True, True]


def test_a_closed_index_holds_no_files(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.add(["a"], torch.ones(1, DIM))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index.close()
    assert len(index) == 0
    assert len(made(tmp_path / "i")) == 1


# --------------------------------------------------------------------------------------------------------- compaction


def test_small_batches_become_few_files_and_rows_are_written_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    plain = segments.write_segment

    def counting(folder: Path, name: str, *, vectors: Tensor, **rest: Any) -> Part:
        nonlocal written
        written += len(vectors)
        return plain(folder, name, vectors=vectors, **rest)

    monkeypatch.setattr(segments, "write_segment", counting)
    monkeypatch.setattr(exact, "write_segment", counting)
    index = made(tmp_path / "i")
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for number in range(200):
        index.add([str(number)], torch.ones(1, DIM))
    assert index.info().parts <= 3 * 7
    assert written <= 200 * 4  # eight by eight: 1, 8 and 64 rows, and the merges that came early
    assert made(tmp_path / "i").search(torch.ones(1, DIM), 200).ids == [[str(number) for number in range(200)]]


def test_dead_rows_go_when_they_are_too_many(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    index.add(names(100), whole(100, DIM))
    index.delete(names(25))
    assert (index.info().dead, index.info().vectors) == (25, 75)
    index.delete(names(1, 25))
    assert (index.info().dead, index.info().vectors) == (0, 74)
    index.delete(names(100))
    assert (index.info().parts, len(list((tmp_path / "i").glob("*.safetensors")))) == (0, 0)


def test_files_do_not_grow_beyond_their_bound() -> None:
    many = [Part("p", 1000, 0)] * 20
    assert compaction.next_rewrite(many, row_bytes=compaction.SEGMENT_BYTES // 7999) is None
    assert compaction.next_rewrite(many, row_bytes=compaction.SEGMENT_BYTES // 8000) is not None
    runs = compaction.full_rewrite(many, row_bytes=compaction.SEGMENT_BYTES // 6000)
    assert sorted((run.start, run.stop) for run in runs) == [(0, 6), (6, 12), (12, 18), (18, 20)]


def test_hits_are_named() -> None:
    assert Hits._fields == ("ids", "scores", "vectors", "metadata")


def test_settling_merges_the_last_files_and_changes_no_answer(tmp_path: Path) -> None:
    index, queries = made(tmp_path / "i"), whole(3, DIM)
    vectors = torch.randn(70, DIM, generator=torch.Generator().manual_seed(5))
    for start in range(0, 70, 10):
        index.add(names(70)[start : start + 10], vectors[start : start + 10])
    index.delete(names(70)[3:5])
    before, files = index.search(queries.float(), 20), index.info().parts
    index.settle()
    assert index.info().parts == 1 < files
    after = made(tmp_path / "i").search(queries.float(), 20)
    assert [list(row) for row in after.ids] == [list(row) for row in before.ids]
    assert torch.equal(after.scores, before.scores)


def test_a_disk_that_fills_while_settling_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = made(tmp_path / "i")
    for start in range(0, 30, 10):
        index.add(names(10, start), whole(10, DIM))

    def full(*_: Any, **__: Any) -> None:
        raise DiskFull("no space left")

    monkeypatch.setattr(exact, "rewrite_segments", full)
    with pytest.warns(UserWarning, match="the change is stored"):
        index.settle()
    assert len(made(tmp_path / "i")) == 30
