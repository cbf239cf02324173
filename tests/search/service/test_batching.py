"""Queries that come together go through the model together, and each gets its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from vacsr.search.service.batching import Batch, Batcher, Gone
from vacsr.search.service.bodies import Room
from vacsr.search.service.problems import ClientGone, Problem
from vacsr.search.service.upkeep import IndexWatch
from vacsr.search.service.work import ScoreJob, SearchJob, Worker, weight


class Doubler:
    """Doubles numbers, refuses negative ones, and can be held up."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: set[int] = set()
        self.began, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __call__(self, jobs: Sequence[int], _gone: Gone) -> list[int | Exception]:
        self.sizes.append(len(jobs))
        self.threads.add(threading.get_ident())
        self.began.set()
        assert self.go.wait(10)
        return [ValueError(str(job)) if job < 0 else 2 * job for job in jobs]


def test_everyone_gets_their_own_and_batches_stay_within_their_size() -> None:
    work, done = Doubler(), list[Batch]()

    async def main() -> list[int | BaseException]:
        batcher = Batcher(work, size=4, wait=0.01, room=100, done=done.append)
        found = await asyncio.gather(*(batcher.submit(n) for n in range(-2, 20)), return_exceptions=True)
        await batcher.close()
        return found

    found = asyncio.run(main())
    assert [str(one) for one in found[:2]] == ["-2", "-1"]
    assert found[2:] == [2 * n for n in range(20)]
    assert max(work.sizes) == 4
    assert sum(work.sizes) == 22
    assert len(work.threads) == 1
    assert [batch.size for batch in done] == work.sizes


def test_a_full_batch_does_not_wait_and_a_lone_query_not_for_ever() -> None:
    work = Doubler()

    async def main() -> None:
        batcher = Batcher(work, size=2, wait=60, room=10)
        async with asyncio.timeout(10):
            assert await asyncio.gather(batcher.submit(1), batcher.submit(2)) == [2, 4]
        await batcher.close()
        short = Batcher(work, size=100, wait=0.01, room=10)
        async with asyncio.timeout(10):
            assert await short.submit(3) == 6
        await short.close()

    asyncio.run(main())
    assert work.sizes == [2, 1]


def test_a_full_queue_refuses_and_who_left_is_not_worked_for() -> None:
    work = Doubler()
    work.go.clear()

    async def main() -> None:
        batcher = Batcher(work, size=1, wait=0, room=2)
        first = asyncio.create_task(batcher.submit(1))
        await asyncio.to_thread(work.began.wait, 10)
        leaving, staying = (asyncio.create_task(batcher.submit(n)) for n in (2, 3))
        await asyncio.sleep(0.01)
        with pytest.raises(Problem) as refused:
            await batcher.submit(4)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
        leaving.cancel()
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(first, staying) == [2, 6]
        await batcher.close()

    asyncio.run(main())
    assert work.sizes == [1, 1]


def test_batches_stay_within_their_weight() -> None:
    work, weights = Doubler(), [3, 2, 9, 1, 1, 4]
    work.go.clear()

    async def main() -> None:
        batcher = Batcher(work, size=5, wait=0, room=10, weigh=lambda job: job)
        first = asyncio.create_task(batcher.submit(5))
        await asyncio.to_thread(work.began.wait, 10)
        rest = [asyncio.create_task(batcher.submit(n)) for n in weights]
        await asyncio.sleep(0.01)
        work.go.set()
        assert await asyncio.gather(first, *rest) == [10, *(2 * n for n in weights)]
        await batcher.close()

    asyncio.run(main())
    assert work.sizes == [1, 2, 1, 2, 1]  # 5 | 3 + 2 | 9, too heavy for company | 1 + 1 | 4
    assert weight(SearchJob("a", 1, "score")) == 1
    assert weight(ScoreJob(("a", "b"), (Image.new("RGB", (1, 1)),))) == 3


def test_the_worker_is_told_who_has_left() -> None:
    seen, began, go = list[list[bool]](), threading.Event(), threading.Event()

    def run(jobs: Sequence[int], gone: Gone) -> list[int | Exception]:
        began.set()
        assert go.wait(10)
        seen.append([gone(place) for place in range(len(jobs))])
        return list(jobs)

    async def main() -> None:
        batcher = Batcher(run, size=2, wait=60, room=10)
        staying, leaving = (asyncio.create_task(batcher.submit(n)) for n in (1, 2))
        await asyncio.to_thread(began.wait, 10)
        leaving.cancel()
        await asyncio.sleep(0)
        go.set()
        assert await staying == 1
        await batcher.close()

    asyncio.run(main())
    assert seen == [[False, True]]


