"""What is answered when a request cannot be served: a status, a short code, and words that name nothing of ours."""

from __future__ import annotations

import json


class Problem(Exception):
    """Becomes ``{"error": {"code", "message"}}``."""

    def __init__(self, status: int, code: str, message: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """As JSON, plain ASCII."""
        return json.dumps({"error": {"code": self.code, "message": self.message}}).encode()


class ClientGone(Exception):
    """Nobody is there to be answered."""


def busy(message: str, *, status: int = 429, code: str = "busy") -> Problem:
    """Too much at once: try again in a second."""
    return Problem(status, code, message, headers={"retry-after": "1"})


def stopping() -> Problem:
    """New work is refused while old work is finished."""
    return busy("the service is stopping", status=503, code="stopping")


def too_large(limit: int) -> Problem:
    """A body over the limit, which is 0 for a GET."""
    allowed = f"a request may have {limit:,} bytes" if limit else "a request of this method has no body"
    return Problem(413, "body_too_large", allowed)
