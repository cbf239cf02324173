"""Uncertainty for a trained cosine model without further training.

:class:`CosineDistanceScorer` takes 1 − cosine. :class:`PostHocScorer` uses a Laplace approximation: the last linear
layer of each head gets a Gaussian over its weights, from the curvature of the training loss. Each item is then a
Gaussian before it is normalised, and the cosine of a pair has a variance in closed form.

A row's loss is a function of the cosines c_j of one un-normalised embedding f with unit vectors t_j. With u = f/‖f‖ its
Gauss–Newton matrix by f is H = JᵀMJ: M is the loss's second derivative by the cosines, J = T(I − uuᵀ)/‖f‖ their first
derivative by f. The precision Σ_i x_i x_iᵀ ⊗ H_i + λI of the weights is replaced by (A + √λ·I) ⊗ (B + √λ·I), with
A = Σ x xᵀ/√N over the layer's inputs (a 1 added for the bias), B = Σ H/√N, and λ the precision of a zero-mean prior.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import scheme_of
from vacsr.choices import PostHoc
from vacsr.config import BackboneConfig
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.files import read_tensors, write_tensors
from vacsr.methods.base import Embedding, Likelihood, Method
from vacsr.model import MatchingModel
from vacsr.objective import same_image
from vacsr.scoring.cascade import Precision
from vacsr.scoring.scorer import PairScorer, Side

POSTHOC_FILE = "posthoc.safetensors"
"""Its name in a run folder."""
_CHUNK = 8192  # rows in float64 at a time


def cosine_variance(v: Embedding, t: Embedding) -> Tensor:
    """Variance of xᵀy/√(E‖x‖²·E‖y‖²) for aligned normal vectors of any length, exactly. [N, d], [N, d] -> [N]

    Var xᵀy = Σ v·w + v·ν² + w·μ². It hardly depends on the angle: it is a sum over the two vectors' own noise.
    """
    assert v.log_var is not None
    assert t.log_var is not None
    (x, x_variance), (y, y_variance) = (v.mean.square(), v.log_var.exp()), (t.mean.square(), t.log_var.exp())
    spread = x_variance * (y_variance + y) + y_variance * x
    return spread.sum(dim=-1) / ((x + x_variance).sum(dim=-1) * (y + y_variance).sum(dim=-1))


def likelihood_of(method: Method, batches: Sequence[tuple[Tensor, Tensor]]) -> Likelihood:
    """The loss's own likelihood; a loss without one, such as a hinge, gets the softmax that fits some batches best.

    ``batches``: cosines, and which pairs are labelled a match. [B, B] each
    """

    def loss(scale: float) -> float:
        """−Σ log of the labels' share in the softmax over rows and in that over columns."""
        total = 0.0
        for cosine, match in batches:
            for dim in (0, 1):
                share = match / match.sum(dim=dim, keepdim=True)
                total -= float((share * torch.log_softmax(scale * cosine, dim=dim)).sum())
        return total

    return method.likelihood() or Likelihood("softmax", min(torch.logspace(0.0, 2.5, 101).tolist(), key=loss))


def output_curvature(outputs: Tensor, other: Tensor, likelihood: Likelihood) -> Tensor:
    """Σ_i JᵢᵀMᵢJᵢ over the rows, without a matrix per row. [R, d] un-normalised, [C, d] unit -> [d, d]

    M_i = diag(single_i) − joint_i·joint_iᵀ is the summed loss's second derivative; it does not depend on the labels.
    The softmax loss is the mean of both directions: a cosine takes part in its row's softmax with all others of the
    row, and alone in its column's. A row of J is (t_j − c_j·u)/‖f‖; multiplied out, each sum is one matrix product.
    """
    (kind, scale, bias), unit = likelihood, functional.normalize(outputs, dim=1)
    cosine = unit @ other.T
    if kind == "logistic":
        chance = torch.sigmoid(scale * cosine + bias)
        single, joint = scale**2 * chance * (1.0 - chance), torch.zeros_like(cosine)
    else:
        row, column = (torch.softmax(scale * cosine, dim=dim) for dim in (1, 0))
        single, joint = 0.5 * scale**2 * (row + column * (1.0 - column)), 0.5**0.5 * scale * row
    length = outputs.norm(dim=1, keepdim=True)
    single, joint = single / length.square(), joint / length
    cross = other.T @ (single * cosine).T @ unit
    turned = joint @ other - (joint * cosine).sum(dim=1, keepdim=True) * unit  # J_iᵀ joint_i
    total: Tensor = (
        other.T @ (single.sum(dim=0).unsqueeze(1) * other)
        - (cross + cross.T)
        + unit.T @ ((single * cosine.square()).sum(dim=1, keepdim=True) * unit)
        - turned.T @ turned
    )
    return total


