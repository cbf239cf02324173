"""What the service is configured with, what requests and answers hold, and how both are described in OpenAPI."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints
from pydantic.functional_validators import field_validator
from starlette.responses import Response

from vacsr.config import Config
from vacsr.search.policies import SCORE, PolicyName
from vacsr.search.searcher import Hit, Results

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/avif")
Texts = Annotated[list[str], FailFast()]
"""A list whose first wrong item is reported: a body has room for millions, and an error for each fills the memory."""


class ServiceSettings(Config):
    """Server limits; clients cannot override them."""

    token: str | None = Field(default=None, repr=False)
    """Required as ``Authorization: Bearer TOKEN``, except for the page and ``/healthz``. None: no token."""
    hosts: tuple[Annotated[str, StringConstraints(to_lower=True)], ...] | None = None
    """Host names that requests may use, without port; None for any. Protects against DNS rebinding."""
    max_body: int = Field(default=10 * 2**20, ge=1024)
    """Bytes of a request body."""
    max_buffered: int = Field(default=256 * 2**20, ge=1024)
    """Bytes of all request bodies in memory. When they are full, a stalled upload makes room for a new one."""
    max_pixels: int = Field(default=2**25, ge=1)
    """Pixels of an uploaded image, by its header, before it is decoded."""
    max_text: int = Field(default=1000, ge=1)
    """Characters of a text."""
    max_k: int = Field(default=100, ge=1, le=1000)
    """Hits of a search."""
    max_pairs: int = Field(default=256, ge=1)
    """Texts × images of one call of ``/score``."""
    max_images: int = Field(default=16, ge=1)
    """Images of one call of ``/score``, uploaded and by id together."""
    concurrency: int = Field(default=128, ge=1)
    """Requests served at once; more get 429, except for ``/healthz`` and ``/metrics``."""
    connections: int = Field(default=512, ge=1)
    """Open connections. When they are full, an idle or stalled one is closed for a new one."""
    header_seconds: float = Field(default=10.0, gt=0)
    """For a client to send a request's head."""
    body_seconds: float = Field(default=20.0, gt=0)
    """For a client to send a request's body."""
    write_seconds: float = Field(default=30.0, gt=0)
    """For a client to read its answer."""
    deadline_seconds: float = Field(default=30.0, gt=0)
    """For an answer, once the request has arrived."""
    decode_seconds: float = Field(default=5.0, gt=0)
    """For decoding one uploaded image; then its worker process is killed."""
    batch: int = Field(default=32, ge=1)
    """Queries per batch of the model; a call of ``/score`` counts for all its texts and images."""
    batch_ms: float = Field(default=2.0, ge=0)
    """How long the first query of a batch waits for others."""
    refresh_seconds: float = Field(default=5.0, ge=0)
    """How often an exact index is checked for changes by other processes."""
    photo_side: int = Field(default=512, ge=16, le=4096)
    """Longest side of a photo that is shown."""

    @field_validator("token")
    @classmethod
    def _fits_header(cls, token: str | None) -> str | None:
        if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
            raise ValueError("a token is made of ASCII letters, digits and signs, without spaces")
        return token


class Problem(Exception):
    """An HTTP error, answered as ``{"error": {"code", "message"}}``. The message reveals nothing about the server."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status, code, message, headers)  # all of it, so that it can be pickled
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})

    def __str__(self) -> str:
        return self.message

    def response(self) -> Response:
        """As JSON in ASCII."""
        content = json.dumps({"error": {"code": self.code, "message": self.message}})
        return Response(content, self.status, self.headers, "application/json")


class ClientGone(Exception):
    """The client has disconnected, so nobody waits for an answer."""


def busy(message: str, *, status: int = 429, code: str = "busy", seconds: int = 1) -> Problem:
    """Overload, or a state that passes: try again in some seconds."""
    return Problem(status, code, message, {"retry-after": str(seconds)})


def stale_index() -> Problem:
    """The index is another model's, so nothing of it can be shown."""
    message = "stale index: the index was rebuilt with another model than the one being served"
    action = "start the service again with that model, or fill the index with the model that is served"
    return busy(f"{message} — {action}", status=503, code="stale_index", seconds=30)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True)


