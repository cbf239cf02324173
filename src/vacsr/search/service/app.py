"""The paths, over FastAPI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from vacsr import __version__
from vacsr.data import PhotoSet
from vacsr.search.engine import Searcher
from vacsr.search.rerank import PolicyName
from vacsr.search.service.contract import IMAGE_TYPES, problems, score_body, search_body
from vacsr.search.service.guard import Guard
from vacsr.search.service.images import from_base64
from vacsr.search.service.page import load_page
from vacsr.search.service.problems import Problem
from vacsr.search.service.schemas import (
    Health,
    Info,
    ScoreAnswer,
    SearchAnswer,
    parse_score,
    parse_search,
)
from vacsr.search.service.service import Service
from vacsr.search.service.settings import ServiceSettings


def build_app(
    searcher: Searcher,
    settings: ServiceSettings,
    *,
    photos: Sequence[PhotoSet] = (),
    find_photos: Callable[[], Sequence[PhotoSet]] | None = None,
) -> FastAPI:
    """See :func:`vacsr.search.service.create_app`."""
    service = Service(searcher, settings, photos=photos, find_photos=find_photos)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = FastAPI(
        title="vacsr", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="Search images by text, or texts by image, with a grade and an uncertainty; or find similar ones.",
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Guard, settings=settings, metrics=service.metrics)
    app.add_exception_handler(HTTPException, _no_such_path)
    app.add_exception_handler(RequestValidationError, _bad_parameter)
    _add_questions(app, service)
    _add_pictures(app, service)
    _add_state(app, service)
    return app


def _add_questions(app: FastAPI, service: Service) -> None:
    limits = service.settings

    @app.post(
        "/search", response_model=SearchAnswer, responses=problems(404, 415, 422), openapi_extra=search_body(limits)
    )
    async def search(
        request: Request,
        k: int = Query(10, ge=1, le=limits.max_k, description="How many hits, unless the body says it."),
        policy: Annotated[PolicyName, Query(description="The policy, unless the body says it.")] = "score",
    ) -> Response:
        """Images for a text, or texts for an image; with the index's own kind, similar ones by cosine, without grade.

        The body is JSON, or an image's own bytes.
        """
        body, kind = await request.body(), _media_type(request)
        if kind in IMAGE_TYPES:
            return _as_json(await service.search_image(body, k=k, policy=policy))
        _need_json(kind, "JSON, or an image")
        asked = parse_search(body)
        k = asked.k if "k" in asked.model_fields_set else k
        policy = asked.policy if "policy" in asked.model_fields_set else policy
        if "text" in asked.model_fields_set:
            return _as_json(await service.search_text(asked.text, k=k, policy=policy))
        return _as_json(await service.search_image(from_base64(asked.image), k=k, policy=policy))

    @app.post("/score", response_model=ScoreAnswer, responses=problems(404, 415, 422), openapi_extra=score_body(limits))
    async def score(request: Request) -> Response:
        """Score, grade and uncertainty of every text with every image."""
        _need_json(_media_type(request), "JSON")
        return _as_json(await service.score(parse_score(await request.body())))


def _add_pictures(app: FastAPI, service: Service) -> None:
    page = load_page()

    @app.get(
        "/photo/{id:path}", response_class=Response,
        responses={200: {"content": {"image/jpeg": {}}, "description": "The photo."}, **problems(404, 422)},
    )  # fmt: skip
    async def photo(id: str) -> Response:
        """The photo of a hit, small, without metadata."""
        kept = {"cache-control": "private, max-age=300"}
        return Response(await service.photo(id), media_type="image/jpeg", headers=kept)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        if page is None:
            raise Problem(404, "no_page", "there is no page; /openapi.json describes what may be asked")
        return Response(page.html, media_type="text/html", headers={"content-security-policy": page.policy})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=Health, responses=problems())
    async def healthz() -> Response:
        """Is it there, and can it search? Needs no token."""
        return _as_json(service.health())

    @app.get("/info", response_model=Info, responses=problems())
    async def info() -> Response:
        """What may be asked."""
        return _as_json(service.info())

    @app.get(
        "/metrics", response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}, **problems()},
    )  # fmt: skip
    async def metrics() -> Response:
        """Counts and times."""
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4")


def _as_json(content: Any) -> Response:
    """Plain ASCII: metadata may hold halves of surrogate pairs, which UTF-8 may not."""
    return Response(json.dumps(content, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _need_json(kind: str, wanted: str) -> None:
    if kind != "application/json":
        raise Problem(415, "wrong_type", f"the body is {wanted}; say so by content-type")


async def _no_such_path(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is no such path", 405: "this path takes another method"}
    found = Problem(error.status_code, "no_such_path", words.get(error.status_code, "the request cannot be read"))
    headers = {**(error.headers or {})}
    return Response(found.body(), status_code=found.status, headers=headers, media_type="application/json")


async def _bad_parameter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = str(first["loc"][-1])
    found = Problem(422, "bad_field", f"{where if where in ('k', 'policy', 'id') else 'the request'}: {first['msg']}")
    return Response(found.body(), status_code=found.status, media_type="application/json")
