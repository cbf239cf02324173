"""Scores and uncertainties of image-text pairs from a trained model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vacsr.backbones.images import PhotoReader, Reader, TowerInputs, tower_inputs
from vacsr.data import PairSet, PhotoSet
from vacsr.data.listed import ListedPhotos, Picture
from vacsr.errors import DataError, EnvironmentProblem, ShapeMismatch, UsageError
from vacsr.methods.base import Embedding, Method, take
from vacsr.model import MatchingModel
from vacsr.scoring.cascade import Cascade, prefiltered_topk
from vacsr.scoring.folded import FP8, BlockScorer, Engine, Precision, choose_dtype, half_dtype
from vacsr.scoring.kernel import WIDEST, KernelScorer, available, decoder_width
from vacsr.scoring.topk import BothTopK, Direction, TopK

Features = Tensor | npt.NDArray[Any]
"""Raw features [N, D] of float16, float32 or float64; scored in float32."""
Images = Features | Sequence[Picture]
"""What a model reads as images: cached features, or photos as paths or PIL images for a model with towers."""
Texts = Features | Sequence[str]
"""What a model reads as texts: cached features, or strings for a model with towers."""
Side = Literal["image", "text"]
_ENCODE = {"cpu": 32, "cuda": 256}  # photos or captions per batch of the towers
_ALIGNED = 8192  # aligned pairs at a time


def choose_device(name: str | torch.device) -> torch.device:
    """``auto`` is CUDA where present; asking for CUDA without a GPU is an error."""
    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device '{name}' — use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device '{name}' is not supported — use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("this torch sees no CUDA GPU — use device=cpu, or see: vacsr doctor")
    return device


def choose_engine(method: Method, *, device: torch.device, dtype: Precision = torch.float32) -> Engine:
    """The fastest engine for a method, a device and a dtype; folds the adapter once.

    In float32 everything is float32: on a GPU the kernel only chooses candidates for the top-k, and only where the
    result is the same. In half precision the kernel computes the scores; in float8 their top-k is rescored in half.
    """
    folded = method.fold()
    dtype = choose_dtype(dtype, folded=folded, device=device)
    if dtype == FP8:
        kernel = KernelScorer(method, dtype=dtype, folded=folded)  # raises where it cannot run: there is no other way
        return Cascade(kernel, kernel.plain, exact=False)
    plain = BlockScorer(method, dtype=dtype, folded=folded)
    if device.type != "cuda" or folded is None or decoder_width(folded) > WIDEST or not available(folded.trunk.device):
        return plain
    if dtype == torch.float32:
        return Cascade(KernelScorer(method, dtype=half_dtype(folded), folded=folded), plain, exact=True)
    return KernelScorer(method, dtype=dtype, folded=folded)


class AlignedScores(NamedTuple):
    """Scores of pairs (image n, text n)."""

    score: Tensor  # [N]
    grade: Tensor  # [N], in (0, 1)
    uncertainty: Tensor | None  # [N]


class PairScores:
    """All pairs of some images and texts, computed when asked for.

    ``blocks``, ``topk`` and ``topk_both`` never hold the whole matrix; ``score`` computes and keeps it.
    """

    def __init__(self, scorer: PairScorer, images: Embedding, texts: Embedding) -> None:
        self.scorer, self.images, self.texts = scorer, images, texts
        self._matrix: Tensor | None = None

    def __repr__(self) -> str:
        return f"PairScores({len(self.images.mean):,} images × {len(self.texts.mean):,} texts)"

    def blocks(self) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T] of the score matrix; without images one block [0, T]."""
        return self.scorer.engine.blocks(self.images, self.texts, matrix=self._matrix)

    @property
    def score(self) -> Tensor:
        """The whole matrix, computed once. [I, T]"""
        if self._matrix is None:
            self._matrix = torch.cat(list(self.blocks()))
        return self._matrix

    def topk(self, k: int, *, direction: Direction = "i2t", prefilter: int | None = None) -> TopK:
        """Best texts of each image, or best images of each text, by (−score, index). [I, min(k, T)] or [T, min(k, I)]

        ``prefilter``: score only so many items of each query, those with the highest cosine; faster, not exact. Else
        the order is that of float32 in a float32 scorer, on a GPU by the rule of
        :class:`vacsr.scoring.cascade.Cascade`. A scorer in half precision orders by its scores; float8 rescores its
        best 3·k in half precision.
        """
        k = _count(k, "k", action="ask for topk(10)")
        if direction not in ("i2t", "t2i"):
            raise UsageError(f"unknown direction {direction!r} — use i2t (texts of an image) or t2i (images of a text)")
        engine, sides = self.scorer.engine, (self.images, self.texts)
        if prefilter is not None:
            prefilter = _count(prefilter, "prefilter", action=f"use prefilter={10 * k} or more, or omit it")
            if prefilter < len(sides[direction == "i2t"].mean):
                return prefiltered_topk(engine, *sides, k=k, candidates=prefilter, direction=direction)
        return engine.topk(*sides, k=k, direction=direction, matrix=self._matrix)

    def topk_both(self, k: int) -> BothTopK:
        """Best texts of each image and best images of each text, in one pass over all pairs; else as ``topk``.

        ``.texts``: [I, min(k, T)], ``.images``: [T, min(k, I)].
        """
        k = _count(k, "k", action="ask for topk_both(10)")
        return self.scorer.engine.topk_both(self.images, self.texts, k=k, matrix=self._matrix)

    @torch.inference_mode()
    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Of the pairs (rows[n], cols[n]) only. [N], [N] -> [N]"""
        return self.scorer.uncertainty_of(self.images, self.texts, rows=rows, cols=cols)

    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Of the pairs (rows[n], cols[n]) only, without the matrix. [N], [N] -> [N]"""
        return self.scorer.score_of(self.images, self.texts, rows=rows, cols=cols)

    @torch.inference_mode()
    def grade(self, score: Tensor) -> Tensor:
        """Scores as the method's grade in (0, 1). [...] -> [...]"""
        return self.scorer.model.method.grade(score)


