"""The part of the OpenAPI description that depends on the settings, or that FastAPI cannot see."""

from __future__ import annotations

from typing import Any

from vacsr.search.service.schemas import ErrorAnswer, ScoreRequest, SearchRequest
from vacsr.search.service.settings import ServiceSettings

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp", "image/avif")
_WORDS = r"\S"
_PROBLEMS = {
    400: "the body or the request's form is broken",
    401: "the token is missing or wrong",
    404: "there is no such thing",
    405: "another method is needed",
    408: "the body took too long to come",
    413: "the body or its image is too large",
    415: "the body is of another type",
    421: "the service is not known by this name",
    422: "the request cannot be served as it is",
    429: "too much at once; see Retry-After",
    500: "the service failed",
    503: "no answer in time, the service stops, or the index is empty or not the model's any more; see Retry-After",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error answers of a path, for FastAPI's ``responses``."""
    every = (*statuses, 400, 401, 408, 413, 421, 429, 500, 503)
    return {status: {"model": ErrorAnswer, "description": _PROBLEMS[status]} for status in every}


def search_body(limits: ServiceSettings) -> dict[str, Any]:
    """``openapi_extra`` of ``/search``: JSON, or an image's bytes."""
    schema = SearchRequest.model_json_schema()
    fields = schema["properties"]
    fields["k"] |= {"minimum": 1, "maximum": limits.max_k}
    fields["text"] = _described(fields["text"], {"type": "string", **_text(limits)})
    fields["image"] = _described(fields["image"], {"type": "string", "contentEncoding": "base64"})
    schema["oneOf"] = [{"required": ["text"]}, {"required": ["image"]}]
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES}
    return {"requestBody": {"required": True, "content": content}}


def score_body(limits: ServiceSettings) -> dict[str, Any]:
    """``openapi_extra`` of ``/score``."""
    schema = ScoreRequest.model_json_schema()
    fields = schema["properties"]
    fields["texts"] |= {"minItems": 1, "maxItems": limits.max_pairs, "items": {"type": "string", **_text(limits)}}
    fields["ids"] |= {"maxItems": limits.max_images}
    fields["images"] |= {"maxItems": limits.max_images, "items": {"type": "string", "contentEncoding": "base64"}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _text(limits: ServiceSettings) -> dict[str, Any]:
    return {"minLength": 1, "maxLength": limits.max_text, "pattern": _WORDS}


def _described(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Without the default that means absence."""
    return {"description": field["description"], **schema}
