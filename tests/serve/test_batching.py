"""Queries that come together go through the model together, and each gets its own answer."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from vacsr.serve.batching import Batcher, Gone, ScoreJob, SearchJob, Worker, weight
from vacsr.serve.index_watch import IndexWatch
from vacsr.serve.schemas import ClientGone, Problem

Ask = Callable[..., list[asyncio.Task[int]]]


class Doubler:
    """Doubles numbers, refuses negative ones, and can be held up."""

    def __init__(self, *, held: bool = False) -> None:
        self.sizes, self.threads, self.gone = list[int](), set[int](), list[list[bool]]()
        self.began, self.go = threading.Event(), threading.Event()
        if not held:
            self.go.set()

    def __call__(self, jobs: Sequence[int], gone: Gone) -> list[int | Exception]:
        self.sizes.append(len(jobs))
        self.threads.add(threading.get_ident())
        self.began.set()
        assert self.go.wait(10)
        self.gone.append([gone(position) for position in range(len(jobs))])
        if 666 in jobs:
            raise RuntimeError("broken")
        return [ValueError(str(job)) if job < 0 else 2 * job for job in jobs]

    def batch(
        self, test: Callable[[Batcher[int, int], Ask, Any], Awaitable[None]], *first: int, size: int = 1,
        wait: float = 0.0, **named: Any,
    ) -> None:  # fmt: skip
        """Run a test with a batcher that is at work on the ``first`` jobs, and a way to ask for more."""

        async def main() -> None:
            batcher = Batcher(self, size=size, wait=wait, **named)

            def ask(*jobs: int) -> list[asyncio.Task[int]]:
                return [asyncio.create_task(batcher.submit(job)) for job in jobs]

            tasks = ask(*first)
            if first:
                await asyncio.to_thread(self.began.wait, 10)
            async with asyncio.timeout(10):
                await test(batcher, ask, tasks)
            self.go.set()
            if not batcher._closing:
                await batcher.close()

        asyncio.run(main())


def test_everyone_gets_their_own_and_batches_stay_within_their_size() -> None:
    work, done = Doubler(), list[int]()

    async def test(_batcher: Any, ask: Ask, _first: Any) -> None:
        outcomes = await asyncio.gather(*ask(*range(-2, 20)), return_exceptions=True)
        assert [str(one) for one in outcomes[:2]] == ["-2", "-1"]
        assert outcomes[2:] == [2 * n for n in range(20)]

    work.batch(test, size=4, wait=0.01, done=lambda size, _seconds: done.append(size))
    assert (max(work.sizes), sum(work.sizes), len(work.threads)) == (4, 22, 1)
    assert done == work.sizes


@pytest.mark.parametrize(("size", "wait", "jobs"), [(2, 60, (1, 2)), (100, 0.01, (3,))])
def test_a_full_batch_does_not_wait_and_a_lone_query_not_for_ever(size: int, wait: float, jobs: Any) -> None:
    work = Doubler()

    async def test(_batcher: Any, ask: Ask, _first: Any) -> None:
        assert await asyncio.gather(*ask(*jobs)) == [2 * job for job in jobs]

    work.batch(test, size=size, wait=wait)
    assert work.sizes == [len(jobs)]


def test_who_left_is_not_worked_for() -> None:
    """Nor is a batch that has begun kept from knowing."""
    work = Doubler(held=True)

    async def test(batcher: Any, ask: Ask, first: Any) -> None:
        waiting = ask(3, 4, 5)
        await asyncio.sleep(0.01)
        assert len(batcher) == 3
        for left in (first[1], waiting[0]):
            left.cancel()
        await asyncio.sleep(0)
        work.go.set()
        assert await asyncio.gather(first[0], *waiting[1:]) == [2, 8, 10]

    work.batch(test, 1, 2, size=2, wait=60)
    assert work.gone == [[False, True], [False, False]]


def test_batches_stay_within_their_weight() -> None:
    work, weights = Doubler(held=True), [3, 2, 9, 1, 1, 4]

    async def test(_batcher: Any, ask: Ask, first: Any) -> None:
        tasks = ask(*weights)
        await asyncio.sleep(0.01)
        work.go.set()
        assert await asyncio.gather(*first, *tasks) == [10, *(2 * n for n in weights)]

    work.batch(test, 5, size=5, weigh=lambda job: job)
    assert work.sizes == [1, 2, 1, 2, 1]  # 5 | 3 + 2 | 9, too heavy for company | 1 + 1 | 4
    assert weight(SearchJob("a", 1, "score")) == 1
    assert weight(ScoreJob(("a", "b"), (Image.new("RGB", (1, 1)),))) == 3


def test_closing_finishes_what_waits_and_takes_nothing_new() -> None:
    work = Doubler(held=True)

    async def test(batcher: Any, ask: Ask, first: Any) -> None:
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        with pytest.raises(Problem) as refused:
            await ask(9)[0]
        assert (refused.value.status, refused.value.code) == (503, "stopping")
        work.go.set()
        assert await closing
        assert await asyncio.gather(*first) == [0, 2, 4, 6, 8]

    work.batch(test, *range(5), size=2)


def test_closing_does_not_wait_for_ever() -> None:
    work = Doubler(held=True)

    async def test(batcher: Any, _ask: Ask, first: Any) -> None:
        assert not await batcher.close(seconds=0.05)
        work.go.set()
        assert await first[0] == 2

    work.batch(test, 1)


def test_a_failing_run_is_an_error_for_its_batch_only() -> None:
    async def test(batcher: Any, _ask: Ask, _first: Any) -> None:
        with pytest.raises(RuntimeError, match="broken"):
            await batcher.submit(666)
        assert await batcher.submit(2) == 4

    Doubler().batch(test)


@pytest.fixture
def calls(world: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Texts of each call of the searcher, which refuses "bad"."""
    made, inner = list[list[str]](), world.searcher.search_texts

    def search(texts: list[str], **named: Any) -> Any:
        made.append(list(texts))
        if "bad" in texts:
            raise RuntimeError("bad")
        return inner(texts, **named)

    monkeypatch.setattr(world.searcher, "search_texts", search)
    return made


