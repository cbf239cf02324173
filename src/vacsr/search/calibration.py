"""What a dev split says about a model's searches, kept beside the model as ``search.json``."""

from __future__ import annotations

import json
from pathlib import Path

from vacsr.config import Config
from vacsr.config.io import parse
from vacsr.errors import ConfigError, DataError
from vacsr.files import write_json
from vacsr.pretrained import model_folder
from vacsr.scoring.topk import Direction
from vacsr.search.grades import GradeCalibration
from vacsr.search.lcb import LcbRule
from vacsr.search.missed import MissedRule
from vacsr.search.risk import AnswerRule

FILE = "search.json"
SMALLER, LARGER = 0.2, 0.02
"""An index that has up to these shares less or more than the galleries of the fit counts as of the same size.

Fewer items are fewer chances to be wrong. More are more; a few are allowed since images differ in their captions.
"""


class DirectionCalibration(Config):
    """Of text → image (``t2i``) or image → text (``i2t``)."""

    gallery: int
    """Items that were searched."""
    candidates: int
    """Nearest by cosine that the method scores."""
    depth: int
    """Best by score whose σ is looked at."""
    queries: int
    grades: GradeCalibration
    ece_own: float
    ece_temperature: float
    ece_isotonic: float
    lcb: LcbRule
    answer: AnswerRule
    missed: MissedRule
    hub_share: float = 0.0
    """Of the wrong answers at the threshold, the share that 1% of the items take; see :mod:`.hubs`."""

    def same_size(self, size: int) -> bool:
        """May the promise of ``answer`` be made for an index of this size?"""
        return (1 - SMALLER) * self.gallery <= size <= (1 + LARGER) * self.gallery


class Calibration(Config):
    """Everything that is fitted, and what to."""

    schema_version: int = 2
    model: str
    """The model's digest."""
    data: str
    """A digest of the ids and labels of the pairs."""
    pairs: str
    split: str
    selected_on: str = ""
    """The split of these data by which training chose the epoch; where it is ``split``, the model has seen it."""
    seed: int
    t2i: DirectionCalibration
    i2t: DirectionCalibration

    def of(self, direction: Direction) -> DirectionCalibration:
        """One of the two."""
        return self.t2i if direction == "t2i" else self.i2t


def calibration_path(run: Path) -> Path:
    """Where a run or model folder keeps it."""
    return model_folder(run) / FILE


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write it atomically."""
    write_json(path, calibration.model_dump(mode="json"))


def load_calibration(run: Path, *, model: str) -> Calibration | None:
    """Read it; None where there is none. One that was fitted to other weights is an error.

    ``model``: the digest of the model that is to search, see :func:`vacsr.search.provenance.model_digest`.
    """
    path = calibration_path(run)
    if not path.is_file():
        return None
    try:
        found = parse(Calibration, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, ConfigError) as error:
        raise DataError(
            f"{path} cannot be read ({error}) — fit it again: vacsr calibrate {run} --pairs SPEC"
        ) from error
    if found.model != model:
        message = f"{path} was fitted to other weights than those beside it"
        raise DataError(f"{message} — fit it again: vacsr calibrate {run} --pairs SPEC")
    return found