class PairScorer:
    """Scores raw image and text features, or photos and texts, with a trained model.

    It moves the model to ``device``, puts it in eval mode and folds its adapter: after more training make a new scorer.
    ``dtype`` is the arithmetic of the large products: float32, bfloat16, on a GPU also float16 and float8, or "auto":
    half precision on a GPU, float32 on a CPU. Results are float32.
    """

    def __init__(
        self, model: MatchingModel, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> None:
        self.device = choose_device(device)
        self.model = model.to(self.device).eval()
        self.engine = choose_engine(self.model.method, device=self.device, dtype=dtype)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> PairScorer:
        """From a model folder or a run folder."""
        return cls(MatchingModel.from_pretrained(folder), device=device, dtype=dtype)

    @torch.inference_mode()
    def embed_images(self, images: Images) -> Embedding:
        """Features [I, D_image], or photos for a model with towers. -> [I, d] on the scorer's device"""
        if not self.model.has_towers:
            return self._embed([_checked_features(images, kind="image", device=self.device)], side="image")
        photos = ListedPhotos.of(images)
        batches = self._photo_batches(PhotoReader(photos, self.model.backbone.transform), len(photos))
        return self._embed(batches, side="image")

    @torch.inference_mode()
    def embed_texts(self, texts: Texts) -> Embedding:
        """Features [T, D_text], or strings for a model with towers. -> [T, d] on the scorer's device"""
        if not self.model.has_towers:
            return self._embed([_checked_features(texts, kind="text", device=self.device)], side="text")
        tokens = self.model.backbone.tokenize(_checked_strings(texts))
        return self._embed(torch.split(tokens, _ENCODE[self.device.type]), side="text")

    def _photo_batches(self, images: Reader, count: int) -> Iterator[Tensor]:
        step = _ENCODE[self.device.type]
        return images.stream([range(start, min(start + step, count)) for start in range(0, count, step)])

    def _embed(self, batches: Iterable[Tensor], *, side: Side) -> Embedding:
        """Features, pixels or tokens, batch by batch, also where there are none. -> [N, d]"""
        embed = self.model.embed_images if side == "image" else self.model.embed_texts
        parts = [embed(batch.to(self.device)) for batch in batches]
        empty = torch.empty(0, self.model.dim, device=self.device)
        mean = torch.cat([empty, *(part.mean for part in parts)])
        if self.model.image_variance is None:
            return Embedding(mean)
        return Embedding(mean, torch.cat([empty, *(part.log_var for part in parts if part.log_var is not None)]))

    def score_all(self, images: Images, texts: Texts) -> PairScores:
        """Every pair, lazily: of features [I, D_image], [T, D_text], or of photos and strings."""
        return PairScores(self, self.embed_images(images), self.embed_texts(texts))

    @torch.inference_mode()
    def score_set(self, pairs: PairSet | PhotoSet, *, inputs: TowerInputs | None = None) -> PairScores:
        """Every pair of a data set, after checking that it is of the kind the model was trained on.

        ``inputs``: :func:`vacsr.backbones.images.tower_inputs` of the set, where it is scored more than once.
        """
        self.check_set(pairs)
        if not len(pairs):
            raise DataError(
                "these data hold photos without captions, so there are no pairs — give captions: folder:DIR or csv:FILE"
            )
        images: Iterable[Tensor]
        texts: Iterable[Tensor]
        if isinstance(pairs, PairSet):  # which has checked its features
            images, texts = [pairs.images], [pairs.texts]
        else:
            inputs = inputs or tower_inputs(self.model.backbone, pairs)
            images = self._photo_batches(inputs.images, len(pairs.image_ids))
            texts = torch.split(inputs.texts, _ENCODE[self.device.type])
        return PairScores(self, self._embed(images, side="image"), self._embed(texts, side="text"))

    def check_set(self, pairs: PairSet | PhotoSet) -> None:
        """Raise where the model was trained on something else: photos instead of features, or other features."""
        if isinstance(pairs, PairSet):
            if self.model.has_towers:
                raise DataError("the model reads photos, these data are cached features — give photos, e.g. folder:DIR")
            self.model.provenance.check(pairs.provenance)
        elif not self.model.has_towers:
            source = self.model.provenance.backbone or "the towers it was trained on"
            message = f"the model reads cached features, these data are photos — embed them first with {source}"
            raise DataError(f"{message}: vacsr embed --backbone … --pairs … --out FILE")

    @torch.inference_mode()
    def score_pairs(self, images: Images, texts: Texts) -> AlignedScores:
        """Aligned pairs with their uncertainty: N images and N texts."""
        scores = self.score_all(images, texts)
        if len(images) != len(texts):
            raise ShapeMismatch(f"aligned pairs need as many images as texts, not {len(images)} and {len(texts)}")
        every = torch.arange(len(images), device=self.device)
        return self.score_at(scores, rows=every, cols=every)

    @torch.inference_mode()
    def score_at(self, scores: PairScores, *, rows: Tensor, cols: Tensor) -> AlignedScores:
        """The pairs (rows[n], cols[n]) of a lazy matrix, without the matrix. [N], [N]"""
        score = scores.score_of(rows, cols)
        return AlignedScores(score, self.model.method.grade(score), scores.uncertainty(rows, cols))

    @torch.inference_mode()
    def score_of(self, images: Embedding, texts: Embedding, *, rows: Tensor, cols: Tensor) -> Tensor:
        """Scores of the pairs (rows[n], cols[n]). -> [N]"""
        parts = self._aligned_parts(images, texts, rows, cols)
        return torch.cat([torch.empty(0, device=self.device), *(self.engine.aligned(v, t) for v, t in parts)])

    def uncertainty_of(self, images: Embedding, texts: Embedding, *, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Uncertainty of the pairs (rows[n], cols[n]); None where the method has none. -> [N]"""
        values = []
        for v, t in self._aligned_parts(images, texts, rows, cols):
            part = self.model.method.uncertainty(v, t)
            if part is None:
                return None
            values.append(part)
        return torch.cat([torch.empty(0, device=self.device), *values])

    def _aligned_parts(
        self, images: Embedding, texts: Embedding, rows: Tensor, cols: Tensor
    ) -> Iterator[tuple[Embedding, Embedding]]:
        """The embeddings of some pairs at a time."""
        indices = (torch.split(index.to(self.device), _ALIGNED) for index in (rows, cols))
        parts = zip(*indices, strict=True)
        return ((take(images, row), take(texts, col)) for row, col in parts)


def _count(value: int, name: str, *, action: str) -> int:
    """A whole number of at least 1, or an error that says what to ask for."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise UsageError(f"{name} is {value!r}, expected a whole number of at least 1 — {action}")
    return number


def _checked_strings(texts: Texts) -> list[str]:
    """Texts for towers, none of them blank."""
    strings = [] if isinstance(texts, str | Tensor | np.ndarray) else list(texts)
    if not strings or not all(isinstance(text, str) and text.strip() for text in strings):
        raise UsageError("the model reads words — pass a list of texts that are not blank, such as ['a dog']")
    return strings


def _checked_features(features: Images | Texts, *, kind: str, device: torch.device) -> Tensor:
    """Finite rows as float32 on the device. -> [N, D]"""
    if isinstance(features, np.ndarray):
        features = _from_numpy(features, kind=kind)
    if not isinstance(features, Tensor):
        raise UsageError(f"{kind} features are a {type(features).__name__} — pass a tensor or a numpy array [N, D]")
    if features.ndim != 2:
        message = f"{kind} features have shape {list(features.shape)}, expected [N, D]"
        raise ShapeMismatch(f"{message} — pass one row per {kind}, a single one as x[None]")
    features = features.to(device, torch.float32)
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
