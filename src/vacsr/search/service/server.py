"""The application on a port: what HTTP itself allows, and how it ends."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.search.service.connections import bounded
from vacsr.search.service.settings import ServiceSettings

_GRACE = 5  # seconds that a stop allows beyond the deadline of an answer


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_names(host: str, *, more: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
    """By which a service may be called: this machine's own, and ``more``. None for any, where others reach it.

    >>> own_names("0.0.0.0"), own_names("0.0.0.0", more=("photos.example.org",))
    (None, ('localhost', '127.0.0.1', '::1', 'photos.example.org'))
    """
    if more is None and not is_loopback(host):
        return None
    here = (host.lower(),) if is_loopback(host) else ()
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", *here, *(more or ()))))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or an error that says what to change."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(f"host {host!r} is not an address of this machine — try --host 127.0.0.1") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is taken by another program"
            raise EnvironmentProblem(f"{message} — choose another, e.g. --port {port % 65535 + 1}") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise EnvironmentProblem(f"port {port} may not be used — choose one above 1023: --port 8000") from error
        message = f"{host}, port {port}, cannot be listened on ({error.strerror})"
        raise UsageError(f"{message} — try --host 127.0.0.1") from error


def run_server(app: FastAPI, listening: socket.socket, settings: ServiceSettings) -> None:
    """Serve until SIGINT or SIGTERM; then answer what has begun, take nothing new, and return."""
    with _own_signals():
        uvicorn.Server(server_config(app, settings)).run(sockets=[listening])


def server_config(app: FastAPI, settings: ServiceSettings) -> uvicorn.Config:
    """uvicorn as it is run: HTTP/1.1 only, and its answers do not name it."""
    return uvicorn.Config(
        app, http=bounded(settings), ws="none", lifespan="on", log_level="warning", access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=5,
        timeout_graceful_shutdown=int(settings.deadline_seconds) + _GRACE,
    )  # fmt: skip


@contextmanager
def _own_signals() -> Iterator[None]:
    """uvicorn sends the signal that stopped it to the process again, which then must not end by it."""
    before = {name: signal.signal(name, lambda *_: None) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
