"""The service: its paths, over FastAPI, and what they do."""

import asyncio
import base64
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import resources
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from jinja2 import Environment
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from vacsr import __version__
from vacsr.errors import DataError, UsageError
from vacsr.search.policies import POLICIES, SCORE, PolicyName, offered
from vacsr.search.searcher import Results, Searcher
from vacsr.serve import schemas
from vacsr.serve.batching import Answer, Batcher, Job, ScoreJob, SearchJob, Worker, weight
from vacsr.serve.decoding import Decoder, from_base64
from vacsr.serve.index_watch import FindPhotos, IndexWatch
from vacsr.serve.limits import SECONDS, Limits
from vacsr.serve.schemas import Problem, ServiceSettings, busy, problems, stale_index

log = logging.getLogger("vacsr.serve")

Body = TypeVar("Body", bound=BaseModel)
_STOP = 2.0  # seconds that a stop waits for the model, once every request has been answered or given up
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Service:
    """A searcher behind limits and a queue: what the paths do, without HTTP."""

    def __init__(self, searcher: Searcher, settings: ServiceSettings, find_photos: FindPhotos | None = None) -> None:
        backbone = searcher.scorer.model.backbone
        if not backbone.reads_photos:
            message = "the model was trained on features whose encoders it does not know"
            action = "train on features that `vacsr embed` wrote, or with towers (docs/get-started/photos.md)"
            raise UsageError(f"{message}, so it can embed neither words nor photos — {action}")
        self.searcher, self.settings, self.watch = searcher, settings, IndexWatch(searcher, find_photos)
        self.decoder = Decoder(settings, backbone.transform)
        self.queue: Batcher[Job, Answer] = Batcher(
            Worker(searcher, self.watch), size=settings.batch, wait=settings.batch_ms / 1000, weigh=weight,
            done=self._count,
        )  # fmt: skip
        self._add_metrics()

    def _add_metrics(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per counter
        self.registry, watch = CollectorRegistry(), self.watch
        histogram = partial(Histogram, registry=self.registry)
        self._sizes = histogram("vacsr_batch_size", "Queries per batch of the model.", buckets=_SIZES)
        self._seconds = histogram("vacsr_batch_seconds", "Seconds per batch of the model.", buckets=SECONDS)
        self._abstained = Counter("vacsr_abstained_total", "Searches that showed no hit.", registry=self.registry)
        self.registry.register(watch.reopened)
        for name, about, value in (
            ("vacsr_queue_length", "Queries waiting for the model.", self.queue.__len__),
            ("vacsr_index_vectors", "Vectors in the index.", lambda: watch.size),
            ("vacsr_index_stale", "1 while the index on disk is not the one in use.", lambda: watch.stale),
        ):
            Gauge(name, about, registry=self.registry).set_function(value)

    def _count(self, size: int, seconds: float) -> None:
        self._sizes.observe(size)
        self._seconds.observe(seconds)

    @asynccontextmanager
    async def running(self, _app: FastAPI) -> AsyncIterator[None]:
        """Look after the index; in the end finish what the model has begun, and nothing else."""
        looking = asyncio.create_task(
            self.watch.keep_looking(
                every=self.settings.refresh_seconds, between=self.queue.between, in_thread=self.decoder.in_thread
            )
        )
        yield
        looking.cancel()
        self.decoder.close()
        await self.queue.close(seconds=_STOP)

    async def search(self, query: str | bytes, *, k: int, policy: str, min_grade: float) -> dict[str, Any]:
        """Hits of a text or of an encoded image."""
        if not 1 <= k <= self.settings.max_k:
            raise Problem(422, "bad_k", f"k is 1 to {self.settings.max_k}")
        asked = self._checked(query) if isinstance(query, str) else await self.decoder.upload(query)
        results = await self._ask(SearchJob(asked, k, policy, min_grade))
        assert isinstance(results, Results), "a search job gives results"
        if not results.answered:
            self._abstained.inc()
        answer = results.to_dict()
        photos = self.watch.photos if self.searcher.direction == "t2i" else None
        for hit in answer["hits"]:
            hit["photo"] = None
            with suppress(UnicodeEncodeError):  # an id may be no UTF-8
                if photos is not None and hit["id"] in photos:
                    hit["photo"] = "photo/" + quote(hit["id"], safe="")
        return answer

    async def score(self, request: schemas.ScoreRequest) -> dict[str, Any]:
        limits, count = self.settings, len(request.ids) + len(request.images)
        if not request.texts or not count:
            raise Problem(422, "nothing_to_score", "give texts, and images or ids")
        if count > limits.max_images or count * len(request.texts) > limits.max_pairs:
            allowed = f"{limits.max_images} images, and {limits.max_pairs} pairs of texts and images"
            raise Problem(422, "too_many_pairs", f"one call may have at most {allowed}")
        texts = tuple(self._checked(text) for text in request.texts)
        images = [await self.decoder.photo(partial(self.watch.open_photo, name)) for name in request.ids]
        images += [await self.decoder.upload(from_base64(data)) for data in request.images]
        table = await self._ask(ScoreJob(texts, tuple(images)))
        assert isinstance(table, dict), "a score job gives a table"
        return table

    def info(self) -> dict[str, Any]:
        fitted = self.searcher.fitted
        return {
            "version": __version__,
            "direction": self.searcher.direction,
            "index_size": self.watch.size,
            "policies": offered(calibrated=fitted is not None),
            "photos": self.watch.photos is not None,
            "calibrated": fitted is not None,
            "gallery": None if fitted is None else fitted.sizes[-1].size,
            **self.settings.model_dump(include={"max_k", "max_text", "max_body", "max_pixels"}),
        }

    async def _ask(self, job: Job) -> Answer:
        """Through the queue. A usage error is the client's to correct, a damaged index the operator's."""
        try:
            return await self.queue.submit(job)
        except UsageError as error:
            raise Problem(422, "refused", str(error)) from error
        except DataError as error:
            if isinstance(job, ScoreJob):
                raise Problem(422, "bad_image", "the image cannot be used") from error
            log.error("the index cannot be searched: %s", error)
            message = "the index is damaged; the log of the service says how"
            raise busy(message, status=503, code="damaged_index", seconds=30) from error

    def _checked(self, text: str) -> str:
        if not text.strip():
            raise Problem(422, "blank_text", "the text is blank")
        if len(text) > self.settings.max_text:
            raise Problem(422, "long_text", f"a text may have at most {self.settings.max_text:,} characters")
        return text


def create_app(
    searcher: Searcher, settings: ServiceSettings | None = None, *, photos: FindPhotos | None = None
) -> FastAPI:
    """The service as an ASGI application.

    ``photos`` finds what hits may show, by their ids and in no other way. It is called at once, and again, in a thread,
    when the index has changed.
    """
    limits = settings or ServiceSettings()
    service = Service(searcher, limits, photos)
    app = FastAPI(
        title="vacsr", version=__version__, lifespan=service.running,
        docs_url=None, redoc_url=None, redirect_slashes=False,
        description="Search images by text, or texts by image, with a grade and an uncertainty; or find similar ones.",
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Limits, settings=limits, registry=service.registry)
    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _refuse)
    _add_queries(app, service)
    _add_state(app, service)
    return app


