"""What is peculiar to Qdrant; test_index.py has what all backends share."""

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, UsageError
from vacsr.search import open_index
from vacsr.search.database import Row


@pytest.fixture
def spec(new_spec: Callable[[str], str]) -> str:
    return new_spec("qdrant")


def test_collections_of_one_folder(spec: str) -> None:
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, VectorParams

    for name in ("cats", "dogs"):
        with closing(open_index(f"{spec},collection={name}", dim=2, provenance=name, create=True)) as index:
            index.add([name], torch.ones(1, 2))
    with closing(open_index(f"{spec},collection=cats")) as index:
        assert (list(index.records()), index.provenance) == ([("cats", {})], "cats")
    with closing(QdrantClient(path=spec.removeprefix("qdrant:"))) as client:
        client.create_collection("other", vectors_config=VectorParams(size=2, distance=Distance.DOT))
    with pytest.raises(DataError, match="collection=NAME"):
        open_index(f"{spec},collection=other", dim=2, create=True)
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(f"{spec},collection=birds")


def test_local_mode_is_exact_whatever_is_asked(spec: str) -> None:
    with closing(open_index(f"{spec},index=HNSW", dim=2, create=True)) as index:
        assert index.exact


def test_a_folder_that_is_open_is_refused(spec: str) -> None:
    with closing(open_index(spec, dim=2, create=True)), pytest.raises(EnvironmentProblem, match="folder open"):
        open_index(spec)


def test_names_that_lead_nowhere(spec: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(f"qdrant:{tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="collection=vacsr"):
        open_index(f"{spec},colour=red")
    with pytest.raises(UsageError, match="index=HNSW"):
        open_index(f"{spec},index=TREE", dim=2, create=True)
    with pytest.raises(EnvironmentProblem, match="check the server"):
        open_index("qdrant:http://127.0.0.1:9")


def test_lone_surrogates_are_refused(spec: str) -> None:
    with closing(open_index(spec, dim=2, create=True)) as index:
        with pytest.raises(DataError, match="Unicode"):
            index.add(["\udc80"], torch.ones(1, 2))
        assert len(index) == 0


@pytest.mark.parametrize("content", ["", "[]", "9" * 5000, '{"collections": {}, "aliases": 3'])
def test_a_damaged_folder_is_named(spec: str, content: str) -> None:
    with closing(open_index(spec, dim=2, create=True)) as index:
        index.add(["a"], torch.ones(1, 2))
    (Path(spec.removeprefix("qdrant:")) / "meta.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="damaged"):
        open_index(spec)


@pytest.mark.parametrize("facts", [{"dim": "two", "provenance": "", "index": "FLAT"}, {"index": "FLAT"}, {"dim": None}])
def test_facts_of_something_else_are_refused(spec: str, facts: dict[str, Any]) -> None:
    from qdrant_client import QdrantClient
    from qdrant_client.models import Distance, VectorParams

    with closing(QdrantClient(path=spec.removeprefix("qdrant:"))) as client:
        params = VectorParams(size=2, distance=Distance.DOT)
        client.create_collection("vacsr", vectors_config=params, metadata={"vacsr": facts})
    with pytest.raises(DataError, match="does not hold an index") as caught:
        open_index(spec)
    QdrantClient(path=spec.removeprefix("qdrant:")).close()  # the folder is free again
    assert caught.value.__traceback__ is not None, "and nobody else let go of it"


def test_points_of_others_are_refused(spec: str) -> None:
    from qdrant_client import QdrantClient
    from qdrant_client.models import PointStruct

    open_index(spec, dim=2, create=True).close()
    with closing(QdrantClient(path=spec.removeprefix("qdrant:"))) as client:
        client.upsert("vacsr", [PointStruct(id=1, vector=[1.0, 0.0], payload={"title": "of another program"})])
    with closing(open_index(spec)) as index:
        for read in (lambda: index.search(torch.ones(1, 2), 1), lambda: list(index.records())):
            with pytest.raises(DataError, match="no item of vacsr"):
                read()


def test_messages_stay_below_the_limit_of_servers(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.search.database._MESSAGE", 4 * 2 * 7)
    with closing(open_index(spec, dim=2, create=True)) as index:
        sizes, call = list[int](), index._call  # type: ignore[attr-defined]

        def counted(verb: str, *arguments: Any, **options: Any) -> Any:
            sizes.extend([len(arguments[1].ids)] if verb == "upsert" else [])
            return call(verb, *arguments, **options)

        monkeypatch.setattr(index, "_call", counted)
        assert index.add([f"{n}" for n in range(20)], torch.ones(20, 2)) == (20, 0)
        assert sizes == [7, 7, 6]


def test_answers_of_unequal_length_are_cut_to_the_shortest(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An approximate index may find fewer."""
    with closing(open_index(spec, dim=2, create=True)) as index:
        found = [[Row(name, {}, (1.0, 0.0), 1.0) for name in names] for names in ("abc", "de")]
        monkeypatch.setattr(index, "_nearest", lambda queries, k: found)
        assert index.search(torch.ones(2, 2), 3).ids == [["a", "b"], ["d", "e"]]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[qdrant\]"):
        open_index(f"qdrant:{tmp_path / 'i'}", dim=2, create=True)