def test_one_bad_query_does_not_spoil_the_others(world: Any, calls: list[list[str]]) -> None:
    jobs = [SearchJob(text, k, "score") for text, k in (("a", 2), ("bad", 2), ("b", 3), ("c", 2))]
    jobs.append(SearchJob("d", 2, "score", 1.0))
    outcomes: list[Any] = Worker(world.searcher, IndexWatch(world.searcher))(jobs)
    assert isinstance(outcomes[1], RuntimeError)
    assert calls[0] == ["a", "bad", "c"], "alike queries go together"
    assert outcomes[4].hits == (), "its least grade is its own"
    for position, text, k in ((0, "a", 2), (2, "b", 3), (3, "c", 2)):
        alone = world.searcher.search_texts([text], k=k)[0]
        assert [hit.id for hit in outcomes[position].hits] == [hit.id for hit in alone.hits]


def test_no_work_for_those_who_left(world: Any, calls: list[list[str]]) -> None:
    jobs = [SearchJob(text, k, "score") for text, k in (("a", 2), ("b", 2), ("c", 2), ("d", 3))]
    leaves_meanwhile = 3
    outcomes = Worker(world.searcher, IndexWatch(world.searcher))(
        jobs, lambda position: position == 1 or (position == leaves_meanwhile and bool(calls))
    )
    assert calls == [["a", "c"]]
    assert [isinstance(one, ClientGone) for one in outcomes] == [False, True, False, True]


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
    registry = client.app.state.service.registry  # type: ignore[attr-defined]
    assert registry.get_sample_value("vacsr_batch_size_sum") == 18
    assert registry.get_sample_value("vacsr_batch_size_count") < 18
