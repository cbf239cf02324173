"""An index that is made anew while it is served: by the same model it is opened, by another it is refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from vacsr.errors import DataError
from vacsr.search import embedding_provenance, open_index
from vacsr.search.engine import Searcher
from vacsr.search.service import ServiceSettings, create_app
from vacsr.search.service.upkeep import IndexWatch

Start = Callable[..., Any]


def fill(folder: Path, names: list[str], provenance: str) -> None:
    """A new index, in the place of any that was there."""
    shutil.rmtree(folder, ignore_errors=True)
    made = open_index(f"exact:{folder}", dim=8, provenance=provenance, create=True)
    if names:
        made.add(names, torch.eye(8)[: len(names)])
    made.close()


@pytest.fixture
def folder(tmp_path: Path, world: Any) -> Path:
    fill(tmp_path / "index", ["a", "b"], embedding_provenance(world.searcher.scorer.model))
    return tmp_path / "index"


def searcher(world: Any, folder: Path) -> Searcher:
    return Searcher(world.searcher.scorer, open_index(f"exact:{folder}"))


def test_one_made_anew_by_the_same_model_is_served(world: Any, folder: Path) -> None:
    with TestClient(create_app(searcher(world, folder), ServiceSettings(refresh_seconds=0))) as client:
        assert {hit["id"] for hit in ask(client).json()["hits"]} == {"a", "b"}
        fill(folder, ["c"], embedding_provenance(world.searcher.scorer.model))
        assert {hit["id"] for hit in ask(client).json()["hits"]} == {"c"}
        assert client.get("/info").json()["index_size"] == 1
        assert client.get("/healthz").status_code == 200
        said = client.get("/metrics").text
        assert "\nvacsr_index_reopened_total 1\n" in said
        assert "\nvacsr_index_stale 0\n" in said
        assert "# TYPE vacsr_index_reopened_total counter\n" in said


def test_one_of_another_model_is_refused_until_it_is_right_again(world: Any, folder: Path) -> None:
    settings = ServiceSettings(refresh_seconds=0)
    with TestClient(create_app(searcher(world, folder), settings, photos=[world.photos])) as client:
        fill(folder, ["c"], "images:of another model")
        answer = ask(client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stale_index")
        assert "start the service again" in answer.json()["error"]["message"]
        assert str(folder) not in answer.text
        assert int(answer.headers["retry-after"]) > 1
        health = client.get("/healthz")
        assert health.status_code == 503
        assert "stale index" in health.json()["error"]["message"]
        assert client.get(f"/photo/{world.photos.image_ids[0]}").status_code == 503
        assert "\nvacsr_index_stale 1\n" in client.get("/metrics").text
        assert 'vacsr_requests_total{path="/search",status="503"} 1\n' in client.get("/metrics").text
        fill(folder, ["d"], embedding_provenance(world.searcher.scorer.model))
        assert [hit["id"] for hit in ask(client).json()["hits"]] == ["d"]
        assert client.get("/healthz").json() == {"status": "ok"}
        assert "\nvacsr_index_stale 0\n" in client.get("/metrics").text


def test_one_that_is_empty_for_a_moment_asks_to_come_back(world: Any, folder: Path) -> None:
    """As it is while it is made anew; then what it is filled with is found."""
    model = embedding_provenance(world.searcher.scorer.model)
    with TestClient(create_app(searcher(world, folder), ServiceSettings(refresh_seconds=0))) as client:
        fill(folder, [], model)
        answer = ask(client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "empty_index")
        assert answer.headers["retry-after"] == "1"
        made = open_index(f"exact:{folder}")
        made.add(["c"], torch.eye(8)[:1])
        made.close()
        assert [hit["id"] for hit in ask(client).json()["hits"]] == ["c"]


def test_photos_are_found_again_when_the_index_has_changed(
    world: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vacsr.search.service.service._LOOK", 0.02)
    names, asked = world.photos.image_ids, []

    def found() -> list[Any]:
        asked.append(len(asked))
        if len(asked) == 1:
            raise DataError("the folder is gone")
        return [world.photos]

    fill(folder, names[:2], embedding_provenance(world.searcher.scorer.model))
    app = create_app(
        searcher(world, folder), ServiceSettings(refresh_seconds=0.02), photos=[world.photos.subset([0])],
        find_photos=found,
    )  # fmt: skip
    with TestClient(app) as client:

        def shown() -> set[str]:
            return {hit["id"] for hit in ask(client).json()["hits"] if hit["photo"] is not None}

        def until(wanted: Callable[[], bool]) -> None:
            end = time.monotonic() + 20
            while not wanted():
                assert time.monotonic() < end
                time.sleep(0.02)

        assert shown() == {names[0]}
        assert not asked
        other = open_index(f"exact:{folder}")
        other.add([names[2]], torch.eye(8)[2:3])
        until(lambda: any("the folder is gone" in record.message for record in caplog.records))
        assert shown() == {names[0]}, "what was there stays"
        other.note_source("folder:elsewhere")
        until(lambda: shown() == set(names[:3]))
        assert client.get(f"/photo/{names[2]}").status_code == 200
        other.close()
    assert asked == [0, 1]


def test_one_that_is_gone_for_a_while_answers_as_before(
    world: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TestClient(create_app(searcher(world, folder), ServiceSettings(refresh_seconds=0))) as client:
        shutil.move(folder, folder.with_name("away"))
        for _ in range(3):
            assert {hit["id"] for hit in ask(client).json()["hits"]} == {"a", "b"}
        assert client.get("/healthz").status_code == 200
        assert "\nvacsr_index_stale 1\n" in client.get("/metrics").text
        assert sum("could not be read again" in record.message for record in caplog.records) == 1
        shutil.move(folder.with_name("away"), folder)
        ask(client)
        assert "\nvacsr_index_stale 0\n" in client.get("/metrics").text
        assert "\nvacsr_index_reopened_total 0\n" in client.get("/metrics").text


def test_it_is_noticed_while_nobody_asks(live: Start, world: Any, folder: Path) -> None:
    service = live(searcher(world, folder), refresh_seconds=0.1)

    def health() -> tuple[int, dict[str, Any]]:
        answer = service.ask("GET /healthz HTTP/1.1\nHost: localhost\nConnection: close")
        return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])

    def until(wanted: int) -> dict[str, Any]:
        end = time.monotonic() + 20
        while health()[0] != wanted:
            assert time.monotonic() < end
            time.sleep(0.05)
        return health()[1]

    assert until(200) == {"status": "ok"}
    fill(folder, ["c"], "images:of another model")
    assert until(503)["error"]["code"] == "stale_index"
    fill(folder, ["d"], embedding_provenance(world.searcher.scorer.model))
    assert until(200) == {"status": "ok"}


def test_a_server_that_is_away_for_a_while_is_asked_again(world: Any) -> None:
    class Remote:
        """As much of an index on a server as a watch sees."""

        away = False
        sources = ("folder:photos",)

        def __len__(self) -> int:
            if self.away:
                raise OSError("no route")
            return 7

    held = Remote()
    watch = IndexWatch(SimpleNamespace(index=held), every=0)  # type: ignore[arg-type]
    seen = []
    for held.away in (False, True, True, False):
        watch.look()
        seen.append((watch.size, watch.behind, watch.foreign))
    assert seen == [(7, False, False), (7, True, False), (7, True, False), (7, False, False)]


def ask(client: TestClient) -> Any:
    return client.post("/search", json={"text": "a dog"})
