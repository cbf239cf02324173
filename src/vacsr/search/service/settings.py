"""What the service allows. Every number has a limit that a stranger's request cannot move."""

from __future__ import annotations

from pydantic import Field, field_validator

from vacsr.config import Config


class ServiceSettings(Config):
    """Limits, times and who may ask."""

    token: str | None = Field(default=None, repr=False)
    """Asked for as ``Authorization: Bearer TOKEN``, except for the page and ``/healthz``; None asks for nothing."""
    hosts: tuple[str, ...] | None = None
    """Names under which it may be called, without port, in any case; None for any. A web page that points its own name
    to this machine is refused by it."""
    max_body: int = Field(default=10 * 2**20, ge=1024)
    """Bytes of a request."""
    max_buffered: int = Field(default=256 * 2**20, ge=1024)
    """Bytes of all requests that are being read or worked on."""
    max_pixels: int = Field(default=2**25, ge=1)
    """Of an image that is sent, by its header, before it is decoded."""
    max_text: int = Field(default=1000, ge=1)
    """Characters of a text."""
    max_k: int = Field(default=100, ge=1, le=1000)
    """Hits of a search."""
    max_pairs: int = Field(default=256, ge=1)
    """Texts × images of one call of ``/score``."""
    max_images: int = Field(default=16, ge=1)
    """Images of one call of ``/score``, sent and by id together."""
    concurrency: int = Field(default=128, ge=1)
    """Requests at once; one more is told to come back, except to ``/healthz`` and ``/metrics``."""
    connections: int = Field(default=512, ge=1)
    """Open connections, idle ones among them."""
    header_seconds: float = Field(default=10.0, gt=0)
    """For a client to send a request's head."""
    body_seconds: float = Field(default=20.0, gt=0)
    """For a client to send a request's body."""
    write_seconds: float = Field(default=30.0, gt=0)
    """For a client to take what is sent to it, once that waits."""
    deadline_seconds: float = Field(default=30.0, gt=0)
    """For an answer, once the request is there."""
    batch: int = Field(default=32, ge=1)
    """Queries that the model takes at once; a call of ``/score`` counts for all its texts and images."""
    batch_ms: float = Field(default=2.0, ge=0)
    """How long the first query of a batch waits for others."""
    refresh_seconds: float = Field(default=5.0, ge=0)
    """How often it looks for what other processes have added to an exact index."""
    photo_side: int = Field(default=512, ge=16, le=4096)
    """Longest side of a photo that is shown."""

    @field_validator("hosts")
    @classmethod
    def _lowered(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """As the names that are called are compared."""
        return None if hosts is None else tuple(host.lower() for host in hosts)

    @field_validator("token")
    @classmethod
    def _sendable(cls, token: str | None) -> str | None:
        """What a header can carry."""
        if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
            raise ValueError("a token is made of ASCII letters, digits and signs, without spaces")
        return token
