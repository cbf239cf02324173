"""Search over HTTP: one process, one model, one index. Needs the extra ``serve``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vacsr.data import PhotoSet
from vacsr.errors import MissingExtra
from vacsr.search.engine import Searcher
from vacsr.search.service.settings import ServiceSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["ServiceSettings", "create_app"]


def create_app(
    searcher: Searcher,
    settings: ServiceSettings | None = None,
    *,
    photos: Sequence[PhotoSet] = (),
    find_photos: Callable[[], Sequence[PhotoSet]] | None = None,
) -> FastAPI:
    """The service as an ASGI application; ``photos`` are what hits may show, by their ids and in no other way.

    ``find_photos`` gives them anew; it is called, in a thread, when the index has changed.
    """
    try:
        from vacsr.search.service.app import build_app
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "fastapi", "serve") from error
    return build_app(searcher, settings or ServiceSettings(), photos=photos, find_photos=find_photos)
