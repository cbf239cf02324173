"""Connections: how many there may be, and how long one may take to begin a request, and to take its answer."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vacsr.search.service.problems import Problem, busy
from vacsr.search.service.settings import ServiceSettings

_LINGER = 1.0  # seconds


def bounded(settings: ServiceSettings) -> type[H11Protocol]:
    """uvicorn's protocol, within these settings."""

    class Bounded(BoundedProtocol):
        limits = settings

    return Bounded


class BoundedProtocol(H11Protocol):
    """uvicorn's own waits for a request's head for ever, and for a client to take its answer.

    A few hundred such clients would keep all others out.
    """

    limits: ClassVar[ServiceSettings]
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _watching: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counted."""
        super().connection_made(transport)
        self._see_closing(False)
        if len(self.connections) > self.limits.connections:
            self._refuse(busy("too many connections", status=503))
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        """Some of a head, or of a body; after a refusal it is dropped."""
        if not self._refused:
            super().data_received(data)
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody to wait for."""
        self._stop()
        for timer in (self._unread, self._watching):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """The next head is awaited; while nothing of it is there, uvicorn's shorter time for idle ones counts."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """More waits for the client than it takes; if that lasts, it is cut off, and so does not hold what waits."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """For what is not HTTP, in our form."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(Problem(400, "bad_http", "the request is not HTTP"))
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The service stops."""
        if self._refused:
            self.transport.close()
        else:
            super().shutdown()

    def _see_closing(self, before: bool) -> None:
        """A closed connection ends when the client has taken what was written; one that does not is cut off.

        uvicorn closes in many places, so this looks now and then, and cuts off what was closed a look ``before``.
        """
        if before:
            self.transport.abort()
        else:
            closing = self.transport.is_closing()
            self._watching = self.loop.call_later(self.limits.write_seconds, self._see_closing, closing)

    def _watch(self) -> None:
        """A timer runs exactly while a head is awaited, and bytes do not wind it up again."""
        if self._refused:
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_seconds, self._late)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE:
            self._refuse(Problem(408, "too_slow", "the request's head took too long"))

    def _refuse(self, problem: Problem) -> None:
        """Answer, and close a moment later: closing on a client that still sends would take the answer from it."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_plain(problem))
        self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER, self.transport.close)


def _plain(problem: Problem) -> bytes:
    """An answer without a request."""
    body, reason = problem.body(), HTTPStatus(problem.status).phrase
    fields: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        **problem.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {problem.status} {reason}\r\n{head}\r\n".encode() + body
