"""What is peculiar to Qdrant; test_index.py has what all backends share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, UsageError
from vacsr.search import open_index


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


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[qdrant\]"):
        open_index(f"qdrant:{tmp_path / 'i'}", dim=2, create=True)
