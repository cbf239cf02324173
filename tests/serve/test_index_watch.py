"""An index that changes while it is served: rebuilt by the same model it is opened, by another it is refused."""

import os
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
from vacsr.files import write_json
from vacsr.search import embedding_provenance, open_index
from vacsr.search.searcher import Searcher
from vacsr.serve import ServiceSettings, create_app
from vacsr.serve.index_watch import IndexWatch


class Served:
    """A service of an index in a folder that is looked at all the time."""

    def __init__(self, world: Any, folder: Path) -> None:
        self._world, self.folder = world, folder
        self.fill(["a", "b"])

    def fill(self, names: list[str], provenance: str = "") -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        model = embedding_provenance(self._world.searcher.scorer.model)
        made = open_index(f"exact:{self.folder}", dim=8, provenance=provenance or model, create=True)
        if names:
            made.add(names, torch.eye(8)[: len(names)])
        made.close()

    def start(self, photos: Callable[[], list[Any]] | None = None) -> TestClient:
        searcher = Searcher(self._world.searcher.scorer, open_index(f"exact:{self.folder}"))
        self.client = TestClient(create_app(searcher, ServiceSettings(refresh_seconds=0), photos=photos))
        return self.client

    def ask(self) -> Any:
        return self.client.post("/search", json={"text": "a dog"})

    def ids(self) -> set[str]:
        answer = self.ask()
        return {hit["id"] for hit in answer.json()["hits"]} if answer.status_code == 200 else set()

    def metric(self, name: str) -> float:
        return float(self.client.get("/metrics").text.split(f"\nvacsr_index_{name} ")[1].split("\n")[0])


@pytest.fixture
def served(tmp_path: Path, world: Any) -> Served:
    return Served(world, tmp_path / "index")


def until(wanted: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not wanted():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_one_rebuilt_by_the_same_model_is_served(served: Served) -> None:
    with served.start() as client:
        assert served.ids() == {"a", "b"}
        served.fill(["c"])
        until(lambda: served.ids() == {"c"})
        assert client.get("/info").json()["index_size"] == 1
        assert (served.metric("reopened_total"), served.metric("stale")) == (1, 0)


def test_a_new_calibration_of_the_index_is_used(served: Served, world: Any, calibrated: Any, tmp_path: Path) -> None:
    """As when `vacsr index add` fits it again in another process; a broken one leaves that of before."""
    served.fill(["a", "b"])
    file = served.folder / "search.json"
    searcher = Searcher.from_pretrained(world.model, open_index(f"exact:{served.folder}"), device="cpu")
    with TestClient(create_app(searcher, ServiceSettings(refresh_seconds=0))) as served.client:
        assert served.ask().json()["cutoff"] is None
        for cutoff in (0.25, 0.5):
            write_json(file, calibrated(cutoff).calibration.model_dump(mode="json"))
            until(lambda cutoff=cutoff: served.ask().json()["cutoff"] == cutoff)
        assert served.client.get("/info").json()["calibrated"]
        file.write_text("{")
        until(lambda: served.metric("stale") == 1)
        assert served.ask().json()["cutoff"] == 0.5
        file.unlink()
        until(lambda: served.ask().json()["cutoff"] is None)
        assert served.metric("stale") == 0


def test_one_of_another_model_is_refused_until_it_is_right_again(served: Served, world: Any) -> None:
    with served.start(lambda: [world.photos]) as client:
        served.fill(["c"], "images:of another model")
        until(lambda: client.get("/healthz").status_code == 503)  # noticed while nobody searches
        answer = served.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stale_index")
        assert "start the service again" in answer.json()["error"]["message"]
        assert str(served.folder) not in answer.text
        assert int(answer.headers["retry-after"]) > 1
        assert client.get(f"/photo/{world.photos.image_ids[0]}").status_code == 503
        assert served.metric("stale") == 1
        served.fill(["d"])
        until(lambda: served.ids() == {"d"})
        assert client.get("/healthz").json() == {"status": "ok"}
        assert served.metric("stale") == 0


def test_one_that_is_empty_for_a_moment_asks_to_come_back(served: Served) -> None:
    with served.start():
        served.fill([])
        until(lambda: served.ask().status_code == 503)
        answer = served.ask()
        assert (answer.json()["error"]["code"], answer.headers["retry-after"]) == ("empty_index", "1")
        open_index(f"exact:{served.folder}").add(["c"], torch.eye(8)[:1])
        until(lambda: served.ids() == {"c"})


def test_photos_are_found_again_after_a_change(served: Served, world: Any, caplog: pytest.LogCaptureFixture) -> None:
    names, calls = world.photos.image_ids, []

    def photos() -> list[Any]:
        calls.append(len(calls))
        if len(calls) == 2:
            raise DataError("the folder is gone")
        return [world.photos.subset([0]) if len(calls) == 1 else world.photos]

    def shown() -> set[str]:
        return {hit["id"] for hit in served.ask().json()["hits"] if hit["photo"] is not None}

    served.fill(names[:2])
    with served.start(photos) as client:
        assert shown() == {names[0]}
        other = open_index(f"exact:{served.folder}")
        other.add([names[2]], torch.eye(8)[2:3])
        until(lambda: any("the folder is gone" in record.message for record in caplog.records))
        assert shown() == {names[0]}, "what was there stays"
        other.note_source("folder:elsewhere")
        until(lambda: shown() == set(names[:3]))
        assert client.get(f"/photo/{names[2]}").status_code == 200
        other.close()
    assert calls == [0, 1, 2]


def test_one_that_is_gone_for_a_while_answers_as_before(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.start() as client:
        shutil.move(served.folder, served.folder.with_name("away"))
        until(lambda: served.metric("stale"))
        for _ in range(3):
            assert served.ids() == {"a", "b"}
        assert client.get("/healthz").status_code == 200
        assert sum("could not be read again" in record.message for record in caplog.records) == 1
        shutil.move(served.folder.with_name("away"), served.folder)
        until(lambda: not served.metric("stale"))
        assert served.metric("reopened_total") == 0


def test_one_that_is_cut_off_in_place(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.start() as client:
        assert served.ids() == {"a", "b"}
        (vectors,) = served.folder.glob("vectors-*")
        os.truncate(vectors, 0)
        answer = served.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "damaged_index")
        assert "is damaged" in caplog.text
        assert str(served.folder) not in answer.text
        assert client.get("/info").status_code == 200
        served.fill(["c"])
        until(lambda: served.ids() == {"c"})


def test_what_others_add_is_found_whatever_it_is_called(served: Served) -> None:
    with served.start():
        other = open_index(f"exact:{served.folder}")
        other.add(["half \ud800"], -torch.eye(8)[:1], [{"note": "\ud800"}])
        until(lambda: "half \ud800" in served.ids())
        notes = [hit["metadata"].get("note") for hit in served.ask().json()["hits"]]
        assert "\ud800" in notes, "half a pair is not UTF-8, and is JSON"


def test_a_server_that_is_away_for_a_while_is_asked_again() -> None:
    class Remote:
        """As much of an index on a server as a watch sees."""

        away = False
        sources = ("folder:photos",)

        def __len__(self) -> int:
            if self.away:
                raise OSError("no route")
            return 7

    remote = Remote()
    watch = IndexWatch(SimpleNamespace(index=remote, refresh_calibration=lambda: None))  # type: ignore[arg-type]
    seen = []
    for remote.away in (False, True, True, False):
        watch.look()
        seen.append((watch.size, watch.stale, watch.foreign))
    assert seen == [(7, False, False), (7, True, False), (7, True, False), (7, False, False)]