def test_closing_finishes_what_waits_and_takes_nothing_new() -> None:
    work = Doubler()
    work.go.clear()

    async def main() -> None:
        batcher = Batcher(work, size=2, wait=0, room=10)
        asked = [asyncio.create_task(batcher.submit(n)) for n in range(5)]
        await asyncio.to_thread(work.began.wait, 10)
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        with pytest.raises(Problem) as refused:
            await batcher.submit(9)
        assert refused.value.status == 503
        work.go.set()
        await closing
        assert [await one for one in asked] == [0, 2, 4, 6, 8]

    asyncio.run(main())


def test_a_failing_run_is_an_error_for_its_batch_only() -> None:
    calls = []

    def run(jobs: Sequence[int], _gone: Gone) -> list[int | Exception]:
        calls.append(len(jobs))
        if len(calls) == 1:
            raise RuntimeError("broken")
        return list(jobs)

    async def main() -> None:
        batcher = Batcher(run, size=8, wait=0.0, room=10)
        with pytest.raises(RuntimeError, match="broken"):
            await batcher.submit(1)
        assert await batcher.submit(2) == 2
        await batcher.close()

    asyncio.run(main())


def test_one_bad_query_does_not_spoil_the_others(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, inner = list[list[str]](), world.searcher.search_texts

    def search(texts: list[str], **named: Any) -> Any:
        calls.append(list(texts))
        if "bad" in texts:
            raise RuntimeError("bad")
        return inner(texts, **named)

    monkeypatch.setattr(world.searcher, "search_texts", search)
    jobs = [SearchJob(text, k, "score") for text, k in (("a", 2), ("bad", 2), ("b", 3), ("c", 2))]
    found = Worker(world.searcher, IndexWatch(world.searcher, every=60))(jobs)
    assert isinstance(found[1], RuntimeError)
    assert calls[0] == ["a", "bad", "c"], "alike queries go together"
    for place, text, k in ((0, "a", 2), (2, "b", 3), (3, "c", 2)):
        alone = inner([text], k=k)[0]
        assert [hit.id for hit in found[place].hits] == [hit.id for hit in alone.hits]  # type: ignore[union-attr]


def test_no_work_for_those_who_left(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, inner, left = list[list[str]](), world.searcher.search_texts, {1}

    def search(texts: list[str], **named: Any) -> Any:
        calls.append(list(texts))
        left.add(3)  # while the first group is worked on
        return inner(texts, **named)

    monkeypatch.setattr(world.searcher, "search_texts", search)
    jobs = [SearchJob(text, k, "score") for text, k in (("a", 2), ("b", 2), ("c", 2), ("d", 3))]
    found = Worker(world.searcher, IndexWatch(world.searcher, every=60))(jobs, left.__contains__)
    assert calls == [["a", "c"]]
    assert [isinstance(one, ClientGone) for one in found] == [False, True, False, True]


def test_many_clients_get_what_each_would_get_alone(opened: Callable[..., TestClient]) -> None:
    client = opened(batch=8, batch_ms=20)
    texts = [f"a {colour} {thing}" for colour in ("red", "blue", "green") for thing in ("circle", "square", "star")]

    def ask(text: str) -> Any:
        answer = client.post("/search", json={"text": text, "k": 5})
        assert answer.status_code == 200
        return [(hit["id"], round(hit["score"], 4)) for hit in answer.json()["hits"]]

    alone = [ask(text) for text in texts]
    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(ask, texts)) == alone
    text = client.get("/metrics").text
    batches = float(text.split("vacsr_batch_size_count ")[1].split("\n")[0])
    queries = float(text.split("vacsr_batch_size_sum ")[1].split("\n")[0])
    assert queries == 18
    assert batches < queries


def test_the_room_for_bodies_is_given_back() -> None:
    room = Room(100)
    with room.held() as one, room.held() as two:
        one.grow(60)
        two.grow(40)
        with pytest.raises(Problem) as refused:
            one.grow(1)
        assert refused.value.status == 429
    assert room.used == 0
