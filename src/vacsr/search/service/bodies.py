"""A request's body, read whole: it may not be too large, nor take too long, nor fill the memory with its like."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from vacsr.search.service.problems import ClientGone, Problem, busy, too_large

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

_LINGER = 1.0  # seconds; most clients read no answer before they have sent all


class Room:
    """Bytes of bodies that are held at once."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    @contextmanager
    def held(self) -> Iterator[Held]:
        """A share that grows, and is given back in the end."""
        share = Held(self)
        try:
            yield share
        finally:
            self.used -= share.size


class Held:
    """One body's share."""

    def __init__(self, room: Room) -> None:
        self.size, self._room = 0, room

    def grow(self, size: int) -> None:
        """Take so many bytes more, or refuse."""
        if self._room.used + size > self._room.limit:
            raise busy("too many large requests at once")
        self._room.used += size
        self.size += size


async def read_body(receive: Receive, *, declared: str | None, limit: int, seconds: float, share: Held) -> bytes:
    """All of it. ``declared``: the header content-length, if there is one."""
    if declared is not None and not (declared.isascii() and declared.isdigit()):
        raise Problem(400, "bad_length", "content-length is not a number")
    if declared is not None and int(declared[:20]) > limit:
        raise too_large(limit)
    try:
        async with asyncio.timeout(seconds):
            return await _read(receive, limit=limit, share=share)
    except TimeoutError as error:
        message = f"the request was not there after {seconds:g} seconds"
        raise Problem(408, "too_slow", message) from error


async def _read(receive: Receive, *, limit: int, share: Held) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        if len(parts) + len(part) > limit:
            raise too_large(limit)
        share.grow(len(part))
        parts += part
        if not message.get("more_body", False):
            return bytes(parts)


async def drop_body(receive: Receive) -> None:
    """Read on for a moment without keeping anything, so that a client that is still sending finds the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                if not message.get("more_body", False):
                    return


def replayed(body: bytes, receive: Receive) -> Receive:
    """What the application receives: the whole body, then whatever else happens."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