@dataclass(frozen=True, eq=False)
class LayerPosterior:
    """The weights of a layer with h inputs and d outputs are normal around the trained ones."""

    inputs: Tensor  # the Kronecker factor A [h+1, h+1] float64
    outputs: Tensor  # B [d, d] float64
    precision: float  # λ of the prior

    @cached_property
    def _inverses(self) -> tuple[Tensor, Tensor]:
        """R with RᵀR = (A + √λ·I)⁻¹, and the diagonal of (B + √λ·I)⁻¹. [h+1, h+1], [d]"""
        eyes = [torch.eye(len(factor)).to(factor) for factor in (self.inputs, self.outputs)]
        lower = torch.linalg.cholesky(self.inputs + self.precision**0.5 * eyes[0])
        root = torch.linalg.solve_triangular(lower, eyes[0], upper=False)
        return root, torch.linalg.inv(self.outputs + self.precision**0.5 * eyes[1]).diagonal()

    def variance(self, inputs: Tensor) -> Tensor:
        """Of each output at these inputs of the layer. [N, h] -> [N, d] float64"""
        root, output_variance = (factor.to(inputs.device) for factor in self._inverses)
        return (with_one(inputs) @ root.T).square().sum(dim=1, keepdim=True) * output_variance


def with_one(inputs: Tensor) -> Tensor:
    """Inputs as a layer with a bias sees them. [N, h] -> [N, h+1] float64"""
    return functional.pad(inputs.double(), (0, 1), value=1.0)


def likeliest_precision(inputs: Tensor, outputs: Tensor, *, layer: nn.Linear) -> float:
    """λ that maximises the Laplace approximation of the marginal likelihood of the training data.

    Up to a constant, 2·log p = P·log λ − λ‖W‖² − d·log|A + √λ·I| − (h+1)·log|B + √λ·I| with P = (h+1)·d weights. Only
    training data enter the choice. Kronecker factors [h+1, h+1], [d, d]
    """
    a, b = (torch.linalg.eigvalsh(matrix.cpu()).clamp(min=0.0) for matrix in (inputs, outputs))
    if not (torch.isfinite(a).all() and torch.isfinite(b).all() and b.max() > 0.0):
        raise DataError("the loss has no curvature at these weights — train the model first, on finite features")
    grid = torch.logspace(-8.0, 12.0, 801, dtype=torch.float64)
    log_a, log_b = ((values + grid.sqrt().unsqueeze(1)).log().sum(dim=1) for values in (a, b))
    size = sum(float(p.detach().double().square().sum()) for p in layer.parameters())
    evidence = len(a) * len(b) * grid.log() - grid * size - len(b) * log_a - len(a) * log_b
    return float(grid[evidence.argmax()])


class _Rows(NamedTuple):
    """One modality of the training rows."""

    layer: nn.Linear
    inputs: Tensor  # [N, h] of the last layer, one row per item
    items: Tensor  # [M] the item of each training row, in the order of training

    def outputs(self, part: slice) -> Tensor:
        """Un-normalised embeddings of some training rows. -> [B, d] float64"""
        outputs: Tensor = self.layer(self.inputs[self.items[part]])
        return outputs.double()

    def posterior(self, other: _Rows, batches: list[slice], likelihood: Likelihood) -> LayerPosterior:
        """Both Kronecker factors over the training rows, and the likeliest prior."""
        inputs, outputs = torch.zeros(()), torch.zeros(())
        for part in batches:
            x, units = with_one(self.inputs[self.items[part]]), functional.normalize(other.outputs(part), dim=1)
            inputs = inputs.to(x) + x.T @ x
            outputs = outputs.to(x) + output_curvature(self.outputs(part), units, likelihood)
        inputs, outputs = inputs / len(self.items) ** 0.5, outputs / len(self.items) ** 0.5
        return LayerPosterior(inputs, outputs, likeliest_precision(inputs, outputs, layer=self.layer))


@contextmanager
def _inputs_of(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """Records the layer's inputs while the context is open, batch by batch. [b, h] each"""
    recorded: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0].detach())):
        yield recorded


@dataclass(frozen=True, eq=False)
class PostHocUncertainty:
    """A posterior of each head's last layer, and a hash of the heads they belong to."""

    image: LayerPosterior
    text: LayerPosterior
    heads: str

    @classmethod
    @torch.no_grad()
    def fit(
        cls, model: MatchingModel, pairs: PairSet | PhotoSet, *, batch_size: int = 128, seed: int = 0,
        device: str | torch.device = "auto",
    ) -> PostHocUncertainty:  # fmt: skip
        """From one pass over the pairs that the model was trained on; no other labels are used.

        ``batch_size``: captions per batch of the loss in training, each with its image; ``seed`` orders them.
        """
        check_posthoc(model.method, model.config, kind="laplace")
        scorer = PairScorer(model, device=device)
        with _inputs_of(model.image_head.last) as images, _inputs_of(model.text_head.last) as texts:
            scorer.score_set(pairs)
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
        image = _Rows(model.image_head.last, torch.cat(images), pairs.caption_image.cpu()[order].to(scorer.device))
        text = _Rows(model.text_head.last, torch.cat(texts), order.to(scorer.device))
        batches = [slice(start, start + batch_size) for start in range(0, len(pairs), batch_size)]
        probes = []
        for part in batches[:16]:  # enough to choose the scale of a softmax
            v, t = (functional.normalize(side.outputs(part), dim=1) for side in (image, text))
            probes.append((v @ t.T, same_image(image.items[part], image.items[part])))
        likelihood = likelihood_of(model.method, probes)
        sides = image.posterior(text, batches, likelihood), text.posterior(image, batches, likelihood)
        return cls(*sides, _digest(model))

    def save(self, path: str | Path) -> None:
        """Write the Kronecker factors and the precisions as safetensors."""
        tensors: dict[str, Tensor] = {}
        metadata = {"heads": self.heads}
        for side, posterior in (("image", self.image), ("text", self.text)):
            tensors |= {f"{side}.inputs": posterior.inputs, f"{side}.outputs": posterior.outputs}
            metadata[f"{side}.precision"] = repr(posterior.precision)
        write_tensors(Path(path), tensors, metadata=metadata)

    @classmethod
    def load(cls, path: str | Path) -> PostHocUncertainty:
        """Read what :meth:`save` wrote."""
        tensors, metadata = read_tensors(Path(path))
        try:
            image, text = (
                LayerPosterior(tensors[f"{x}.inputs"], tensors[f"{x}.outputs"], float(metadata[f"{x}.precision"]))
                for x in ("image", "text")
            )
            return cls(image, text, metadata["heads"])
        except (KeyError, ValueError) as error:
            raise DataError(f"{path} holds no post-hoc uncertainty ({error}) — fit and save it again") from error


