"""The application on a port of this machine, until a signal stops it."""

import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import threading
import time

import uvicorn
from fastapi import FastAPI

from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.serve.limits import LimitedProtocol
from vacsr.serve.schemas import ServiceSettings

log = logging.getLogger("vacsr.serve")

_GRACE = 5  # seconds that a stop may take beyond the deadline of an answer; the last two of them wait for threads


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_hosts(host: str, *, more: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
    """Names under which a service may be called: this machine's own, and ``more``. None for any, on other addresses.

    >>> default_hosts("0.0.0.0"), default_hosts("127.0.0.9", more=("photos.example.org",))
    (None, ('localhost', '127.0.0.1', '::1', '127.0.0.9', 'photos.example.org'))
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
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            message = f"port {port} of {host} is taken by another program"
            raise EnvironmentProblem(f"{message} — choose another, e.g. --port {port % 65535 + 1}") from error
        if number in (errno.EACCES, errno.EPERM):
            raise EnvironmentProblem(f"port {port} needs more rights — choose one above 1023: --port 8000") from error
        raise UsageError(f"cannot listen on {host!r}, port {port} ({error}) — try --host 127.0.0.1") from error


def server_config(app: FastAPI, settings: ServiceSettings) -> uvicorn.Config:
    """uvicorn as it is run: HTTP/1.1 only, and its answers do not name it."""
    protocol = type("Limited", (LimitedProtocol,), {"settings": settings})
    return uvicorn.Config(
        app, http=protocol, ws="none", lifespan="on", log_level="warning", access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=5, h11_max_incomplete_event_size=2**14,
        timeout_graceful_shutdown=int(settings.deadline_seconds) + _GRACE - 4,
    )  # fmt: skip


def run_server(app: FastAPI, listening: socket.socket, settings: ServiceSettings) -> None:
    """Serve until SIGINT or SIGTERM; then answer what has begun, take nothing new, and return."""
    names = (signal.SIGINT, signal.SIGTERM)  # uvicorn sends itself the signal that stopped it again: ignore that one
    before = {name: signal.signal(name, lambda *_: None) for name in names}
    try:
        uvicorn.Server(server_config(app, settings)).run(sockets=[listening])
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    end = time.monotonic() + 2
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("vacsr-")]
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        log.warning("stopped while the model or a photo was still being processed")
        os._exit(0)  # a thread cannot be stopped, and Python would wait for it
    gc.freeze()  # the last collection of a process with torch takes seconds on a busy machine
