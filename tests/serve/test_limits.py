"""Over a real port: slow, idle and rude clients, paths as they are written, and the end."""

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from vacsr.serve import ServiceSettings
from vacsr.serve.limits import Limits

Start = Callable[..., Any]
HOST = "Host: localhost"
QUERY = b'{"text": "a dog"}'


def status(answer: bytes) -> int:
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert match, answer[:200]
    return int(match[1])


def clean(answer: bytes, wanted: int) -> bool:
    assert status(answer) == wanted, answer[:300]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert set(json.loads(body)["error"]) == {"code", "message"}
    assert b"uvicorn" not in head.lower()
    assert b"x-content-type-options: nosniff" in head
    return True


def get(path: str) -> str:
    return f"GET {path} HTTP/1.1\n{HOST}\nConnection: close"


def post(length: int, *more: str) -> str:
    lines = ["POST /search HTTP/1.1", HOST, "Content-Type: application/json", f"Content-Length: {length}", *more]
    return "\n".join(lines)


def start_upload(link: socket.socket, length: int, body: bytes = b"{", *more: str) -> None:
    link.sendall(post(length, *more).replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)


def search(service: Any, body: bytes = QUERY, *more: str) -> bytes:
    answer: bytes = service.ask(post(len(body), "Connection: close", *more), body)
    return answer


