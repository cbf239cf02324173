"""Which classes to learn from how few photos, and where the result is tested."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config


class FewshotDataConfig(Config):
    """A data set of labelled photos, a draw of shots from it, and the protocol that says what is tested."""

    spec: str = "scenes:classes=24"
    """SPEC string of labelled photos, e.g. `coop:ROOT,set=oxford_pets`, `folder:PATH`, `csv:FILE`."""
    protocol: Literal["base-to-novel", "domain", "all"] = "base-to-novel"
    """Train on the first half of the classes and test each half; train on all and test the targets too; or neither."""
    shots: Annotated[int, Field(ge=1)] = 16
    """Training photos per class; a class with fewer gives all it has. Validation has min(shots, 4)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Of the draw of shots; the public results average 1, 2 and 3."""
    shots_file: str = ""
    """A draw to take instead of shots and seed: `shots.json` of another run, or a published index file."""
    targets: dict[str, str] = Field(default_factory=dict)
    """For `domain`: a name in the report and the SPEC of each further data set, tested over its own classes."""
    template: str = ""
    """Sentence of a class with {} for its name, for the source and all targets; empty takes each data set's own."""
    sentences: str = ""
    """JSON file {class name: [sentences]} with descriptions of every class, for methods that read them (CoPrompt)."""