def _digest(model: MatchingModel) -> str:
    digest = hashlib.sha256()
    for head in (model.image_head, model.text_head):
        for _, tensor in sorted(head.state_dict().items()):
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class PostHocScorer(PairScorer):
    """The same scores, with the standard deviation of the cosine as uncertainty."""

    def __init__(
        self, model: MatchingModel, posthoc: PostHocUncertainty, *, device: str | torch.device = "auto"
    ) -> None:
        check_posthoc(model.method, model.config, kind="laplace")
        if posthoc.heads != _digest(model):
            again = "PostHocUncertainty.fit(model, training_pairs)"
            raise DataError(f"this post-hoc uncertainty was fitted to other weights — fit it to this model: {again}")
        super().__init__(model, device=device)
        self.posthoc = posthoc

    def _embed(self, batches: Iterable[Tensor], *, side: Side) -> Embedding:
        """Unit vectors with variances relative to their squared length, which a cosine does not see. -> [N, d]"""
        layer = (self.model.image_head if side == "image" else self.model.text_head).last
        posterior = self.posthoc.image if side == "image" else self.posthoc.text
        with _inputs_of(layer) as inputs:
            mean = super()._embed(batches, side=side).mean
        log_var = [mean[:0]]
        for x in (chunk for part in inputs for chunk in torch.split(part, _CHUNK)):
            length = layer(x).double().norm(dim=1, keepdim=True).clamp(min=1e-12)
            log_var.append((posterior.variance(x) / length.square()).log().to(mean))
        return Embedding(mean, torch.cat(log_var))

    def pair_uncertainty(self, v: Embedding, t: Embedding) -> Tensor:
        return cosine_variance(v, t).sqrt()


class CosineDistanceScorer(PairScorer):
    """The same scores, with 1 − score as uncertainty: a reference for every other uncertainty. It needs no fit.

    Among the answers to one query it only repeats the ranking; across queries it separates sure from unsure ones.
    """

    def __init__(
        self, model: MatchingModel, *, device: str | torch.device = "auto", dtype: Precision = torch.float32
    ) -> None:
        check_posthoc(model.method, model.config, kind="cosine")
        super().__init__(model, device=device, dtype=dtype)

    def pair_uncertainty(self, v: Embedding, t: Embedding) -> Tensor:
        return 1.0 - self.engine.aligned(v, t)


def check_posthoc(method: Method, backbone: BackboneConfig, *, kind: PostHoc) -> None:
    """Raise where it would not be sound: no cosines, or for Laplace two networks or more than a norm after a head."""
    name, device = type(method).__name__, next(method.parameters(), torch.empty(0)).device
    random = torch.randn(2, 3, backbone.head.dim * method.networks, generator=torch.Generator().manual_seed(0))
    v, t = functional.normalize(random, dim=-1).to(device)
    with torch.no_grad():
        scores = method.score(*(Embedding(x, torch.zeros_like(x)) for x in (v, t)))
    if not torch.allclose(scores.float(), v @ t.T, atol=1e-5):
        message = f"{name} does not score by a cosine, which post-hoc uncertainty needs"
        raise UsageError(f"{message} — use a method such as infonce or sigmoid, or set evaluate.posthoc=none")
    if kind == "laplace" and method.networks > 1:
        message = f"a Laplace approximation is for one network, {name} trains two"
        raise UsageError(f"{message} — use a method such as infonce or sigmoid, or set evaluate.posthoc=cosine")
    if kind == "laplace" and backbone.pooling == "gpo" and not scheme_of(backbone.spec).cached:
        message = "a Laplace approximation needs the last layer's output as embedding, pooling 'gpo' sorts it first"
        raise UsageError(f"{message} — train with backbone.pooling=mean or cls, or set evaluate.posthoc=cosine")