def _add_queries(app: FastAPI, service: Service) -> None:
    limits, errors = service.settings, problems(404, 415, 422)

    @app.post(
        "/search", response_model=schemas.SearchAnswer, responses=errors, openapi_extra=schemas.search_body(limits)
    )
    async def search(
        request: Request,
        k: int = Query(10, ge=1, le=limits.max_k, description="Number of hits, unless the body sets it."),
        policy: Annotated[PolicyName, Query(description="The policy, unless the body sets it.")] = SCORE,
        min_grade: float = Query(0.0, ge=0, le=1, description="Least grade of a hit, unless the body sets it."),
    ) -> Response:
        """Images for a text, or texts for an image; with the index's own kind, similar ones by cosine, without grade.

        The body is JSON, or an image's own bytes.
        """
        if _media_type(request) in schemas.IMAGE_TYPES:
            return _as_json(await service.search(request.state.body, k=k, policy=policy, min_grade=min_grade))
        asked = _parse(schemas.SearchRequest, request, "JSON, or an image")
        fields = asked.model_fields_set
        if len(fields & {"text", "image"}) != 1:
            raise Problem(422, "bad_query", "a search takes either a text or an image")
        query = asked.text if "text" in fields else from_base64(asked.image)
        k, policy = asked.k if "k" in fields else k, asked.policy if "policy" in fields else policy
        min_grade = asked.min_grade if "min_grade" in fields else min_grade
        return _as_json(await service.search(query, k=k, policy=policy, min_grade=min_grade))

    @app.post("/score", response_model=schemas.ScoreAnswer, responses=errors, openapi_extra=schemas.score_body(limits))
    async def score(request: Request) -> Response:
        """Score, grade and uncertainty of every text with every image."""
        return _as_json(await service.score(_parse(schemas.ScoreRequest, request, "JSON")))

    @app.get(
        "/photo/{id:path}", response_class=Response,
        responses={200: {"content": {"image/jpeg": {}}, "description": "The photo."}, **problems(404, 422)},
    )  # fmt: skip
    async def photo(id: str) -> Response:
        """The photo of a hit, small, without metadata."""
        content = await service.decoder.in_thread(partial(service.watch.jpeg, id, limits.photo_side))
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=300"})


