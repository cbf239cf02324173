"""What requests and answers hold."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vacsr.search.results import Results
from vacsr.search.service.problems import Problem
from vacsr.search.service.settings import ServiceSettings

PolicyName = Literal["score", "lcb", "abstain", "missed"]
_HIDDEN = ("source",)  # of an image's metadata: where its file lies is nobody's business


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True)


class SearchRequest(_Request):
    """A text, or an image."""

    text: str = ""
    """Words, to find images."""
    image: str = ""
    """An image in base64, to find texts."""
    k: int = 10
    """How many hits."""
    policy: PolicyName = "score"
    """How hits are ordered, and whether there is an answer."""


class ScoreRequest(_Request):
    """Texts, and images by their ids in the index, or in base64."""

    texts: list[str]
    ids: list[str] = []
    images: list[str] = []
    """In base64."""


class HitAnswer(_Answer):
    """One item of the index."""

    rank: int
    id: str
    cosine: float
    score: float
    grade: float
    """In 0–1: with a calibration the chance of a match, else the method's own grade."""
    uncertainty: float | None
    """σ; null where the method has none."""
    probably_also: bool
    """Looks like a match beside the first."""
    metadata: dict[str, Any]
    photo: str | None
    """Where its photo is shown, relative to the service; null where it has none."""


class SearchAnswer(_Answer):
    """Hits, best first, and whether the first is vouched for."""

    schema_version: int = Field(1, alias="schema")
    direction: Literal["t2i", "i2t"]
    policy: str
    hits: list[HitAnswer]
    answered: bool
    """False only where the policy abstains."""
    reason: str
    """Why there is no answer."""
    confidence: float | None
    """Chance that the first by score is right; null without a calibration."""
    promised: bool
    """Does the risk that was asked for hold for this index?"""
    note: str
    """What of the calibration does not hold for this index."""
    calibrated: bool
    index_size: int
    probably_also: list[str]


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
    """t2i: a text finds images. i2t: an image finds texts."""
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
    try:
        asked = SearchRequest.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from error
    if len(asked.model_fields_set & {"text", "image"}) != 1:
        raise Problem(422, "bad_query", "a search has either a text or an image")
    return asked


def parse_score(body: bytes) -> ScoreRequest:
    """From JSON."""
    try:
        return ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from error


def bad_request(error: ValidationError) -> Problem:
    """The first thing that is wrong, without repeating what was sent."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, "bad_json", "the body is not JSON")
    known = {"text", "image", "k", "policy", "texts", "ids", "images"}
    where = ".".join(str(part) if isinstance(part, int) or part in known else "…" for part in first["loc"])
    return Problem(422, "bad_field", f"{where or 'the body'}: {first['msg']}")


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


def search_answer(found: Results, *, shown: bool) -> dict[str, Any]:
    """As JSON. ``shown``: hits have photos."""
    answer = found.to_json()
    for hit in answer["hits"]:
        hit["metadata"] = {name: value for name, value in hit["metadata"].items() if name not in _HIDDEN}
        hit["photo"] = photo_path(hit["id"]) if shown else None
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
