"""Scores and uncertainties of image-text pairs from a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vacsr.backbones.inputs import PhotoReader, Reader, TowerInputs, tower_inputs
from vacsr.data import PairSet, PhotoSet
from vacsr.data.listed import ListedPhotos
from vacsr.errors import DataError, ShapeMismatch
from vacsr.methods.base import Embedding, take
from vacsr.model import MatchingModel
from vacsr.scoring.cascade import (
    PrefilterChoice,
    PrefilterRecall,
    choose_prefilter,
    recall_of_prefilter,
)
from vacsr.scoring.device import choose_device
from vacsr.scoring.engine import Precision, choose_scorer
from vacsr.scoring.inputs import Features, Images, Texts, checked_features, words_of
from vacsr.scoring.kernel_topk import BothTopK
from vacsr.scoring.pair_scores import PairScores
from vacsr.scoring.topk import TopK

__all__ = [
    "AlignedScores",
    "BothTopK",
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

_ENCODE = {"cpu": 32, "cuda": 256}  # photos or captions that towers take at a time


class AlignedScores(NamedTuple):
    """Scores of pairs (image n, text n)."""

    score: Tensor  # [N]
    grade: Tensor  # [N], in (0, 1)
    uncertainty: Tensor | None  # [N]


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
        if not self.model.has_towers:
            return self.model.embed_images(checked_features(images, kind="image", device=self.device))
        photos = ListedPhotos.of(images)
        return self._encode(PhotoReader(photos, self.model.backbone.transform), count=len(photos))

    @torch.inference_mode()
    def embed_texts(self, texts: Texts) -> Embedding:
        """Features [T, D_text], or words for a model with towers. -> [T, d] on the scorer's device"""
        if not self.model.has_towers:
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
