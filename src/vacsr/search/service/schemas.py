"""What requests and answers hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import from_json

from vacsr.search.items import KEPT
from vacsr.search.rerank import PolicyName
from vacsr.search.results import Hit, Results
from vacsr.search.service.problems import Problem
from vacsr.search.service.settings import ServiceSettings

Texts = Annotated[list[str], FailFast()]
"""A list of which the first wrong item is told: a body has room for millions, and an error each fills the memory."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True)


Asked = TypeVar("Asked", bound=_Request)


class SearchRequest(_Request):
    """A text, or an image."""

    text: str = ""
    """Words, to find images; or, in an index of texts, similar texts, by cosine alone."""
    image: str = ""
    """An image in base64, to find texts; or, in an index of images, similar images, by cosine alone."""
    k: int = 10
    """How many hits."""
    policy: PolicyName = "score"
    """How hits are ordered, and whether there is an answer. Similar images and similar texts take score only."""


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
    """Hits, best first, and whether the first is vouched for."""

    hits: tuple[HitAnswer, ...]
    """As many as were asked for, or as the index holds."""


class ScoreAnswer(_Answer):
    """Rows are texts; columns are the ids in their order, then the images."""

    schema_version: int = Field(1, alias="schema")
    score: list[list[float]]
    grade: list[list[float]]
    """The method's own, in 0–1."""
    uncertainty: list[list[float]] | None


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
    risk: float | None
    """That the policy abstain was fitted for."""
    confidence: float | None
    """With which it holds."""
    gallery: int | None
    """Items of the index for which it holds."""
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


def parse_search(body: bytes) -> SearchRequest:
    """From JSON, with a text or an image."""
    asked = _parsed(SearchRequest, body)
    if len(asked.model_fields_set & {"text", "image"}) != 1:
        raise Problem(422, "bad_query", "a search has either a text or an image")
    return asked


def parse_score(body: bytes) -> ScoreRequest:
    """From JSON."""
    return _parsed(ScoreRequest, body)


def _parsed(kind: type[Asked], body: bytes) -> Asked:
    """In steps of which each ends at the first thing that is wrong: this runs between everybody's answers."""
    try:
        fields = from_json(body)
    except ValueError as error:
        raise Problem(400, "bad_json", "the body is not JSON") from error
    if not isinstance(fields, dict):
        raise Problem(422, "bad_field", "the body: Input should be an object")
    if any(name not in kind.model_fields for name in fields):
        raise Problem(422, "bad_field", f"the body has a field that is not known — use {', '.join(kind.model_fields)}")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error) from error


def bad_request(error: ValidationError) -> Problem:
    """The first thing that is wrong, without repeating what was sent."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return Problem(422, "bad_field", f"{where}: {first['msg']}")


def check_text(text: str, limits: ServiceSettings) -> str:
    """Not blank, not too long."""
    if not text.strip():
        raise Problem(422, "blank_text", "a text needs words")
    if len(text) > limits.max_text:
        raise Problem(422, "long_text", f"a text may have {limits.max_text:,} characters")
    return text


def check_k(k: int, limits: ServiceSettings) -> int:
    """1 to the limit."""
    if not 1 <= k <= limits.max_k:
        raise Problem(422, "bad_k", f"k is 1 to {limits.max_k}")
    return k


def search_answer(found: Results, *, shown: Callable[[str], bool]) -> dict[str, Any]:
    """As JSON, without where an item's file lies: that is nobody's business. ``shown``: has an id a photo?"""
    answer = found.to_json()
    for hit in answer["hits"]:
        hit["metadata"] = {name: value for name, value in hit["metadata"].items() if name not in KEPT}
        hit["photo"] = photo_path(hit["id"]) if shown(hit["id"]) else None
    return answer


def photo_path(identity: str) -> str | None:
    """An id as a path; one that UTF-8 cannot hold has none.

    >>> photo_path("a/b ü?.jpg")
    'photo/a%2Fb%20%C3%BC%3F.jpg'
    """
    try:
        return "photo/" + quote(identity, safe="")
    except UnicodeEncodeError:
        return None
