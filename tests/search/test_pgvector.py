"""What is peculiar to PostgreSQL; test_index.py has what all backends share."""

import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, ShapeMismatch, UsageError
from vacsr.search import open_index

pytestmark = [pytest.mark.slow, pytest.mark.long]  # the server takes seconds to start, and may stop under load

DIM = 8


@pytest.fixture
def spec(new_spec: Callable[[str], str]) -> str:
    return new_spec("pgvector")


def units(count: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_a_call_is_stored_whole_or_not_at_all(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.search.database._MESSAGE", 4 * DIM * 3)
    with closing(open_index(spec, dim=DIM, create=True)) as index:
        for ids, metadata in ((["a", "b", "c", "d\0"], None), (["a", "b"], [{}, {"x": "\0"}])):
            with pytest.raises(DataError, match="use exact:FOLDER"):
                index.add(ids, units(len(ids)), metadata)
            assert len(index) == 0
        assert index.add(list("abcdefg"), units(7)) == (7, 0)


def test_nobody_writes_between_a_check_and_the_change(spec: str) -> None:
    with closing(open_index(spec, dim=DIM, create=True)) as first, closing(open_index(spec)) as second:
        first.add(["a"], units(1))
        late = threading.Thread(target=lambda: second.add(["b"], units(1)))

        def check(stored: dict[str, Any]) -> None:
            late.start()
            late.join(0.3)
            assert late.is_alive(), "it waits"
            with closing(open_index(spec)) as reader:
                assert reader.known(["a", "b"]) == [True, False], "a reader does not"

        first.add(["a", "b"], units(2), check=check)
        late.join()
        assert len(first) == 2


def test_columns_of_your_own_are_left_alone(spec: str) -> None:
    with closing(open_index(spec, dim=DIM, create=True)) as index:
        index.add(["a"], units(1))
        index._query("ALTER TABLE {name} ADD COLUMN tag text DEFAULT 'mine'")
        assert index.add(["a", "b"], units(2)) == (1, 1)
        assert index._query("SELECT tag FROM {name}") == [("mine",), ("mine",)]


def test_hnsw_finds_more_than_its_list_holds(spec: str) -> None:
    with closing(open_index(f"{spec},index=HNSW", dim=DIM, create=True)) as index:
        index.add([f"{n}" for n in range(1500)], units(1500))
        hits = index.search(units(2), 1200)
        assert (index.exact, hits.scores.shape, hits.ids[0][0]) == (False, (2, 1200), "0")
        assert bool((hits.scores[:, :-1] >= hits.scores[:, 1:] - 1e-6).all())


def test_other_tables_are_left_alone(spec: str, postgres: str) -> None:
    import psycopg

    place, _, table = spec.removeprefix("pgvector:").partition(",table=")
    with psycopg.connect(place, autocommit=True) as connection:
        connection.execute(f'CREATE TABLE "{table}" (n int)')
    with pytest.raises(EnvironmentProblem, match="already exists"):
        open_index(spec, dim=DIM, create=True)
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(spec)


def test_two_create_the_same_index_at_once(spec: str) -> None:
    opened: list[Any] = []
    threads = [threading.Thread(target=lambda: opened.append(open_index(spec, dim=DIM, create=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in opened:
        index.close()
    assert [index.dim for index in opened] == [DIM] * 4
    with pytest.raises(ShapeMismatch):
        open_index(spec, dim=DIM + 1, create=True)


def test_names_that_lead_nowhere() -> None:
    pytest.importorskip("psycopg", reason="needs the extra pgvector: pip install 'vacsr[pgvector]'")
    with pytest.raises(UsageError, match="PGPASSWORD"):
        open_index("pgvector:postgresql://me:secret@127.0.0.1/photos")
    with pytest.raises(UsageError, match="postgresql://HOST"):
        open_index("pgvector:photos")
    with pytest.raises(EnvironmentProblem, match="check the server"):
        open_index("pgvector:postgresql://127.0.0.1:9/photos")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[pgvector\]"):
        open_index("pgvector:postgresql://127.0.0.1/photos")
