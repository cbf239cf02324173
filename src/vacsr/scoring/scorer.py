"""Scores and uncertainties of image-text pairs from a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.backbones.images import PhotoReader, TowerInputs, tower_inputs
from vacsr.config.base import did_you_mean
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.data.photos import ListedPhotos, Picture
from vacsr.errors import DataError, ShapeMismatch, UsageError
from vacsr.methods.base import Embedding, Method, take
from vacsr.model import MatchingModel, choose_device
from vacsr.scoring.cascade import Precision, candidate_scores, choose_engine
from vacsr.scoring.topk import DIRECTIONS, BothTopK, Direction, TopK, blocks_topk

Features = Tensor | npt.NDArray[Any]
"""Raw features [N, D] of float16, float32 or float64; scored in float32."""
Images = Features | Sequence[Picture]
"""What a model reads as images: cached features, or photos as paths or PIL images for a model with towers."""
Texts = Features | Sequence[str]
"""What a model reads as texts: cached features, or strings for a model with towers."""
_ALIGNED = 8192  # aligned pairs at a time


class AlignedScores(NamedTuple):
    """Scores of pairs (image n, text n)."""

    score: Tensor  # [N]
    grade: Tensor | None  # [N], in (0, 1); None where the method only ranks
    uncertainty: Tensor | None  # [N], σ; None where the method has none
    disagreement: Tensor | None  # [N], of the members; None without members

    def to_dict(self) -> dict[str, Any]:
        """As lists."""
        return {name: None if values is None else values.tolist() for name, values in self._asdict().items()}


class Vectors(NamedTuple):
    """Unit vectors whose dot product is the cosine; those of several networks stand end to end."""

    images: Tensor  # [I, d]
    texts: Tensor  # [T, d]
    networks: int


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
        if self._matrix is None:
            return self.scorer.engine.stream(self.images, self.texts)
        return iter(torch.split(self._matrix, 64))

    @property
    def score(self) -> Tensor:
        """The whole matrix, computed once. [I, T]"""
        if self._matrix is None:
            self._matrix = torch.cat(list(self.blocks()))
        return self._matrix

    def topk(self, k: int, *, direction: Direction = "i2t") -> TopK:
        """Best texts of each image, or best images of each text, by (−score, index). [I, min(k, T)] or [T, min(k, I)]

        The order is that of float32 in a float32 scorer, on a GPU by the rule of
        :class:`vacsr.scoring.cascade.Cascade`. A scorer in half precision orders by its scores; float8 rescores its
        best 2·k, at least k + 16, in half precision.
        """
        return self._topk(k, [direction])[0]

    def topk_both(self, k: int) -> BothTopK:
        """Best texts of each image and best images of each text, in one pass over all pairs; else as ``topk``.

        ``.texts``: [I, min(k, T)], ``.images``: [T, min(k, I)].
        """
        return BothTopK(*self._topk(k, DIRECTIONS))

    def _topk(self, k: int, directions: Sequence[Direction]) -> list[TopK]:
        if k < 1 or not set(directions) <= set(DIRECTIONS):
            raise UsageError(f"top {k} of {', '.join(directions)} — ask for topk(10), direction='i2t' or 't2i'")
        if self._matrix is not None and self.scorer.engine.exact:
            return blocks_topk(self.blocks(), k, directions=directions)
        return self.scorer.engine.topk(self.images, self.texts, k=k, directions=directions)

    @torch.inference_mode()
    def score_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Of the pairs (rows[n], cols[n]) only, without the matrix. [N], [N] -> [N]"""
        return torch.cat([self.scorer.engine.aligned(v, t) for v, t in self._aligned(rows, cols)])

    @torch.inference_mode()
    def score_lists(self, queries: Tensor, items: Tensor, *, direction: Direction) -> Tensor:
        """Of each query with its own items, without the matrix. Rows of images and texts [Q], [Q, m] -> [Q, m]"""
        asked, held = (self.images, self.texts) if direction == "i2t" else (self.texts, self.images)
        rows, cols = (index.to(self.scorer.device) for index in (queries, items))
        return candidate_scores(self.scorer.engine, take(asked, rows), held, cols, direction=direction)

    @torch.inference_mode()
    def uncertainty(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Of the pairs (rows[n], cols[n]); None where the method has none. [N], [N] -> [N]"""
        return _joined(self.scorer.pair_uncertainty(v, t) for v, t in self._aligned(rows, cols))

    @torch.inference_mode()
    def disagreement(self, rows: Tensor, cols: Tensor) -> Tensor | None:
        """Of the members about the pairs (rows[n], cols[n]); None without members. [N], [N] -> [N]"""
        return _joined(self.scorer.model.method.disagreement(v, t) for v, t in self._aligned(rows, cols))

    def at(self, rows: Tensor, cols: Tensor) -> AlignedScores:
        """Score, grade, uncertainty and disagreement of the pairs (rows[n], cols[n]), without the matrix. [N], [N]"""
        score = self.score_of(rows, cols)
        return AlignedScores(score, self.grade(score), self.uncertainty(rows, cols), self.disagreement(rows, cols))

    def vectors(self) -> Vectors:
        """The embeddings that cosines are of."""
        method = self.scorer.model.method
        return Vectors(self.images.mean, self.texts.mean, method.networks * method.members)

    def temperature(self) -> float | None:
        """At which a softmax of the scores is the one of the loss; None where the loss has none."""
        method = self.scorer.model.method
        likelihood = None if method.logit_score else method.likelihood()
        return 1.0 if method.logit_score else None if likelihood is None else 1.0 / likelihood.scale

    def against(self, texts: Texts) -> PairScores | None:
        """The same images with other texts; None for words that a model on features cannot embed."""
        model = self.scorer.model
        words = not isinstance(texts, Tensor | np.ndarray)
        if words and not (model.has_towers or model.backbone.reads_photos):
            return None
        return PairScores(self.scorer, self.images, self.scorer.embed_texts(texts))

    @torch.inference_mode()
    def grade(self, score: Tensor) -> Tensor | None:
        """Scores as the probability of a match; None where the method only ranks. [...] -> [...]"""
        return self.scorer.model.method.grade(score)

    def _aligned(self, rows: Tensor, cols: Tensor) -> Iterator[tuple[Embedding, Embedding]]:
        """The embeddings of some pairs at a time; of none, one empty part."""
        parts = (torch.split(index.to(self.scorer.device), _ALIGNED) for index in (rows, cols))
        return ((take(self.images, row), take(self.texts, col)) for row, col in zip(*parts, strict=True))


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
        self._step = 256 if self.device.type == "cuda" else 32  # photos or captions per batch of the towers

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> PairScorer:
        """From whatever :func:`open_model` opens."""
        return cls(open_model(folder), device=device, dtype=dtype)

    @torch.inference_mode()
    def embed_images(self, images: Images) -> Embedding:
        """Features [I, D_image], or photos for a model with encoders. -> [I, d] on the scorer's device"""
        if self._takes_features(images):
            return self._embed(self.model.embed_images, [_checked_features(images, kind="image", device=self.device)])
        photos = PhotoReader(ListedPhotos.of(images), self.model.backbone.transform)
        return self._embed(self.model.embed_images, photos.batches(self._step))

    @torch.inference_mode()
    def embed_texts(self, texts: Texts) -> Embedding:
        """Features [T, D_text], or strings for a model with encoders. -> [T, d] on the scorer's device"""
        if self._takes_features(texts):
            return self._embed(self.model.embed_texts, [_checked_features(texts, kind="text", device=self.device)])
        strings = [] if isinstance(texts, str | Tensor | np.ndarray) else list(texts)
        if not strings or not all(isinstance(text, str) and text.strip() for text in strings):
            raise UsageError("the model reads words — pass a list of texts that are not blank, such as ['a dog']")
        return self._embed(self.model.embed_texts, torch.split(self.model.backbone.tokenize(strings), self._step))

    def _takes_features(self, items: Images | Texts) -> bool:
        """A model on features takes these, and photos and words only if it knows its encoders."""
        features = isinstance(items, Tensor | np.ndarray) or not self.model.backbone.reads_photos
        return features and not self.model.has_towers

    def _embed(self, embed: Callable[[Tensor], Embedding], batches: Iterable[Tensor]) -> Embedding:
        """Features, pixels or tokens, batch by batch, also where there are none. -> [N, d]"""
        parts = [embed(batch.to(self.device)) for batch in batches]
        empty = torch.empty(0, self.model.dim, device=self.device)
        mean = torch.cat([empty, *(part.mean for part in parts)])
        if self.model.image_variance is None:
            return Embedding(mean)
        return Embedding(mean, torch.cat([empty, *(part.log_var for part in parts if part.log_var is not None)]))

    def pair_uncertainty(self, v: Embedding, t: Embedding) -> Tensor | None:
        """Uncertainty of pairs (n, n); None where the method has none. [N, d], [N, d] -> [N]"""
        return self.model.method.uncertainty(v, t)

    def score_all(self, images: Images, texts: Texts) -> PairScores:
        """Every pair, lazily: of features [I, D_image], [T, D_text], or of photos and strings."""
        return PairScores(self, self.embed_images(images), self.embed_texts(texts))

    def score_pairs(self, images: Images, texts: Texts) -> AlignedScores:
        """Aligned pairs with their uncertainty: N images and N texts."""
        scores = self.score_all(images, texts)
        if len(images) != len(texts):
            message = f"aligned pairs need as many images as texts, not {len(images)} and {len(texts)}"
            raise ShapeMismatch(f"{message} — repeat an image for each of its texts, or use score_all")
        every = torch.arange(len(images))
        return scores.at(every, every)

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
        if isinstance(pairs, PairSet):  # which has checked its features
            v = self._embed(self.model.embed_images, [pairs.images])
            t = self._embed(self.model.embed_texts, [pairs.texts])
        else:
            inputs = inputs or tower_inputs(self.model.backbone, pairs)
            v = self._embed(self.model.embed_images, inputs.images.batches(self._step))
            t = self._embed(self.model.embed_texts, torch.split(inputs.texts, self._step))
        return PairScores(self, v, t)

    def score_named(self, pairs: PairSet | PhotoSet, image: str, texts: Sequence[str]) -> PairScores:
        """One image of a data set by its id, with captions of the set by id or by their exact words. [1, len(texts)]"""
        self.check_set(pairs)
        row = _index(image, pairs.image_ids, "file or image id")
        words = pairs.captions or ()
        cols = [words.index(text) if text in words else _index(text, pairs.caption_ids, "caption id") for text in texts]
        if isinstance(pairs, PhotoSet):
            return self.score_all([pairs.photos.open(row)], [pairs.captions[col] for col in cols])
        return self.score_all(pairs.images[row : row + 1], pairs.texts[cols])

    def check_set(self, pairs: PairSet | PhotoSet) -> None:
        """Raise where the model was trained on something else: photos instead of features, or other features."""
        if isinstance(pairs, PairSet):
            if self.model.has_towers:
                raise DataError("the model reads photos, these data are cached features — give photos, e.g. folder:DIR")
            self.model.provenance.check(pairs.provenance)
        elif not self.model.backbone.reads_photos:
            source = self.model.provenance.backbone or "the towers it was trained on"
            message = f"the model reads cached features, these data are photos — embed them first with {source}"
            raise DataError(f"{message}: vacsr embed --backbone … --pairs … --out FILE")


class CosineDistanceScorer(PairScorer):
    """The same scores, with 1 − score as uncertainty: the reference for every other uncertainty.

    Among the answers to one query it only repeats the ranking; across queries it separates sure from unsure ones.
    """

    def __init__(
        self, model: MatchingModel, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> None:
        check_cosine(model.method, dim=model.config.head.dim)
        super().__init__(model, device=device, dtype=dtype)

    def pair_uncertainty(self, v: Embedding, t: Embedding) -> Tensor:
        return 1.0 - self.engine.aligned(v, t)


def check_cosine(method: Method, *, dim: int) -> None:
    """Raise where a method does not score vectors of ``dim`` by their cosine, or by the mean over its networks."""
    device = next(method.parameters(), torch.empty(0)).device
    random = torch.randn(2, 3, dim * method.networks * method.members, generator=torch.Generator().manual_seed(0))
    v, t = functional.normalize(random, dim=-1).to(device)
    with torch.no_grad():
        scores = method.score(*(Embedding(x, torch.zeros_like(x)) for x in (v, t)))
    if not torch.allclose(scores.float(), v @ t.T, atol=1e-5):
        message = f"{method.config.name} does not score by a cosine, so 1 − cosine is not its uncertainty"
        raise UsageError(f"{message} — use a method such as infonce or sigmoid, or set evaluate.posthoc=none")


def open_model(source: str | Path) -> MatchingModel:
    """What :meth:`MatchingModel.from_pretrained` reads, or ``features:FILE``: the encoders, whatever they are, whose
    vectors of images and texts in one space the file holds."""
    if not (spec := str(source)).startswith("features:"):
        return MatchingModel.from_pretrained(source)
    pairs = load_pairs(spec)
    assert isinstance(pairs, PairSet), "features are no photos"
    if pairs.images.shape[1] != pairs.texts.shape[1]:
        message = f"{spec} holds {pairs.images.shape[1]} and {pairs.texts.shape[1]} dimensions: not one space"
        raise UsageError(f"{message} — train heads on top: vacsr train, with data.pairs={spec}")
    return MatchingModel.from_vectors(pairs.images.shape[1], pairs.provenance)


def _joined(parts: Iterable[Tensor | None]) -> Tensor | None:
    """One vector of all parts, or None where the first is None."""
    every = list(parts)
    return None if every[0] is None else torch.cat([part for part in every if part is not None])


def _index(name: str, names: Sequence[str], what: str) -> int:
    """The position of a name."""
    if name not in names:
        message = f"no {what} '{name}' among {len(names)}{did_you_mean(name, names[:20000])}"
        raise DataError(f"{message} — give a name that the data have, such as '{names[0]}'")
    return names.index(name)


def _checked_features(features: Images | Texts, *, kind: str, device: torch.device) -> Tensor:
    """Finite rows as float32 on the device. -> [N, D]"""
    if isinstance(features, np.ndarray) and features.dtype.kind in "fiu":
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
            features = torch.from_numpy(np.require(features, np.float32, ["C", "W"]))
    if not isinstance(features, Tensor):
        message = f"{kind} features are a {type(features).__name__} without numbers"
        raise UsageError(f"{message} — pass a tensor or a numpy array of floats [N, D]")
    if features.ndim != 2:
        message = f"{kind} features have shape {list(features.shape)}, expected [N, D]"
        raise ShapeMismatch(f"{message} — pass one row per {kind}, a single one as x[None]")
    features = features.to(device, torch.float32)
    bad = (~torch.isfinite(features).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        message = f"{len(bad):,} of {len(features):,} {kind}s have NaN or infinite features, first in row {bad[0]}"
        raise DataError(f"{message} — embed these again, or leave them out")
    return features