def _add_state(app: FastAPI, service: Service) -> None:
    page, errors = page_html(), problems()
    headers = {"content-security-policy": page_policy(page)}

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=schemas.Health, responses=errors)
    async def healthz() -> Response:
        """Is it there, and can it search? Needs no token."""
        if service.watch.foreign:
            raise stale_index()
        return _as_json({"status": "ok"})

    @app.get("/info", response_model=schemas.Info, responses=errors)
    async def info() -> Response:
        """What may be asked."""
        return _as_json(service.info())

    @app.get(
        "/metrics", response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}, **errors},
    )  # fmt: skip
    async def metrics() -> Response:
        """Counts and times."""
        return Response(generate_latest(service.registry), media_type="text/plain; version=0.0.4")


def page_html() -> bytes:
    """The page, with a choice for every policy."""
    template = resources.files("vacsr.serve").joinpath("page.html").read_text(encoding="utf-8")
    return Environment(autoescape=True).from_string(template).render(policies=POLICIES.values()).encode()


def page_policy(html: bytes) -> str:
    """A content security policy that names the page's own scripts and styles by their hashes, so that no others run."""

    def hashes(tag: bytes) -> str:
        blocks = re.findall(rb"<%s\b[^>]*>(.*?)</%s\s*>" % (tag, tag), html, re.DOTALL | re.IGNORECASE)
        digests = (base64.b64encode(hashlib.sha256(block).digest()).decode() for block in blocks)
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; "
        "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _as_json(content: Any) -> Response:
    """Plain ASCII: metadata may hold halves of surrogate pairs, which UTF-8 may not."""
    return Response(json.dumps(content, allow_nan=False, separators=(",", ":")), media_type="application/json")


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _parse(kind: type[Body], request: Request, wanted: str) -> Body:
    """A JSON body; the first thing that is wrong is answered, without repeating what was sent."""
    if _media_type(request) != "application/json":
        raise Problem(415, "wrong_type", f"the body must be {wanted}, with that content-type")
    try:
        fields = from_json(request.state.body)
    except ValueError as error:
        raise Problem(400, "bad_json", "the body is not JSON") from error
    if isinstance(fields, dict) and not fields.keys() <= kind.model_fields.keys():  # one error: there may be millions
        known = ", ".join(kind.model_fields)
        raise Problem(422, "bad_field", f"unknown field in the body — use {known}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        raise Problem(422, "bad_field", f"{where}: {first['msg']}") from error


async def _refuse(_request: Request, error: Exception) -> Response:
    """Answer what FastAPI refuses in our form: a path or method, or a parameter."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return Problem(422, "bad_field", f"{first['loc'][-1]}: {first['msg']}").response()
    assert isinstance(error, HTTPException)
    messages = {404: "no such path", 405: "this path does not take this method"}
    message = messages.get(error.status_code, "the request cannot be read")
    return Problem(error.status_code, "no_such_path", message, {**(error.headers or {})}).response()
