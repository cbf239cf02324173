"""What a search gives back. The service's answers and their description are made from these same fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, SkipValidation, computed_field

from vacsr.config import Config

Way = Literal["t2i", "i2t", "i2i", "t2t"]
"""What was asked with and what was found: images of a text, texts of an image, similar images, similar texts. The last
two are by cosine alone: the method scores pairs of an image and a text, and no others."""

Given = Annotated[str, SkipValidation]
"""A string of somebody's data: it may hold half a surrogate pair, as JSON may, which a check for UTF-8 would refuse."""


class _Result(Config):
    model_config = ConfigDict(allow_inf_nan=True, serialize_by_alias=True)


class Hit(_Result):
    """One item of the index."""

    rank: int
    """From 1."""
    id: Given
    """As the index was given it."""
    cosine: float
    """Of the towers' vectors."""
    score: float | None
    """The method's. It has none for two images or two texts."""
    grade: float | None
    """In 0–1: with a calibration the chance that it is a labelled match, else the method's own grade. None without a
    score."""
    uncertainty: float | None
    """σ; None where the method has none, or there is no score."""
    probably_also: bool
    """Looks like a match beside the first."""
    metadata: Annotated[dict[str, Any], SkipValidation]
    """That the index keeps with it."""


class Results(_Result):
    """Hits, best first, and whether the first is vouched for."""

    schema_version: int = Field(default=1, alias="schema")
    """Of this answer's form."""
    direction: Way
    """t2i: a text found images. i2t: an image found texts. i2i, t2t: similar ones, by cosine, without grade."""
    policy: str
    """That ordered the hits."""
    hits: tuple[Hit, ...]
    """As many as were asked for, or as the index holds."""
    answered: bool
    """False only where the policy abstains; the hits are then what was not vouched for."""
    reason: str
    """Why there is no answer; empty where there is one."""
    confidence: float | None
    """Chance that the first by score is right; None without a calibration."""
    promised: bool
    """Is the first hit vouched for? Only an answer of ``abstain`` is, from an exact index of the size of the fit."""
    note: str
    """What does not hold for this answer, and what to type; empty where all does."""
    calibrated: bool
    """Are grades those of a calibration?"""
    index_size: int
    """Items that were searched."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def probably_also(self) -> list[str]:
        """Ids of the hits that are probably matches too."""
        return [hit.id for hit in self.hits if hit.probably_also]

    @property
    def graded(self) -> bool:
        """Is there a score? Not among images alone, or texts alone."""
        return self.direction in ("t2i", "i2t")

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return self.model_dump()