class SearchRequest(_Request):
    """A text, or an image."""

    text: str = ""
    """Words, to find images; or, in an index of texts, similar texts, by cosine alone."""
    image: str = ""
    """An image in base64, to find texts; or, in an index of images, similar images, by cosine alone."""
    k: int = 10
    """How many hits."""
    policy: Annotated[PolicyName, Field(strict=False)] = SCORE
    """Which hits are shown. Similar images and similar texts take score only."""
    min_grade: float = Field(0.0, ge=0, le=1)
    """Leave out hits with a lower grade."""


class ScoreRequest(_Request):
    """Texts, and images by their ids in the index, or in base64."""

    texts: Texts
    ids: Texts = []
    images: Texts = []
    """In base64."""


class HitAnswer(Hit):
    """One item of the index, and where it is shown."""

    photo: str | None
    """Where its photo is shown, relative to the service; null where it has none."""


class SearchAnswer(Results):
    """Hits, best first, and how far they can be trusted."""

    hits: tuple[HitAnswer, ...]
    """As many as were asked for, or as the index holds."""


class ScoreAnswer(_Answer):
    """Rows are texts; columns are the ids in their order, then the images."""

    schema_version: int = Field(1, alias="schema")
    score: list[list[float]]
    grade: list[list[float]] | None
    """The probability of a match as the method was trained; null where it only ranks. Not the grade among the hits of a
    search, which a calibration takes from the other candidates too."""
    uncertainty: list[list[float]] | None
    """σ; null where the method has none."""


class Health(_Answer):
    """It runs."""

    status: Literal["ok"]


class Info(_Answer):
    """What may be asked."""

    version: str
    direction: Literal["t2i", "i2t"]
    """t2i: the index holds images, and a text finds them. i2t: it holds texts, and an image finds them. Asked
    with its own kind, it finds similar ones, by cosine alone."""
    index_size: int
    policies: list[PolicyName]
    photos: bool
    """Are hits shown?"""
    calibrated: bool
    gallery: int | None
    """Items of the largest index that the calibration has checked; null without a calibration."""
    max_k: int
    max_text: int
    max_body: int
    max_pixels: int


class ErrorDetail(_Answer):
    """What is wrong."""

    code: str
    message: str


class ErrorAnswer(_Answer):
    """Every answer that is not a 200."""

    error: ErrorDetail


_PROBLEMS = {
    400: "the request is malformed",
    401: "the token is missing or wrong",
    404: "not found",
    405: "the path does not take this method",
    408: "the request took too long to arrive",
    413: "the body or its image is too large",
    415: "the body has an unsupported type",
    421: "the service does not accept this host name",
    422: "the request is invalid",
    429: "too many requests; see Retry-After",
    500: "the service failed",
    503: "timeout, shutdown, or an empty or stale index; see Retry-After",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error answers of a path, for FastAPI's ``responses``."""
    every = (*statuses, 400, 401, 408, 413, 421, 429, 500, 503)
    return {status: {"model": ErrorAnswer, "description": _PROBLEMS[status]} for status in every}


def search_body(settings: ServiceSettings) -> dict[str, Any]:
    """``openapi_extra`` of ``/search``, whose body FastAPI does not see: JSON, or an image's bytes."""
    schema = SearchRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs")  # FastAPI describes them
    fields = schema["properties"]
    fields["k"] |= {"minimum": 1, "maximum": settings.max_k}
    for name, described in (("text", _text(settings)), ("image", _IMAGE)):  # without the default that means absence
        fields[name] = {"description": fields[name]["description"], **described}
    schema["oneOf"] = [{"required": ["text"]}, {"required": ["image"]}]
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES}
    return {"requestBody": {"required": True, "content": content}}


def score_body(settings: ServiceSettings) -> dict[str, Any]:
    """``openapi_extra`` of ``/score``."""
    schema = ScoreRequest.model_json_schema()
    fields = schema["properties"]
    fields["texts"] |= {"minItems": 1, "maxItems": settings.max_pairs, "items": _text(settings)}
    fields["ids"] |= {"maxItems": settings.max_images}
    fields["images"] |= {"maxItems": settings.max_images, "items": _IMAGE}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_IMAGE = {"type": "string", "contentEncoding": "base64"}


def _text(settings: ServiceSettings) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": settings.max_text, "pattern": r"\S"}
