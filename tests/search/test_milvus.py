"""What is peculiar to Milvus; test_index.py has what all backends share."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, ShapeMismatch, UsageError
from vacsr.search import open_index
from vacsr.search.milvus import MilvusIndex

DIM = 16
pytestmark = pytest.mark.slow  # a second for each collection


def test_many_messages(milvus_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.search.database._MESSAGE", 4 * DIM * 7)
    monkeypatch.setattr("vacsr.search.database.LOOKUP", 5)
    monkeypatch.setattr("vacsr.search.milvus.LOOKUP", 5)
    ids = [str(n) for n in range(40)]
    rows = torch.nn.functional.normalize(torch.randn(40, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
    with closing(open_index(f"milvus:{milvus_file},collection=many", dim=DIM, create=True)) as index:
        index.add(ids, rows, [{"n": n} for n in range(40)])
        assert index.known([*ids, "none"]) == [True] * 40 + [False]
        assert dict(index.records()) == index.metadata(ids) == {name: {"n": int(name)} for name in ids}
        assert [row[0] for row in index.search(rows, 3).ids] == ids
        assert (index.delete(ids[:23]), len(index)) == (23, 17)


@pytest.mark.parametrize(("name", "kind"), [("\udc80", DataError), ("x" * 70_000, EnvironmentProblem)])
def test_ids_that_milvus_cannot_store(milvus_file: Path, name: str, kind: type[Exception]) -> None:
    with closing(open_index(f"milvus:{milvus_file},collection=odd", dim=DIM, create=True)) as index:
        with pytest.raises(kind):
            index.add([name], torch.ones(1, DIM))
        assert len(index) == 0


@pytest.mark.parametrize("kind", ["HNSW", "AUTOINDEX"])
def test_only_flat_is_exact(milvus_file: Path, kind: str) -> None:
    with closing(open_index(f"milvus:{milvus_file},collection={kind},index={kind}", dim=DIM, create=True)) as index:
        assert (index.exact, index.info().holds) == (False, "")


@pytest.mark.parametrize("missing", ["row", "collection"])
def test_an_index_that_was_half_made_is_finished(milvus_file: Path, missing: str) -> None:
    spec = f"milvus:{milvus_file},collection=half_{missing}"
    with closing(open_index(spec, dim=DIM, provenance="images:one", create=True)) as first:
        assert isinstance(first, MilvusIndex)
        if missing == "row":
            first._client.delete(first._about, filter="id == 'about'")
        else:
            first._client.drop_collection(first._about)
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(spec)
    with pytest.raises(ShapeMismatch, match=f"dimension {DIM}, not {DIM + 1}"):
        open_index(spec, dim=DIM + 1, create=True)
    open_index(spec, dim=DIM, provenance="images:two", create=True).close()
    with closing(open_index(spec)) as second:
        assert (second.dim, second.provenance) == (DIM, "images:two")


def test_names_that_lead_nowhere(milvus_file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(f"milvus:{tmp_path / 'none.db'}")
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(UsageError, match=r"FILE\.db"):
        open_index(f"milvus:{tmp_path / 'folder'}")
    with pytest.raises(UsageError, match="collection=vacsr"):
        open_index(f"milvus:{milvus_file},colour=red")
    with pytest.raises(EnvironmentProblem, match="check the server"):
        open_index("milvus:http://127.0.0.1:9")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[milvus\]"):
        open_index(f"milvus:{tmp_path / 'a.db'}", dim=2, create=True)
