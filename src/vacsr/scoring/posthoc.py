"""Uncertainty for a trained cosine model, after the fact and without training: a Laplace approximation of its heads.

The last linear layer of each head gets a Gaussian over its weights (:mod:`vacsr.scoring.laplace`). Each image and each
text is then a Gaussian in the shared space before it is normalised, and the cosine of a pair has a mean and a variance
in closed form (:mod:`vacsr.scoring.cosine`). The uncertainty of a pair is the deviation of its cosine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import scheme_of
from vacsr.backbones.inputs import TowerInputs
from vacsr.config import BackboneConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.files import read_tensors, write_tensors
from vacsr.methods.base import Embedding, Method, take
from vacsr.model import MatchingModel
from vacsr.pairwise import same_image
from vacsr.scoring import Images, PairScorer, PairScores, Texts
from vacsr.scoring.cosine import Gaussians, cosine_moments, coupled_cosine_moments
from vacsr.scoring.curvature import Likelihood, output_curvature
from vacsr.scoring.laplace import KroneckerFactors, LayerPosterior, likeliest_precision, with_one
from vacsr.scoring.likelihoods import LabelledCosines, check_cosine, likelihood_of

Laplace = Literal["laplace", "laplace-coupled"]
"""Norms held at their expected size, as published; or varying with the numerator, so that only turning counts."""
PostHoc = Laplace | Literal["cosine"]
"""Besides: 1 − cosine, without a fit (:mod:`vacsr.scoring.distance`)."""
_MOMENTS = {"laplace": cosine_moments, "laplace-coupled": coupled_cosine_moments}
POSTHOC_FILE = "posthoc.safetensors"
"""Its name in a run folder."""
_CHUNK = 8192  # rows in float64 at a time
_PROBES = 16  # batches that choose the scale of a hinge's stand-in


@dataclass(frozen=True, eq=False)
class PostHocUncertainty:
    """A posterior of each head's last layer, and a hash of the heads they belong to."""

    image: LayerPosterior
    text: LayerPosterior
    heads: str

    @classmethod
    @torch.no_grad()
    def fit(
        cls,
        model: MatchingModel,
        pairs: PairSet | PhotoSet,
        *,
        batch_size: int = 128,
        seed: int = 0,
        device: str | torch.device = "auto",
    ) -> PostHocUncertainty:
        """From one pass over the pairs that the model was trained on; no other labels are used.

        ``batch_size``: captions that the loss saw at once in training, each with its image; ``seed`` orders them.
        """
        check_posthoc(model)
        scorer = PairScorer(model, device=device)
        with _inputs_of(model.image_head.last) as images, _inputs_of(model.text_head.last) as texts:
            scorer.score_set(pairs)
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
        image = _Side(model.image_head.last, torch.cat(images), pairs.caption_image.cpu()[order].to(scorer.device))
        text = _Side(model.text_head.last, torch.cat(texts), order.to(scorer.device))
        batches = [slice(start, start + batch_size) for start in range(0, len(pairs), batch_size)]
        likelihood = likelihood_of(model.method, [_cosines(image, text, here) for here in batches[:_PROBES]])
        return cls(
            _posterior(image, text, batches, likelihood=likelihood),
            _posterior(text, image, batches, likelihood=likelihood),
            _digest(model),
        )

    def save(self, path: str | Path) -> None:
        """Write the Kronecker factors and the precisions as safetensors."""
        tensors: dict[str, Tensor] = {}
        metadata = {"heads": self.heads}
        for side, posterior in (("image", self.image), ("text", self.text)):
            tensors |= {f"{side}.{name}": tensor for name, tensor in posterior.factors._asdict().items()}
            metadata[f"{side}.precision"] = repr(posterior.precision)
        write_tensors(Path(path), tensors, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> PostHocUncertainty:
        """Read what :meth:`save` wrote."""
        tensors, metadata = read_tensors(Path(path))
        try:
            image, text = (
                LayerPosterior(
                    KroneckerFactors(tensors[f"{side}.inputs"], tensors[f"{side}.outputs"]),
                    float(metadata[f"{side}.precision"]),
                )
                for side in ("image", "text")
            )
            return cls(image, text, metadata["heads"])
        except (KeyError, ValueError) as error:
            raise DataError(f"{path} holds no post-hoc uncertainty ({error}) — fit and save it again") from error

    def check(self, model: MatchingModel) -> None:
        """Raise unless it was fitted to these very heads."""
        if self.heads != _digest(model):
            again = "PostHocUncertainty.fit(model, training_pairs)"
            raise DataError(f"this post-hoc uncertainty was fitted to other weights — fit it to this model: {again}")


class PostHocScorer(PairScorer):
    """Scores as before, with the deviation of the cosine as uncertainty.

    ``kind`` is how the cosine's moments are taken; ``expected`` scores by the expected cosine instead of the cosine of
    the means, which lowers the score of uncertain items.
    """

    def __init__(
        self,
        model: MatchingModel,
        posthoc: PostHocUncertainty,
        *,
        kind: Laplace = "laplace",
        expected: bool = False,
        device: str | torch.device = "auto",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_posthoc(model)
        posthoc.check(model)
        super().__init__(model, device=device, dtype=dtype)
        self.posthoc, self.moments, self.expected = posthoc, _MOMENTS[kind], expected

    @torch.inference_mode()
    def embed_images(self, images: Images) -> Embedding:
        """Unit vectors with the log-variance of each of their coordinates. -> [I, d]"""
        with _inputs_of(self.model.image_head.last) as seen:
            found = super().embed_images(images)
        return self._spread(found, self.model.image_head.last, seen, posterior=self.posthoc.image)

    @torch.inference_mode()
    def embed_texts(self, texts: Texts) -> Embedding:
        """Unit vectors with the log-variance of each of their coordinates. -> [T, d]"""
        with _inputs_of(self.model.text_head.last) as seen:
            found = super().embed_texts(texts)
        return self._spread(found, self.model.text_head.last, seen, posterior=self.posthoc.text)

    @torch.inference_mode()
    def score_set(self, pairs: PairSet | PhotoSet, *, inputs: TowerInputs | None = None) -> PairScores:
        """Every pair of a data set, as :meth:`PairScorer.score_set` has it."""
        image, text = self.model.image_head.last, self.model.text_head.last
        with _inputs_of(image) as images, _inputs_of(text) as texts:
            found = super().score_set(pairs, inputs=inputs)
        return PairScores(
            self,
            self._spread(found.images, image, images, posterior=self.posthoc.image),
            self._spread(found.texts, text, texts, posterior=self.posthoc.text),
        )

    def uncertainty_of(self, images: Embedding, texts: Embedding, *, rows: Tensor, cols: Tensor) -> Tensor:
        """Deviation of the cosine of the pairs (rows[n], cols[n]). [N]"""
        rows, cols = rows.to(self.device), cols.to(self.device)
        parts = zip(torch.split(rows, _CHUNK), torch.split(cols, _CHUNK), strict=True)
        found = [self.moments(_gaussians(take(images, row)), _gaussians(take(texts, col))) for row, col in parts]
        return torch.cat([part.variance for part in found]).sqrt() if found else torch.empty(0, device=self.device)

    def _spread(
        self, found: Embedding, layer: nn.Linear, seen: list[Tensor], *, posterior: LayerPosterior
    ) -> Embedding:
        """An embedding with variances, as a share of its squared length: a cosine does not see the length."""
        log_var = torch.empty_like(found.mean)
        start = 0
        for inputs in (chunk for part in seen for chunk in torch.split(part, _CHUNK)):
            length = layer(inputs).double().norm(dim=1, keepdim=True).clamp(min=1e-12)
            log_var[start : start + len(inputs)] = (posterior.variance(inputs) / length.square()).log()
            start += len(inputs)
        if not self.expected:
            return Embedding(found.mean, log_var)
        norm = _gaussians(Embedding(found.mean, log_var)).squared_norm().unsqueeze(1)
        return Embedding(found.mean / norm.sqrt(), log_var - norm.log())


def check_posthoc(model: MatchingModel, kind: PostHoc = "laplace") -> None:
    """Raise where it would not be sound: no cosines, or for Laplace two networks or more than a norm after a head."""
    check_cosine(model.method, dim=model.dim, device=model.image_head.last.weight.device)
    if kind != "cosine":
        _check_laplace(
            model.method, networks=len(model.networks), pooling=model.config.pooling if model.has_towers else ""
        )


def check_posthoc_plan(method: Method, backbone: BackboneConfig, *, kind: PostHoc) -> None:
    """The same before there is a model: a fresh method, and the backbone that it would be trained on."""
    networks = method.networks
    check_cosine(method, dim=backbone.head.dim * networks, device=torch.device("cpu"))
    if kind != "cosine":
        pooling = "" if scheme_of(backbone.spec).cached else backbone.pooling
        _check_laplace(method, networks=networks, pooling=pooling)


def _check_laplace(method: Method, *, networks: int, pooling: str) -> None:
    """``pooling``: of the towers' tokens, empty where there are no towers."""
    if networks > 1:
        message = f"a Laplace approximation is for one network, {type(method).__name__} trains two"
        raise UsageError(f"{message} — use a method such as infonce or sigmoid, or set evaluate.posthoc=cosine")
    if pooling == "gpo":
        message = (
            "a Laplace approximation needs the embedding from a head's last layer, pooling 'gpo' sorts its outputs"
        )
        raise UsageError(f"{message} — train with backbone.pooling=mean or cls, or set evaluate.posthoc=cosine")


class _Side(NamedTuple):
    """One modality of the training rows."""

    layer: nn.Linear
    inputs: Tensor
    """[N, h] of the last layer, one row an item."""
    rows: Tensor
    """[M] the item of each training row, in the order of training."""

    def outputs(self, here: slice) -> Tensor:
        """Un-normalised embeddings of some training rows. -> [B, d] float64"""
        found: Tensor = self.layer(self.inputs[self.rows[here]])
        return found.double()


def _cosines(image: _Side, text: _Side, here: slice) -> LabelledCosines:
    """Caption n of a batch belongs to its image n, and to every other place where that image stands."""
    v, t = functional.normalize(image.outputs(here), dim=1), functional.normalize(text.outputs(here), dim=1)
    return LabelledCosines(v @ t.T, same_image(image.rows[here], image.rows[here]))


def _posterior(own: _Side, other: _Side, batches: list[slice], *, likelihood: Likelihood) -> LayerPosterior:
    """Both Kronecker factors over the training rows, and the likeliest prior."""
    inputs, outputs = torch.zeros(()), torch.zeros(())
    for here in batches:
        x = with_one(own.inputs[own.rows[here]])
        y = functional.normalize(other.outputs(here), dim=1)
        inputs = inputs.to(x) + x.T @ x
        outputs = outputs.to(x) + output_curvature(own.outputs(here), y, likelihood)
    factors = KroneckerFactors(inputs / len(own.rows) ** 0.5, outputs / len(own.rows) ** 0.5)
    return LayerPosterior(factors, likeliest_precision(factors, own.layer))


@contextmanager
def _inputs_of(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """Keep what the layer sees while the context is open, batch by batch. [b, h] each"""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def _gaussians(x: Embedding) -> Gaussians:
    assert x.log_var is not None, "the scorer has given it one"
    return Gaussians(x.mean, x.log_var.exp())


def _digest(model: MatchingModel) -> str:
    digest = hashlib.sha256()
    for head in (model.image_head, model.text_head):
        for _, tensor in sorted(head.state_dict().items()):
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
