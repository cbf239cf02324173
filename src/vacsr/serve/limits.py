"""Where limits are enforced: in ASGI middleware around the application, and in uvicorn's HTTP protocol below it."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import ClassVar

import h11
from fastapi.security import HTTPBearer
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vacsr.serve.schemas import ClientGone, Problem, ServiceSettings, busy

log = logging.getLogger("vacsr.serve")

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # buckets of the histograms of times
_OPEN = ("/", "/healthz")  # need no token: neither shows anything of the data
_UNLIMITED = ("/healthz", "/metrics")  # answered at any load: neither waits for the model
_LABELS = ("/", "/search", "/score", "/info", "/healthz", "/metrics", "/openapi.json")
_LINGER = 1.0  # seconds; most clients read no answer before they have sent everything
_STALL, _PROGRESS = 0.5, 2**16  # an upload is stalled when so many seconds brought fewer bytes than this
_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_RAW_HEADERS = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]


class _Upload:
    """A request body on its way, and when it last made progress."""

    def __init__(self) -> None:
        self.size = self.marked_size = 0
        self.marked_at, self.timeout = time.monotonic(), asyncio.timeout(None)


class Bodies:
    """Request bodies in memory, each and together within limits."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings, self._arriving, self.used = settings, set[_Upload](), 0

    @asynccontextmanager
    async def read(self, receive: Receive, *, declared: str | None, limit: int) -> AsyncIterator[bytes]:
        """The whole body; it counts until the request is answered. ``declared``: the header content-length."""
        if declared is not None and int(declared[:20]) > limit:  # h11 has refused what is not a number
            raise _too_large(limit)
        upload = _Upload()
        try:
            yield await self._arrived(upload, receive, limit=limit)
        finally:
            self.used -= upload.size

    async def _arrived(self, upload: _Upload, receive: Receive, *, limit: int) -> bytes:
        seconds, parts, more = self._settings.body_seconds, bytearray(), True
        self._arriving.add(upload)
        try:
            async with upload.timeout:
                upload.timeout.reschedule(asyncio.get_running_loop().time() + seconds)
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if len(parts) + len(part) > limit:
                        raise _too_large(limit)
                    self._make_room(upload, len(part))
                    parts += part
        except TimeoutError as error:
            raise Problem(408, "too_slow", f"the request took more than {seconds:g} seconds to arrive") from error
        finally:
            self._arriving.discard(upload)
        return bytes(parts)

    def _make_room(self, upload: _Upload, size: int) -> None:
        """Count ``size`` more bytes of an upload. Where there is no room, others that have stalled are ended."""
        while self.used + size > self._settings.max_buffered:
            others = (other for other in self._arriving if other is not upload and other.size)
            stalled = min(others, key=lambda other: other.marked_at, default=None)
            if stalled is None or time.monotonic() - stalled.marked_at < _STALL:
                raise busy("too many large requests at once")
            self.used -= stalled.size
            stalled.size = 0
            stalled.timeout.reschedule(asyncio.get_running_loop().time())
        self.used += size
        upload.size += size
        if upload.size - upload.marked_size >= _PROGRESS:  # a few bytes now and then do not count
            upload.marked_size, upload.marked_at = upload.size, time.monotonic()


def _too_large(limit: int) -> Problem:
    allowed = f"a request may have at most {limit:,} bytes" if limit else "a request with this method has no body"
    return Problem(413, "body_too_large", allowed)


