"""Scores and uncertainties of image-text pairs from a trained model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.base import TowerBackbone
from vacsr.backbones.inputs import PhotoReader, Reader, TowerInputs, tower_inputs
from vacsr.data import PairSet, PhotoSet
from vacsr.data.listed import ListedPhotos
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.methods.base import Embedding, take
from vacsr.methods.model import MatchingModel
from vacsr.scoring.cascade import (
    PrefilterChoice,
    PrefilterRecall,
    choose_prefilter,
    prefiltered_topk,
    recall_of_prefilter,
)
from vacsr.scoring.device import choose_device
from vacsr.scoring.engine import Precision, choose_scorer
from vacsr.scoring.inputs import Features, Images, Texts, checked_features, words_of
from vacsr.scoring.topk import Direction, TopK, stable_topk

__all__ = [
    "AlignedScores",
    "Features",
    "Images",
    "PairScorer",
    "PairScores",
    "Precision",
    "PrefilterChoice",
    "PrefilterRecall",
    "Texts",
    "TopK",
    "choose_device",
    "choose_prefilter",
    "recall_of_prefilter",
]

_ROWS = 64  # images a block of a matrix that is there
_ENCODE = {"cpu": 32, "cuda": 256}  # photos or captions that towers take at a time


class AlignedScores(NamedTuple):
    """Scores of pairs (image n, text n)."""

    score: Tensor  # [N]
    grade: Tensor  # [N], in (0, 1)
    uncertainty: Tensor | None  # [N]


@dataclass(frozen=True)
class PairScores:
    """All pairs of some images and texts, computed when asked for: ``blocks`` and ``topk`` never hold the matrix."""

    scorer: PairScorer
    images: Embedding
    texts: Embedding

    def blocks(self) -> Iterator[Tensor]:
        """Consecutive row blocks [b, T] of the score matrix; without images one block [0, T]."""
        if "score" in vars(self):  # someone has asked for the whole matrix: do not compute it twice
            yield from torch.split(self.score, _ROWS)
        else:
            yield from self.scorer.blocks.stream(self.images, self.texts)

    @cached_property
    def score(self) -> Tensor:
        """The whole matrix. [I, T]"""
        return torch.cat(list(self.blocks()))

    def topk(self, k: int, *, direction: Direction = "i2t", prefilter: int | None = None) -> TopK:
        """Best texts of each image, or best images of each text, by (−score, index), streamed.

        Exact, unless ``prefilter`` says how many items of the highest cosine are scored for each query: see
        :func:`choose_prefilter`. [I, min(k, T)] or [T, min(k, I)]
        """
        if k < 1:
            raise UsageError(f"k is {k}, expected 1 or more — ask for topk(10)")
        if direction not in ("i2t", "t2i"):
            raise UsageError(f"no direction {direction!r} — use i2t (texts of an image) or t2i (images of a text)")
        if prefilter is not None and prefilter < len(self.texts.mean if direction == "i2t" else self.images.mean):
            return prefiltered_topk(self, k, candidates=prefilter, direction=direction)
        if "score" in vars(self):
            return stable_topk(self.score if direction == "i2t" else self.score.T, k)
        return self.scorer.blocks.topk(self.images, self.texts, k=k, direction=direction)

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
    """Scores raw image and text features with a trained model.

    It moves the model itself to ``device``, puts it in eval mode and folds its adapter once, here: after more training
    make a new scorer. ``dtype`` is the arithmetic of the large products: float32, bfloat16, float16 on a GPU, int8 on
    a CPU, or "auto", a fast one that the machine has. Results are float32.
    """

    def __init__(
        self, model: MatchingModel, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> None:
        self.device = choose_device(device)
        self.model = model.to(self.device).eval()
        self.blocks = choose_scorer(self.model.method, device=self.device, dtype=dtype)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> PairScorer:
        """From a model folder or a run folder."""
        return cls(MatchingModel.from_pretrained(folder), device=device, dtype=dtype)

    @torch.inference_mode()
    def embed_images(self, images: Images) -> Embedding:
        """Features [I, D_image], or photos for a model with towers. -> [I, d] on the scorer's device"""
        if not isinstance(self.model.backbone, TowerBackbone):
            return self.model.embed_images(checked_features(images, kind="image", device=self.device))
        photos = ListedPhotos.of(images)
        return self._encode(PhotoReader(photos, self.model.backbone.transform), count=len(photos))

    @torch.inference_mode()
    def embed_texts(self, texts: Texts) -> Embedding:
        """Features [T, D_text], or words for a model with towers. -> [T, d] on the scorer's device"""
        if not isinstance(self.model.backbone, TowerBackbone):
            return self.model.embed_texts(checked_features(texts, kind="text", device=self.device))
        return self._encode_tokens(self.model.backbone.tokenize(words_of(texts)))

    def _encode(self, images: Reader, *, count: int) -> Embedding:
        """Photos through the image tower, batch by batch. -> [count, d]"""
        out = self._room(count)
        batches = [range(here.start, min(here.stop, count)) for here in _chunks(count, _ENCODE[self.device.type])]
        for rows, pixels in zip(batches, images.stream(batches), strict=True):
            _put(self.model.embed_images(pixels.to(self.device)), out, slice(rows.start, rows.stop))
        return out

    def _encode_tokens(self, tokens: Tensor) -> Embedding:
        """Tokens [M, L] through the text tower, batch by batch. -> [M, d]"""
        out = self._room(len(tokens))
        for here in _chunks(len(tokens), _ENCODE[self.device.type]):
            _put(self.model.embed_texts(tokens[here].to(self.device)), out, here)
        return out

    def _room(self, count: int) -> Embedding:
        """For as many items, with variances where the method gives them. -> [count, d]"""
        mean = torch.empty(count, self.model.dim, device=self.device)
        return Embedding(mean, None if self.model.image_variance is None else torch.empty_like(mean))

    def score_all(self, images: Images, texts: Texts) -> PairScores:
        """Every pair, lazily: of features [I, D_image], [T, D_text], or of photos and words."""
        return PairScores(self, self.embed_images(images), self.embed_texts(texts))

    @torch.inference_mode()
    def score_set(self, pairs: PairSet | PhotoSet, *, inputs: TowerInputs | None = None) -> PairScores:
        """Every pair of a data set, after checking that it is of the kind the model was trained on.

        ``inputs``: what :func:`vacsr.backbones.inputs.tower_inputs` made of it, where it is scored more than once.
        """
        self.check_set(pairs)
        if not len(pairs):
            raise DataError(
                "these data hold photos without captions, so there are no pairs — give captions: folder:DIR or csv:FILE"
            )
        if isinstance(pairs, PairSet):
            features, words = pairs.images.to(self.device), pairs.texts.to(self.device)  # a PairSet has checked them
            return PairScores(self, self.model.embed_images(features), self.model.embed_texts(words))
        assert isinstance(self.model.backbone, TowerBackbone), "the check has refused other backbones"
        found = inputs or tower_inputs(self.model.backbone, pairs)
        images = self._encode(found.images, count=len(pairs.image_ids))
        return PairScores(self, images, self._encode_tokens(found.texts))

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
        """Aligned scores in chunks. -> [N]"""
        rows, cols = rows.to(self.device), cols.to(self.device)
        score = torch.empty(len(rows), device=self.device)
        for here in _chunks(len(rows)):
            score[here] = self.blocks.aligned(take(images, rows[here]), take(texts, cols[here]))
        return score

    def uncertainty_of(self, images: Embedding, texts: Embedding, *, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Aligned uncertainty in chunks; None where the method has none."""
        rows, cols = rows.to(self.device), cols.to(self.device)
        value = torch.empty(len(rows), device=self.device)
        for here in _chunks(len(rows)):
            part = self.model.method.uncertainty(take(images, rows[here]), take(texts, cols[here]))
            if part is None:
                return None
            value[here] = part
        return value


def _put(part: Embedding, out: Embedding, rows: slice) -> None:
    """Some items into their place."""
    out.mean[rows] = part.mean
    if out.log_var is not None and part.log_var is not None:
        out.log_var[rows] = part.log_var


def _chunks(count: int, size: int = 8192) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]
