"""What is evaluated: scores of all pairs, from a model or from any system's files.

The matrix is a ``.npy`` file, which is mapped rather than read, or a ``.safetensors`` file. The ids are a JSON object
with ``images`` and ``captions``, in the order of rows and columns, and perhaps ``caption_image``, the image id of each
caption.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from vacsr.data.pairs import LabelledPairs
from vacsr.errors import DataError, ShapeMismatch
from vacsr.files import map_npy, read_json, read_tensors
from vacsr.provenance import UNKNOWN, Provenance
from vacsr.scoring.scorer import Vectors

_ROWS = 256  # images per block


class Scores(Protocol):
    """Scores of N images and M captions; :class:`vacsr.scoring.PairScores` and :class:`MatrixScores` are such."""

    def blocks(self) -> Iterator[Tensor]:
        """Consecutive row blocks [b, M]; the same numbers every time."""

    @property
    def score(self) -> Tensor:
        """The whole matrix. [N, M]"""

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Of the pairs (rows[n], cols[n]). [P], [P] -> [P]"""

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Of the pairs (rows[n], cols[n]); None where there is none. [P], [P] -> [P]"""

    def grade(self, score: Tensor) -> Tensor | None:
        """Scores as probabilities of a match, order kept; None where scores only rank. [...] -> [...]"""

    def disagreement(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Of an ensemble's members about the pairs (rows[n], cols[n]); None without members. [P], [P] -> [P]"""

    def vectors(self) -> Vectors | None:
        """What the scores were computed from; None where only scores are known."""

    def temperature(self) -> float | None:
        """At which a softmax of the scores is the one of the loss; None where the loss has none."""

    def against(self, texts: Tensor | Sequence[str]) -> Scores | None:
        """The same images with other captions, given as features or words; None where these cannot be embedded."""