class Limits:
    """ASGI middleware: host, token, body, concurrency and deadline of a request; headers and counts of its answer.

    The application finds the body in ``request.state.body``. Starlette's TrustedHostMiddleware would answer in plain
    text, and does not know IPv6 addresses.
    """

    def __init__(self, app: ASGIApp, *, settings: ServiceSettings, registry: CollectorRegistry) -> None:
        self.app, self.settings, self.bodies, self.running = app, settings, Bodies(settings), 0
        self._bearer = HTTPBearer(auto_error=False)
        self._requests = Counter(
            "vacsr_requests_total", "Responses by path and status.", ("path", "status"), registry=registry
        )
        self._seconds = Histogram(
            "vacsr_request_seconds", "Time to answer, by path.", ("path",), registry=registry, buckets=SECONDS
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, count it, and show nothing of an error of ours."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status, path = time.perf_counter(), 0, _label(scope["path"])

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                sent = {name for name, _ in headers}
                message["headers"] = headers + [header for header in _RAW_HEADERS if header[0] not in sent]
            await send(message)  # may wait for a client that does not read
            status = message.get("status", status)

        try:
            await self._admit(scope, receive, reply)
        except ClientGone:
            status = 499  # as web servers count a client that left
        except Exception as error:
            if not isinstance(error, Problem):
                log.error("%s %s failed", scope["method"], path, exc_info=error)
                error = Problem(500, "internal", "the service failed; its log says why")
            if not status:  # an answer that has begun can only be cut off, which the server does
                await error.response()(scope, receive, reply)
        finally:
            self._requests.labels(path, str(status)).inc()
            self._seconds.labels(path).observe(time.perf_counter() - started)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unauthorized, refused and still uploading requests do not count towards ``concurrency``."""
        headers, read = Headers(scope=scope), False
        bare, unlimited = scope["method"] in ("GET", "HEAD"), scope["path"] in _UNLIMITED
        try:
            await self._check(scope, headers, unlimited=unlimited)
            limit = 0 if bare else self.settings.max_body
            async with self.bodies.read(receive, declared=headers.get("content-length"), limit=limit) as body:
                read = True
                scope.setdefault("state", {})["body"] = body
                await self._serve(scope, receive, send, slots=0 if bare and unlimited else 1)
        except Problem as problem:
            if not read:  # the rest of the request would be taken for another one
                problem.headers["connection"] = "close"
                if problem.status != 408 and "expect" not in headers:
                    await _drop_body(receive)
            raise

    async def _check(self, scope: Scope, headers: Headers, *, unlimited: bool) -> None:
        if scope.get("http_version", "1.1") not in ("1.0", "1.1"):
            raise Problem(505, "bad_http", "the service supports HTTP/1.1 only")
        if self.settings.hosts is not None and _host_name(headers.get("host", "")) not in self.settings.hosts:
            raise Problem(421, "wrong_host", "the service does not accept this host name")
        if self.settings.token is not None and scope["path"] not in _OPEN:
            credentials = await self._bearer(Request(scope))
            sent = b"" if credentials is None else credentials.credentials.strip().encode()
            if not hmac.compare_digest(sent, self.settings.token.encode()):
                wanted = {"www-authenticate": "Bearer"}
                raise Problem(401, "no_token", "send the header Authorization: Bearer TOKEN", wanted)
        if scope.get("state", {}).get("full") and not unlimited:
            raise busy("too many connections", status=503)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *, slots: int) -> None:
        if self.running + slots > self.settings.concurrency:
            raise busy("too many requests at once")
        seconds = self.settings.deadline_seconds
        self.running += slots
        try:
            async with asyncio.timeout(seconds):
                await self.app(scope, receive, send)
        except TimeoutError as error:
            raise busy(f"no answer within {seconds:g} seconds", status=503, code="deadline") from error
        finally:
            self.running -= slots


async def _drop_body(receive: Receive) -> None:
    """Read on for a moment, so that a client that is still sending gets to the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while (message := await receive()).get("more_body", False):
                pass
            if message["type"] == "http.disconnect":
                raise ClientGone


def _host_name(host: str) -> str:
    """Without port and brackets.

    >>> _host_name("[::1]:8000"), _host_name("LOCALHOST:80"), _host_name("127.0.0.1")
    ('::1', 'localhost', '127.0.0.1')
    """
    return (host[1:].partition("]") if host.startswith("[") else host.partition(":"))[0].lower()


def _label(path: str) -> str:
    return "/photo/{id}" if path.startswith("/photo/") else path if path in _LABELS else "other"


class LimitedProtocol(H11Protocol):
    """Deadlines that uvicorn does not have: for a request's head, and for a client to read its answer.

    Its ``limit_concurrency`` counts idle connections and refuses ``/healthz``, so connections are limited here too:
    when there are too many, the one that has been idle longest is closed, then the oldest upload or unread answer.
    """

    settings: ClassVar[ServiceSettings]
    _timer: asyncio.TimerHandle | None = None
    _refused_at: float | None = None
    _unread_since: float | None = None
    _waiting_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        if len(self.connections) > self.settings.connections:
            self._replace_another()
        self._tick()

    def data_received(self, data: bytes) -> None:
        if self._refused_at is None:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Problem(400, "bad_http", "the request is not HTTP"))

    def _tick(self) -> None:
        """Look at the clock, a few times per deadline: uvicorn closes connections in many places."""
        now, limits = self.loop.time(), self.settings
        if self._unread_since is None and self.transport.is_closing():  # which waits until the client has read
            self._unread_since = now
        if self._unread_since is not None and now - self._unread_since > limits.write_seconds:
            self.transport.abort()
        elif self._refused_at is not None and now - self._refused_at > _LINGER:
            self.transport.close()
        elif self.conn.their_state is h11.IDLE and now - self._waiting_since > limits.header_seconds:
            self._refuse(Problem(408, "too_slow", "the request headers took too long"))
        period = min(_LINGER, limits.header_seconds / 4, limits.write_seconds / 4)
        self._timer = self.loop.call_later(period, self._tick)

    def _replace_another(self) -> None:
        """What is being worked on is not replaced: if nothing else is there, this one may ask for little."""
        others = [other for other in self.connections if isinstance(other, LimitedProtocol) and other._replaceable()]
        others.sort(key=lambda other: (other is self, other.conn.their_state is not h11.IDLE, other._waiting_since))
        if others[0] is self:
            self.app_state = {**self.app_state, "full": True}  # for Limits
        elif others[0]._unread_since is None:
            others[0].transport.close()
        else:
            others[0].transport.abort()

    def _replaceable(self) -> bool:
        """Is it idle, uploading, or not reading its answer?"""
        waiting = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self._unread_since is not None
        return waiting and not self.transport.is_closing()

    def _refuse(self, problem: Problem) -> None:
        """Answer, and close a moment later: closing on a client that still sends would take the answer from it."""
        if self._refused_at is not None or self.transport.is_closing():
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._refused_at = self.loop.time()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        problem.headers |= {"connection": "close", **_HEADERS}
        response, reason = problem.response(), HTTPStatus(problem.status).phrase.encode()
        head = h11.Response(status_code=problem.status, headers=response.raw_headers, reason=reason)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
