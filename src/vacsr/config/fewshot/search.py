"""What a run may choose for itself on its validation shots."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vacsr.config.base import Config
from vacsr.config.fewshot.vacsr import Blocks

Candidate = Annotated[int, Field(ge=0)] | Blocks
"""A setting of blocks; a plain number n is `first n`."""


class SearchConfig(Config):
    """Candidates to choose from on the validation shots (paper, Appendix C.2); all combinations are tried.

    An empty list leaves that field as the recipe has it; with all three empty nothing is searched.
    """

    image_blocks: tuple[Candidate, ...] = ()
    """Blocks of the image tower that learn; the others rest."""
    text_blocks: tuple[Candidate, ...] = ()
    """The same for the text tower."""
    epochs: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of train.epochs."""
