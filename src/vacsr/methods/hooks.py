"""What the training loop offers a method beyond the loss of a batch. A method asks by having the function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Studies(Protocol):
    """A method that looks at the training set once, before the first step, e.g. at the words of its captions."""

    def study(self, captions: Sequence[str] | None, caption_image: Tensor) -> None:
        """The M captions as words, where these are known, and the image row of each [M]."""