def until(wanted: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not wanted():
        assert time.monotonic() < end
        time.sleep(0.05)


PATHS = [
    "/photo/../../etc/passwd", "/photo/..%2f..%2fetc%2fpasswd", "/photo/%2e%2e/%2e%2e/etc/passwd", "/photo//etc/passwd",
    "/photo/%2Fetc%2Fpasswd", "/photo/....//etc/passwd", "/photo/..%5c..%5cwindows", "/photo/%00", "/photo/a%00.jpg",
    "/photo/%ff%fe", "/photo/%ed%a0%80", "/photo/file:%2F%2F%2Fetc%2Fpasswd", "/photo/" + "a" * 5000, "/photo/",
    "/photo", "/static/../x", "//healthz", "/healthz/", "/./healthz", "/docs", "/redoc", "/search/../page.html",
    "/page.html", "/.git/config", "http://evil.example/photo/x", "*",
]  # fmt: skip
NEAR = ["{}/", "./{}", "x/../{}", "{}x", "{}%00", "%20{}", "{}%2f"]
HEADS = [
    "nonsense",
    f"GET /ü HTTP/1.1\n{HOST}",
    f"GET /healthz HTTP/1.1\n{HOST}\nX: {'a' * 200_000}",
    "GET /healthz HTTP/1.1",  # no host
    f"{post(2)}\nContent-Length: 3",
    f"POST /search HTTP/1.1\n{HOST}\nContent-Length: -5",
]


def test_path_tricks_and_broken_heads(live: Start, world: Any) -> None:
    service, first = live(), world.photos.image_ids[0]
    assert status(service.ask(get(f"/photo/{first}"))) == 200
    for path in [*PATHS, *("/photo/" + name.format(first) for name in NEAR)]:
        assert clean(service.ask(get(path)), 404), path
    for head in HEADS:
        assert clean(service.ask(head), 400), head
    for version in ("9.9", "2.0", "0.9"):
        assert clean(service.ask(f"GET /healthz HTTP/{version}\n{HOST}"), 505)
    assert status(service.ask(get("/healthz"))) == 200


def test_slow_clients_get_408_and_are_not_in_the_way(live: Start) -> None:
    service = live(body_seconds=0.5, header_seconds=0.5, concurrency=1)
    links = _no_head, half_head, no_body, second = [service.connect() for _ in range(4)]
    half_head.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
    start_upload(no_body, 1000)
    second.sendall(f"GET /healthz HTTP/1.1\r\n{HOST}\r\n\r\n".encode())
    first = b""
    while b"ok" not in first:
        first += second.recv(65536)
    second.sendall(b"GET /hea")  # a second request may not be slow either
    drip = threading.Thread(target=_drip, args=(service,))
    drip.start()
    assert status(search(service)) == 200
    for link in links:
        assert clean(service.rest(link), 408)
        link.close()
    drip.join(20)
    assert not drip.is_alive(), "a byte now and then must not extend the time"


def _drip(service: Any) -> None:
    with service.connect() as link, suppress(OSError):
        while True:
            link.sendall(b"a")
            time.sleep(0.05)


def test_huge_bodies_over_the_wire(live: Start) -> None:
    service = live(max_body=10_000)
    assert clean(service.ask(post(10**12), b"x" * 100_000), 413)
    assert clean(service.ask(post(10**9, "Expect: 100-continue")), 413)
    chunked = f"POST /search HTTP/1.1\n{HOST}\nContent-Type: application/json\nTransfer-Encoding: chunked"
    part = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    assert clean(service.ask(chunked, part * 1000 + b"0\r\n\r\n"), 413)
    small = b"%x\r\n%s\r\n0\r\n\r\n" % (len(QUERY), QUERY)
    assert status(service.ask(f"{chunked}\nConnection: close", small)) == 200
    assert clean(service.ask(chunked, b"zz\r\nxx\r\n"), 400)
    assert status(search(service)) == 200


def test_a_client_that_leaves_costs_nothing(live: Start) -> None:
    service = live(concurrency=2)
    for _ in range(6):
        for length, body in ((1000, b"{"), (len(QUERY), QUERY)):
            with service.connect() as link:
                start_upload(link, length, body)
    until(lambda: status(search(service)) == 200)


def test_idle_connections_make_room(live: Start) -> None:
    service = live(connections=3)
    idle = [service.connect() for _ in range(8)]
    assert status(search(service)) == 200
    assert [link.recv(10) for link in idle[:5]] == [b""] * 5, "the oldest are closed"
    for link in idle:
        link.close()


def test_stalled_uploads_make_room(live: Start) -> None:
    """Neither connections nor buffered bytes are lost to them."""
    service = live(connections=8, max_buffered=100_000, max_body=30_000, body_seconds=60)
    stalled = [service.connect() for _ in range(12)]
    for link in stalled:
        start_upload(link, 25_000, b" " * 24_999)
    time.sleep(0.7)
    for _ in range(3):
        assert status(search(service, QUERY.ljust(30_000))) == 200
    for link in stalled:
        link.close()


def test_strangers_take_no_slot(live: Start) -> None:
    """Neither while their bodies are awaited nor while these are dropped."""
    service = live(concurrency=1, token="secret", max_body=2000)
    known = "Authorization: Bearer secret"
    with service.connect() as stranger, service.connect() as large:
        start_upload(stranger, 1000)
        start_upload(large, 10**6, b"{", known)
        time.sleep(0.2)  # both are being dropped now, for a second
        assert status(search(service, QUERY, known)) == 200
        assert clean(service.rest(stranger), 401)
        assert clean(service.rest(large), 413)


class Slow:
    """A searcher's method that waits until it is let go; questions asked meanwhile, and their answers."""

    def __init__(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go, self._inner = threading.Event(), threading.Event(), world.searcher.search_texts
        self.answers, self._threads = list[bytes](), list[threading.Thread]()
        monkeypatch.setattr(world.searcher, "search_texts", self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.began.set()
        assert self.go.wait(20)
        return self._inner(*args, **named)

    def ask(self, service: Any, times: int = 1) -> None:
        for _ in range(times):
            self._threads.append(threading.Thread(target=lambda: self.answers.append(search(service))))
            self._threads[-1].start()
        assert self.began.wait(10)
        time.sleep(0.2)

    def finish(self) -> list[int]:
        """Let go; the statuses of the answers."""
        self.go.set()
        for thread in self._threads:
            thread.join(20)
        return [status(answer) for answer in self.answers]


@pytest.fixture
def slow(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(world, monkeypatch)
    yield made
    made.finish()


def test_shutdown_finishes_what_runs_and_refuses_what_is_new(live: Start, slow: Slow) -> None:
    service = live()
    slow.ask(service)
    service.server.should_exit = True

    def closed() -> bool:
        with suppress(ConnectionRefusedError):
            service.connect().close()
            return False
        return True

    until(closed)
    assert not slow.answers
    assert slow.finish() == [200]
    service.thread.join(20)
    assert not service.thread.is_alive()


def test_more_than_it_may_do_at_once_is_told_to_come_back(live: Start, slow: Slow) -> None:
    service = live(concurrency=1)
    slow.ask(service)
    refused = search(service)
    assert clean(refused, 429)
    assert b"retry-after: 1" in refused
    for path in ("/healthz", "/metrics"):  # monitoring is answered at any load
        assert status(service.ask(get(path))) == 200
    assert clean(service.ask(get("/info")), 429)
    assert slow.finish() == [200]


def test_health_is_answered_when_all_connections_are_at_work(live: Start, slow: Slow) -> None:
    service = live(connections=2)
    slow.ask(service, times=2)
    assert clean(service.ask(get("/info")), 503)
    assert status(service.ask(get("/healthz"))) == 200
    assert slow.finish() == [200, 200]


def test_an_answer_that_takes_too_long(live: Start, slow: Slow) -> None:
    service = live(deadline_seconds=0.3)
    late = search(service)
    assert clean(late, 503)
    assert b"retry-after: 1" in late
    slow.finish()
    assert status(search(service)) == 200


def test_who_does_not_read_is_cut_off(live: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = live(write_seconds=0.5, deadline_seconds=0.2)
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)  # which does not propagate
    deaf = [socket.socket() for _ in range(3)]
    for link in deaf:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(("127.0.0.1", service.port))
        link.settimeout(0.2)
        with suppress(TimeoutError):
            for _ in range(2000):
                link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def gone() -> bool:
        return not service.server.server_state.connections or status(service.ask(get("/healthz"))) != 200

    until(gone)
    for link in deaf:
        link.close()
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.exc_info]


def answered(app: Any, send: Any) -> tuple[list[Any], CollectorRegistry]:
    """What an application's messages become behind the middleware, with a deadline of 50 ms; and the counts."""
    sent, registry = list[Any](), CollectorRegistry()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    limits = Limits(app, settings=ServiceSettings(deadline_seconds=0.05), registry=registry)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    asyncio.run(limits(scope, receive, lambda message: send(message, sent)))
    return sent, registry


@pytest.mark.parametrize("late", [True, False])
def test_an_answer_that_has_begun_is_cut_off(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A client that takes too long is no fault of ours; an error is, and is logged once."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if not late:
            raise RuntimeError("broken")
        await asyncio.sleep(10)

    async def send(message: Any, sent: list[Any]) -> None:
        sent.append(message["type"])

    assert answered(app, send)[0] == ["http.response.start"]
    assert len([record for record in caplog.records if record.exc_info]) == (0 if late else 1)


def test_a_client_that_reads_nothing_yet_gets_the_deadlines_answer() -> None:
    """What waits to begin has not begun: the answer is 503 when the client reads at last."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any, sent: list[Any]) -> None:
        if message.get("status") == 200:
            await asyncio.sleep(10)
        sent.append(message.get("status", 0))

    sent, registry = answered(app, send)
    assert sent == [503, 0]
    assert registry.get_sample_value("vacsr_requests_total", {"path": "/", "status": "503"}) == 1
