"""Over a real port: slow and rude clients, paths as they are written, and the end."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]
HOST = "Host: localhost"
QUERY = b'{"text": "a dog"}'


def status(answer: bytes) -> int:
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    assert match, answer[:200]
    return int(match[1])


def clean(answer: bytes, wanted: int) -> bool:
    """One answer, in our form."""
    assert status(answer) == wanted, answer[:300]
    head, _, body = answer.partition(b"\r\n\r\n")
    assert set(json.loads(body)["error"]) == {"code", "message"}
    assert b"uvicorn" not in head.lower()
    return True


def post(length: int, *more: str, path: str = "/search") -> str:
    return "\n".join(
        [f"POST {path} HTTP/1.1", HOST, "Content-Type: application/json", f"Content-Length: {length}", *more]
    )


PATHS = [
    "/photo/../../etc/passwd",
    "/photo/..%2f..%2fetc%2fpasswd",
    "/photo/%2e%2e/%2e%2e/etc/passwd",
    "/photo//etc/passwd",
    "/photo/%2Fetc%2Fpasswd",
    "/photo/....//etc/passwd",
    "/photo/..%5c..%5cwindows",
    "/photo/%00",
    "/photo/a%00.jpg",
    "/photo/%ff%fe",
    "/photo/%ed%a0%80",
    "/photo/file:%2F%2F%2Fetc%2Fpasswd",
    "/photo/" + "a" * 5000,
    "/photo/",
    "/photo",
    "/static/../x",
    "//healthz",
    "/healthz/",
    "/./healthz",
    "/docs",
    "/redoc",
    "/search/../page.html",
    "/page.html",
    "/.git/config",
    "http://evil.example/photo/x",
    "*",
]


def test_path_tricks_and_broken_heads(live: Start, world: Any) -> None:
    service, first = live(), world.photos.image_ids[0]
    assert status(service.ask(f"GET /photo/{first} HTTP/1.1\n{HOST}\nConnection: close")) == 200
    near = [f"{first}/", f"./{first}", f"x/../{first}", f"{first}x", f"{first}%00", f"%20{first}", f"{first}%2f"]
    for path in [*PATHS, *(f"/photo/{name}" for name in near)]:
        assert clean(service.ask(f"GET {path} HTTP/1.1\n{HOST}\nConnection: close"), 404), path
    for head in (
        "nonsense",
        f"GET /ü HTTP/1.1\n{HOST}",
        f"GET /healthz HTTP/1.1\n{HOST}\nX: {'a' * 200_000}",
        "GET /healthz HTTP/1.1",  # no host
        f"{post(2)}\nContent-Length: 3",
        f"POST /search HTTP/1.1\n{HOST}\nContent-Length: -5",
    ):
        assert clean(service.ask(head), 400), head
    assert status(service.ask(f"GET /healthz HTTP/1.1\n{HOST}\nConnection: close")) == 200


def test_slow_clients_are_told_and_do_not_stand_in_the_way(live: Start) -> None:
    service = live(body_seconds=0.5, header_seconds=0.5, concurrency=4)
    with service.connect() as no_head, service.connect() as half_head, service.connect() as no_body:
        half_head.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        no_body.sendall(post(1000).replace("\n", "\r\n").encode() + b"\r\n\r\n{")
        drip = threading.Thread(target=_drip, args=(service,))
        drip.start()
        started = time.monotonic()
        quick = service.ask(post(len(QUERY), "Connection: close"), QUERY)
        assert status(quick) == 200
        for link in (no_head, half_head, no_body):
            assert clean(service.rest(link), 408)
        drip.join()
        assert time.monotonic() - started < 15, "a drip must not extend the time"


def _drip(service: Any) -> None:
    """A byte now and then does not buy more time."""
    with service.connect() as link:
        try:
            for letter in post(1000).replace("\n", "\r\n").encode():
                link.sendall(bytes([letter]))
                time.sleep(0.05)
        except OSError:
            return
    raise AssertionError("the service waited for a head that came byte by byte")


def test_a_second_request_may_not_be_slow_either(live: Start) -> None:
    service = live(header_seconds=0.4)
    with service.connect() as link:
        link.sendall(f"GET /healthz HTTP/1.1\r\n{HOST}\r\n\r\n".encode())
        first = b""
        while b"ok" not in first:
            first += link.recv(65536)
        assert status(first) == 200
        link.sendall(b"GET /hea")
        assert clean(service.rest(link), 408)


def test_huge_bodies_over_the_wire(live: Start) -> None:
    service = live(max_body=10_000)
    assert clean(service.ask(post(10**12), b"x" * 100_000), 413)
    expecting = post(10**9, "Expect: 100-continue")
    assert clean(service.ask(expecting), 413)
    chunked = f"POST /search HTTP/1.1\n{HOST}\nContent-Type: application/json\nTransfer-Encoding: chunked"
    part = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    assert clean(service.ask(chunked, part * 1000 + b"0\r\n\r\n"), 413)
    small = b"%x\r\n%s\r\n0\r\n\r\n" % (len(QUERY), QUERY)
    assert status(service.ask(f"{chunked}\nConnection: close", small)) == 200
    assert clean(service.ask(chunked, b"zz\r\nxx\r\n"), 400)
    assert status(service.ask(post(len(QUERY), "Connection: close"), QUERY)) == 200


def test_a_client_that_leaves_costs_nothing(live: Start) -> None:
    service = live(concurrency=2)
    for _ in range(6):
        with service.connect() as link:
            link.sendall(post(1000).replace("\n", "\r\n").encode() + b"\r\n\r\n{")
        with service.connect() as link:
            link.sendall(post(len(QUERY)).replace("\n", "\r\n").encode() + b"\r\n\r\n" + QUERY)
    deadline = time.monotonic() + 10
    while status(service.ask(post(len(QUERY), "Connection: close"), QUERY)) != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_too_many_connections(live: Start) -> None:
    service = live(connections=2)
    with service.connect(), service.connect():
        time.sleep(0.1)
        with service.connect() as third:
            answer = service.rest(third)
    assert clean(answer, 503)
    assert b"retry-after: 1" in answer


class Slow:
    """A searcher's method that waits until it is let go."""

    def __init__(self, searcher: Any) -> None:
        self.began, self.go, self._inner = threading.Event(), threading.Event(), searcher.search_texts

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.began.set()
        assert self.go.wait(20)
        return self._inner(*args, **named)