@dataclass(frozen=True, eq=False)
class MatrixScores:
    """A score matrix as it is, and perhaps the uncertainty of every pair.

    >>> MatrixScores(torch.eye(2)).score_of(torch.tensor([0, 1]), torch.tensor([0, 0]))
    tensor([1., 0.])
    """

    score: Tensor  # [N, M]
    sigma: Tensor | None = None  # [N, M]

    def blocks(self) -> Iterator[Tensor]:
        yield from torch.split(self.score, _ROWS)

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        return self.score[rows, cols]

    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        return None if self.sigma is None else self.sigma[rows, cols]

    def grade(self, score: Tensor) -> Tensor | None:
        """None: a foreign score's scale is not known."""
        return None

    def disagreement(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """None: nothing is known but the scores."""
        return None

    def vectors(self) -> Vectors | None:
        """None, as for :meth:`disagreement`."""
        return None

    def temperature(self) -> float | None:
        """None, as for :meth:`grade`."""
        return None

    def against(self, texts: Tensor | Sequence[str]) -> Scores | None:
        """None: there is no model to embed them."""
        return None


@dataclass(frozen=True, eq=False)
class MatrixIds(LabelledPairs):
    """The names of a score matrix's rows and columns, and the labels."""

    image_ids: tuple[str, ...]  # [N], unique
    caption_ids: tuple[str, ...]  # [M], unique
    caption_image: Tensor  # [M] int64, the row of each caption's image
    captions: tuple[str, ...] | None = None
    split: str = "all"
    provenance: Provenance = UNKNOWN

    def __post_init__(self) -> None:
        self.check_labels()


def read_ids(path: Path) -> dict[str, tuple[str, ...]]:
    """``images``, ``captions`` and perhaps ``caption_image`` of a JSON file; ids are strings or whole numbers."""
    given = read_json(path, lists=("images", "captions"))
    ids: dict[str, tuple[str, ...]] = {}
    for name in ("images", "captions", "caption_image"):
        values = given.get(name)
        if values is None and name == "caption_image":
            continue
        if not isinstance(values, list) or not values:
            raise DataError(f"{path}: {name} is not a list of ids — list them in the order of the matrix")
        for row, value in enumerate(values):
            if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
                message = f"{path}: {name}[{row}] is {value!r}, expected an id"
                raise DataError(f"{message} — write a string or a whole number")
        ids[name] = tuple(str(value) for value in values)  # COCO's are numbers in some files
    if len(ids.get("caption_image", ids["captions"])) != len(ids["captions"]):
        counts = f"{len(ids['caption_image']):,} entries for {len(ids['captions']):,} captions"
        raise ShapeMismatch(f"{path}: caption_image has {counts} — give one image id for each caption")
    return ids


def label_rows(images: Sequence[str], captions: Sequence[str], owners: Mapping[str, str]) -> Tensor:
    """The row of each caption's image, by the image id of each caption. -> [M] int64

    Warns of images without captions: they are wrong answers to every caption, but no queries.
    """
    image_rows = {name: row for row, name in enumerate(images)}
    rows: list[int] = []
    for caption in captions:
        if caption not in owners:
            message = f"caption {caption!r} is not in the data of --pairs, or not in COCO's test set"
            raise DataError(f"{message} — check ids and split; elsewhere choose --protocol flickr with caption_image")
        if owners[caption] not in image_rows:
            message = f"caption {caption!r} belongs to image {owners[caption]!r}, which is not among the images"
            raise DataError(f"{message} — caption_image holds image ids, not row numbers; add the image")
        rows.append(image_rows[owners[caption]])
    silent = sorted(set(range(len(images))) - set(rows))
    if silent:
        message = f"{len(silent):,} of {len(images):,} images have no caption, first {images[silent[0]]!r}"
        warnings.warn(f"{message}: image→text metrics are over the others", stacklevel=2)
    return torch.tensor(rows)


def read_scores(path: Path, ids: MatrixIds, *, uncertainty: Path | None = None) -> MatrixScores:
    """The matrix [images, captions], and another of the same shape; NaN or infinity names the first such pair."""
    score = _checked(path, ids)
    return MatrixScores(score, None if uncertainty is None else _checked(uncertainty, ids))


def _checked(path: Path, ids: MatrixIds) -> Tensor:
    matrix, expected = _read_matrix(path), [len(ids.image_ids), len(ids.caption_ids)]
    if list(matrix.shape) != expected:
        message = f"{path} has shape {list(matrix.shape)}, the ids name {expected[0]:,} images and {expected[1]:,}"
        raise ShapeMismatch(f"{message} captions — save it as [images, captions], {expected}")
    for start in range(0, len(matrix), _ROWS):
        finite = torch.isfinite(matrix[start : start + _ROWS])
        if not bool(finite.all()):
            row, col = (~finite).nonzero()[0].tolist()
            where = f"image {ids.image_ids[start + row]!r} and caption {ids.caption_ids[col]!r}"
            raise DataError(f"{path} holds {float(matrix[start + row, col])} for {where} — give every pair a number")
    return matrix


def _read_matrix(path: Path) -> Tensor:
    """As it is in the file, except for half precision, which becomes float32."""
    stored: Tensor | NDArray[Any]
    if path.suffix.lower() == ".npy":
        stored = map_npy(path)
        floats = stored.dtype.kind == "f" and stored.dtype.itemsize <= 8
    elif path.suffix.lower() == ".safetensors":
        tensors, _ = read_tensors(path)
        if "scores" not in tensors and len(tensors) != 1:
            names = ", ".join(sorted(tensors)) or "nothing"
            raise DataError(f"{path} holds {names}, expected one tensor or one called scores — rename it")
        stored = tensors.get("scores", next(iter(tensors.values())))
        floats = stored.is_floating_point()
    else:
        raise DataError(f"{path} is no .npy or .safetensors file — save the matrix with numpy.save")
    if not floats:
        action = "save scores as floats; of ranks and distances, where less is better, save the negative"
        raise DataError(f"{path} holds {stored.dtype}, expected floats — {action}")
    if not isinstance(stored, Tensor):
        stored = torch.from_numpy(stored.astype(stored.dtype.newbyteorder("="), copy=False))
    return stored if stored.dtype in (torch.float32, torch.float64) else stored.float()
