"""Milvus Lite holds what the exact index holds and answers the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, ProvenanceMismatch, ShapeMismatch, UsageError
from vacsr.search import VectorIndex, milvus_collections, open_index
from vacsr.search.milvus import MilvusIndex
from vacsr.search.milvus_client import MilvusName

DIM = 16
REASON = "needs the extra milvus: pip install 'vacsr[milvus]'"
pytestmark = pytest.mark.slow  # a second for each collection


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("pymilvus", reason=REASON)
    pytest.importorskip("milvus_lite", reason=REASON)
    return f"milvus:{tmp_path_factory.mktemp('milvus') / 'index.db'}"


@pytest.fixture
def index(spec: str, request: pytest.FixtureRequest) -> Iterator[VectorIndex]:
    """A collection of its own for each test, in one file."""
    name = f"t{abs(hash(request.node.name))}"
    opened = open_index(f"{spec},collection={name}", dim=DIM, provenance="images:one", create=True)
    yield opened
    opened.close()


def vectors(count: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn, dim=1)


def test_the_same_answers_as_the_exact_index(index: VectorIndex, tmp_path: Path) -> None:
    exact = open_index(f"exact:{tmp_path / 'i'}", dim=DIM, create=True)
    assert isinstance(index, VectorIndex)
    for opened in (index, exact):
        ids = [f"image {n}" for n in range(60)]
        assert opened.add(ids, vectors(60), [{"n": n, "captions": ["ü"]} for n in range(60)]) == (60, 0)
        assert opened.add(["image 3", "new"], vectors(2, seed=1)) == (1, 1)
        assert opened.delete(["image 5", "image 5", "none"]) == 1
        assert opened.known(["image 3", "image 5", "none", "new"]) == [True, False, False, True]
        assert len(opened) == 60
    queries = vectors(4, seed=2)
    for k in (1, 7, 1000):
        ours, theirs = exact.search(queries, k), index.search(queries, k)
        assert theirs.ids == ours.ids
        assert theirs.metadata == ours.metadata
        torch.testing.assert_close(theirs.scores, ours.scores, atol=1e-5, rtol=0)
        assert torch.equal(theirs.vectors, ours.vectors)


def test_many_messages(index: VectorIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.search.milvus._MESSAGE", 4 * DIM * 7)
    monkeypatch.setattr("vacsr.search.milvus._LOOKUP", 5)
    ids = [str(n) for n in range(40)]
    rows = vectors(40)
    index.add(ids, rows)
    assert index.known([*ids, "none"]) == [True] * 40 + [False]
    assert [row[0] for row in index.search(rows, 3).ids] == ids
    assert index.delete(ids[:23]) == 23
    assert len(index) == 17


def test_empty_and_odd(index: VectorIndex) -> None:
    found = index.search(vectors(2), 5)
    assert (found.ids, found.metadata) == ([[], []], [[], []])
    assert (found.scores.shape, found.vectors.shape) == ((2, 0), (2, 0, DIM))
    assert index.add([], torch.empty(0, DIM)) == (0, 0)
    odd = ['a "quoted" \\ id', "ü 🐈", "line\nbreak", "' or 1 == 1", "a", "'] or key != '"]
    facts: list[dict[str, Any]] = [{"caption": name, "deep": [1, None, {"x": 2.5}]} for name in odd]
    index.add(odd, vectors(len(odd)), facts)
    hits = index.search(vectors(1), 9)
    assert dict(zip(hits.ids[0], hits.metadata[0], strict=True)) == dict(zip(odd, facts, strict=True))
    assert index.known(odd) == [True] * len(odd)
    assert index.delete(["' or 1 == 1", "none' or 1 == 1"]) == 1
    assert index.delete(odd) == len(odd) - 1


@pytest.mark.parametrize(
    ("ids", "rows", "kind"),
    [
        (["a", "a"], torch.ones(2, DIM), DataError),
        (["x" * 70_000], torch.ones(1, DIM), DataError),
        (["\udc80"], torch.ones(1, DIM), DataError),
        (["a"], torch.full((1, DIM), float("nan")), DataError),
        (["a"], torch.ones(1, DIM + 1), ShapeMismatch),
    ],
)
def test_what_cannot_be_added(index: VectorIndex, ids: list[str], rows: torch.Tensor, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        index.add(ids, rows)
    assert len(index) == 0


def test_it_is_there_when_opened_again_and_is_checked(spec: str) -> None:
    here = f"{spec},collection=again"
    first = open_index(here, dim=DIM, provenance="images:one", create=True)
    first.add(["a", "b"], vectors(2), [{"n": 1}, {"n": 2}])
    first.close()
    second = open_index(here)
    assert (second.dim, second.provenance, len(second)) == (DIM, "images:one", 2)
    assert second.info()._replace(bytes=None, where="")._asdict() == {
        "kind": "milvus", "where": "", "vectors": 2, "dim": DIM, "dtype": "float32", "provenance": "images:one",
        "dead": 0, "parts": 1, "bytes": None, "holds": "images", "exact": True, "sources": (),
    }  # fmt: skip
    assert (second.info().bytes or 0) > 0
    assert second.search(vectors(1), 1).metadata == [[{"n": 1}]]
    second.close()
    for create in (True, False):
        with pytest.raises(ProvenanceMismatch):
            open_index(here, dim=DIM, provenance="images:two", create=create)
        with pytest.raises(ShapeMismatch):
            open_index(here, dim=DIM + 1, create=create)


def test_metadata_by_id(index: VectorIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.search.milvus._LOOKUP", 2)
    index.add(["a", "b'", "c"], vectors(3), [{"n": 1}, {"n": 2}, {"n": 3}])
    assert index.metadata(["c", "b'", "a", "a", "none"]) == {"a": {"n": 1}, "b'": {"n": 2}, "c": {"n": 3}}


def test_entries_records_and_sources(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.search.milvus._LOOKUP", 3)
    here = f"{spec},collection=entries"
    first = open_index(here, dim=DIM, provenance="texts:one", create=True)
    rows = vectors(8)
    first.add([f"'{n}" for n in range(8)], rows, [{"n": n} for n in range(8)])
    found = first.get(["'7", "'0", "none", "'7"])
    assert {name: entry.metadata for name, entry in found.items()} == {"'7": {"n": 7}, "'0": {"n": 0}}
    assert torch.equal(found["'7"].vector, rows[7])
    assert found["'7"].vector.dtype == torch.float32
    assert dict(first.records()) == {f"'{n}": {"n": n} for n in range(8)}
    assert first.sources == ()
    for source in ("folder:/b", "folder:/a'", "folder:/b"):
        first.note_source(source)
    first.close()
    second = open_index(here)
    assert second.sources == second.info().sources == ("folder:/b", "folder:/a'")
    assert (second.holds, second.exact, len(second)) == ("texts", True, 8)
    second.close()


@pytest.mark.parametrize("kind", ["HNSW", "AUTOINDEX"])
def test_only_flat_is_exact(spec: str, kind: str) -> None:
    index = open_index(f"{spec},collection=kind_{kind},index={kind}", dim=DIM, create=True)
    assert not index.exact
    assert index.holds == ""
    index.close()


@pytest.mark.parametrize("missing", ["row", "collection"])
def test_an_index_that_was_half_made_is_finished(spec: str, missing: str) -> None:
    here = f"{spec},collection=half_{missing}"
    first = open_index(here, dim=DIM, provenance="images:one", create=True)
    assert isinstance(first, MilvusIndex)
    if missing == "row":
        first._client.delete(first._about, filter="id == 'about'")
    else:
        first._client.drop_collection(first._about)
    first.close()
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(here)
    with pytest.raises(ShapeMismatch, match=f"dimension {DIM}, not {DIM + 1}"):
        open_index(here, dim=DIM + 1, create=True)
    open_index(here, dim=DIM, provenance="images:two", create=True).close()
    second = open_index(here)
    assert (second.dim, second.provenance) == (DIM, "images:two")
    second.close()


def test_a_collection_that_another_makes_meanwhile_is_taken(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = milvus_collections.make_collection

    def twice(client: Any, name: MilvusName, *, dim: int) -> None:
        for _ in range(2):
            plain(client, name, dim=dim)  # the second time Milvus says that it is there

    monkeypatch.setattr(milvus_collections, "make_collection", twice)
    index = open_index(f"{spec},collection=raced", dim=DIM, create=True)
    assert index.add(["a"], vectors(1)) == (1, 0)
    index.close()


def test_places_that_are_none(spec: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(f"{spec},collection=never_made")
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(f"milvus:{tmp_path / 'none.db'}")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(UsageError, match=r"FILE\.db"):
        open_index(f"milvus:{tmp_path / 'folder'}")
    with pytest.raises(UsageError, match="collection=NAME"):
        open_index(f"{spec},colour=red")
    with pytest.raises(UsageError, match="float32"):
        open_index(spec, dim=DIM, create=True, dtype="float16")
    with pytest.raises(EnvironmentProblem, match="check the server"):
        open_index("milvus:http://127.0.0.1:9")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pymilvus", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[milvus\]"):
        open_index(f"milvus:{tmp_path / 'a.db'}", dim=2, create=True)
