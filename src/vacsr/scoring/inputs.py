"""What may be scored: features that are finite rows, words that are not blank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vacsr.data.listed import Picture
from vacsr.errors import DataError, ShapeMismatch, UsageError

Features = Tensor | npt.NDArray[Any]
"""Raw features [N, D] of float16, float32 or float64; scored in float32."""
Images = Features | Sequence[Picture]
"""What a model reads as images: cached features, or photos as paths or PIL images for a model with towers."""
Texts = Features | Sequence[str]
"""What a model reads as texts: cached features, or words for a model with towers."""


def words_of(texts: Texts) -> list[str]:
    """Texts for towers, none of them blank."""
    words = [] if isinstance(texts, str | Tensor | np.ndarray) else list(texts)
    if not words or not all(isinstance(text, str) and text.strip() for text in words):
        raise UsageError("the model reads words — pass a list of texts that are not blank, such as ['a dog']")
    return words


def checked_features(given: Images | Texts, *, kind: str, device: torch.device) -> Tensor:
    """Features as float32 on the device, once they are known to be finite rows. -> [N, D]"""
    if isinstance(given, np.ndarray):
        given = _from_numpy(given, kind=kind)
    if not isinstance(given, Tensor):
        raise UsageError(f"{kind} features are a {type(given).__name__} — pass a tensor or a numpy array [N, D]")
    if given.ndim != 2:
        message = f"{kind} features have shape {list(given.shape)}, expected [N, D]"
        raise ShapeMismatch(f"{message} — pass one row per {kind}, a single one as x[None]")
    features = given.to(device, torch.float32)
    bad = (~torch.isfinite(features).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        message = f"{len(bad):,} of {len(features):,} {kind}s have NaN or infinite features, first in row {bad[0]}"
        raise DataError(f"{message} (counted from 0) — embed these again, or leave them out")
    return features


def _from_numpy(array: npt.NDArray[Any], *, kind: str) -> Tensor:
    """Any layout and byte order; what float32 cannot hold becomes infinite."""
    if array.dtype.kind not in "fiu":
        raise DataError(f"{kind} features are {array.dtype}, expected floats — convert them with .astype('float32')")
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.require(array, np.float32, ["C", "W"]))
