"""What every request passes before the application sees it, and every answer before it leaves."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext

from vacsr.search.service.bodies import Message, Receive, Room, drop_body, read_body, replayed
from vacsr.search.service.metrics import ServiceMetrics
from vacsr.search.service.problems import ClientGone, Problem, busy
from vacsr.search.service.settings import ServiceSettings

Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger("vacsr.service")

OPEN = ("/", "/healthz")
"""Paths that need no token: neither shows anything of the data."""
COUNTED = ("/", "/search", "/score", "/info", "/healthz", "/metrics", "/openapi.json")
"""Paths that are counted by name; photos are counted together, as is all that does not exist."""
UNLIMITED = ("/healthz", "/metrics")
"""Paths that are read at any load: whoever watches the service asks there, and neither waits for the model."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Answer:
    """A response on its way out: our headers where it has none of its own, and its status for the books."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        begins = message["type"] == "http.response.start"
        if begins:
            own = {name.lower() for name, _ in message.get("headers", ())}
            ours = [(name.encode(), value.encode()) for name, value in _HEADERS.items() if name.encode() not in own]
            message = {**message, "headers": [*message.get("headers", ()), *ours]}
        await self._send(message)  # may wait for a client that does not read
        if begins:
            self.status = message["status"]

    async def problem(self, problem: Problem) -> None:
        """Say what is wrong."""
        body = problem.body()
        fields = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self.send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


class Guard:
    """ASGI middleware: who may ask, how much at once, how large and how long; and no error tells of our insides."""

    def __init__(self, app: App, *, settings: ServiceSettings, metrics: ServiceMetrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.room = Room(settings.max_buffered)
        self.running = 0
        self._token = None if settings.token is None else _digest(settings.token)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One connection's request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        started, answer = time.perf_counter(), Answer(send)
        try:
            await self._answer(scope, receive, answer)
        except ClientGone:
            answer.status = 499  # as web servers count a client that left
        finally:
            path = _counted(scope["path"])
            self.metrics.requests.add((("path", path), ("status", str(answer.status))))
            self.metrics.seconds.add(time.perf_counter() - started, (("path", path),))

    async def _answer(self, scope: Message, receive: Receive, answer: Answer) -> None:
        try:
            await self._checked(scope, receive, answer)
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, Problem):
                log.error("%s %s failed", scope["method"], _counted(scope["path"]), exc_info=error)
                error = Problem(500, "internal", "the service failed; its log says why")
            if not answer.status:  # one that has begun can only be cut off, which the server does
                await answer.problem(error)

    async def _checked(self, scope: Message, receive: Receive, answer: Answer) -> None:
        """Strangers, what is refused unread, and who is still sending take no place from others."""
        headers, limits, read = _headers(scope), self.settings, False
        bare = scope["method"] in ("GET", "HEAD")
        try:
            self._check(scope["path"], headers)
            with self.room.held() as share:
                body = await read_body(
                    receive, declared=headers.get("content-length"), limit=0 if bare else limits.max_body,
                    seconds=limits.body_seconds, share=share,
                )  # fmt: skip
                read = True
                with nullcontext() if bare and scope["path"] in UNLIMITED else self._place():
                    await self._served(scope, replayed(body, receive), answer)
        except Problem as problem:
            if not read:  # so the connection is of no more use
                problem.headers["connection"] = "close"
                if problem.status != 408 and "expect" not in headers:
                    await drop_body(receive)
            raise

    async def _served(self, scope: Message, receive: Receive, answer: Answer) -> None:
        seconds = self.settings.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.app(scope, receive, answer.send)
        except TimeoutError as error:
            raise busy(f"no answer within {seconds:g} seconds", status=503, code="deadline") from error

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Among those that are served at once."""
        if self.running >= self.settings.concurrency:
            raise busy("too many requests at once")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _check(self, path: str, headers: dict[str, str]) -> None:
        """The name that is called, and the token."""
        host = _host_name(headers.get("host", ""))
        if self.settings.hosts is not None and host not in self.settings.hosts:
            raise Problem(421, "wrong_host", "the service is not known by this name")
        if self._token is None or path in OPEN:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), self._token):
            wanted = {"www-authenticate": "Bearer"}
            raise Problem(401, "no_token", "send the header Authorization: Bearer TOKEN", headers=wanted)


def _digest(token: str) -> bytes:
    """Of one length for any token, so that comparing tells nothing of it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _headers(scope: Message) -> dict[str, str]:
    """The first of each name."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return found


def _host_name(host: str) -> str:
    """Without port and brackets.

    >>> _host_name("[::1]:8000"), _host_name("LOCALHOST:80"), _host_name("127.0.0.1")
    ('::1', 'localhost', '127.0.0.1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _counted(path: str) -> str:
    if path.startswith("/photo/"):
        return "/photo/{id}"
    return path if path in COUNTED else "other"