def _later(service: Any, answers: list[bytes]) -> threading.Thread:
    def ask() -> None:
        answers.append(service.ask(post(len(QUERY), "Connection: close"), QUERY))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_shutdown_finishes_what_runs_and_refuses_what_is_new(
    live: Start, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(world.searcher)
    monkeypatch.setattr(world.searcher, "search_texts", slow)
    service, answers = live(), []
    asking = _later(service, answers)
    assert slow.began.wait(10)
    service.server.should_exit = True
    deadline = time.monotonic() + 10
    while True:
        try:
            service.connect().close()
        except ConnectionRefusedError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not answers
    slow.go.set()
    asking.join(20)
    assert status(answers[0]) == 200
    service.thread.join(20)
    assert not service.thread.is_alive()


def test_more_than_it_may_do_at_once_is_told_to_come_back(
    live: Start, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(world.searcher)
    monkeypatch.setattr(world.searcher, "search_texts", slow)
    service, answers = live(concurrency=1), []
    asking = _later(service, answers)
    assert slow.began.wait(10)
    refused = service.ask(post(len(QUERY), "Connection: close"), QUERY)
    assert clean(refused, 429)
    assert b"retry-after: 1" in refused
    for path in ("/healthz", "/metrics"):  # whoever watches is told at any load
        assert status(service.ask(f"GET {path} HTTP/1.1\n{HOST}\nConnection: close")) == 200
    assert clean(service.ask(f"GET /info HTTP/1.1\n{HOST}\nConnection: close"), 429)
    slow.go.set()
    asking.join(20)
    assert status(answers[0]) == 200


def test_strangers_take_no_place(live: Start) -> None:
    """Neither while their bodies are awaited nor while these are dropped."""
    service = live(concurrency=1, token="secret", max_body=2000)
    known = "Authorization: Bearer secret"
    with service.connect() as stranger, service.connect() as large:
        stranger.sendall(post(1000).replace("\n", "\r\n").encode() + b"\r\n\r\n{")
        large.sendall(post(10**6, known).replace("\n", "\r\n").encode() + b"\r\n\r\n{")
        time.sleep(0.2)  # both are being dropped now, for a second
        assert status(service.ask(post(len(QUERY), f"{known}\nConnection: close"), QUERY)) == 200
        assert clean(service.rest(stranger), 401)
        assert clean(service.rest(large), 413)


def test_an_answer_that_takes_too_long(live: Start, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(world.searcher)
    monkeypatch.setattr(world.searcher, "search_texts", slow)
    service = live(deadline_seconds=0.3)
    late = service.ask(post(len(QUERY), "Connection: close"), QUERY)
    assert clean(late, 503)
    assert b"retry-after: 1" in late
    slow.go.set()
    monkeypatch.undo()
    assert status(service.ask(post(len(QUERY), "Connection: close"), QUERY)) == 200


def test_the_port_is_taken() -> None:
    from vacsr.errors import EnvironmentProblem, UsageError
    from vacsr.search.service.server import bind

    with bind("127.0.0.1", 0) as held, pytest.raises(EnvironmentProblem, match="is taken"):
        bind("127.0.0.1", held.getsockname()[1])
    for host in ("no.such.host.invalid", "203.0.113.1", "a..b", "x" * 300):
        with pytest.raises(UsageError, match="--host"):
            bind(host, 0)
    if socket.has_ipv6:
        with bind("::1", 0) as six:
            assert six.family == socket.AF_INET6
