"""Curvature of losses over cosines, and the Gaussian around a layer's weights, against autograd and dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet
from vacsr.methods import InfoNCE, Sigmoid
from vacsr.methods.base import Embedding
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.model import MatchingModel
from vacsr.pairwise import batch_block
from vacsr.scoring.curvature import Likelihood, output_curvature
from vacsr.scoring.laplace import KroneckerFactors, LayerPosterior, likeliest_precision, with_one
from vacsr.scoring.likelihoods import LabelledCosines, likelihood_of
from vacsr.scoring.posthoc import PostHocUncertainty


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def method_of(likelihood: Likelihood) -> InfoNCE | Sigmoid:
    if likelihood.kind == "softmax":
        return InfoNCE(InfoNCEConfig(scale=likelihood.scale), dim=8)
    return Sigmoid(SigmoidConfig(scale=likelihood.scale, bias=likelihood.bias), dim=8)


def slow_curvature(own: Tensor, other: Tensor, likelihood: Likelihood) -> Tensor:
    """The method's own loss, differentiated twice by its cosines, row by row."""
    rows, cols = len(own), len(other)
    block = batch_block(torch.arange(rows), seed=0, step=0)

    def loss(cosine: Tensor) -> Tensor:  # summed over rows; t = I makes the method's v·t the cosines themselves
        return rows * method_of(likelihood).loss(Embedding(cosine), Embedding(torch.eye(cols)), block).total

    cosine = functional.normalize(own, dim=1) @ other.T
    second = torch.autograd.functional.hessian(loss, cosine)
    total = torch.zeros(own.shape[1], own.shape[1], dtype=torch.float64)
    for i in range(rows):
        first = torch.autograd.functional.jacobian(lambda f: other @ functional.normalize(f, dim=0), own[i])
        total += first.T @ second[i, :, i, :].double() @ first
    return total


@pytest.mark.parametrize("likelihood", [Likelihood("softmax", 6.0), Likelihood("logistic", 5.0, -1.0)], ids=str)
def test_the_curvature_is_that_of_the_method_s_loss(likelihood: Likelihood) -> None:
    own, other = 3.0 * random(5, 4, seed=1), functional.normalize(random(5, 4, seed=2), dim=1)
    found = output_curvature(own, other, likelihood)
    torch.testing.assert_close(found, slow_curvature(own, other, likelihood), rtol=1e-4, atol=1e-5)


def linear_model(name: str = "sigmoid", *, dim: int = 3) -> MatchingModel:
    config = BackboneConfig(head=HeadConfig(kind="linear", dim=dim), image_scaling="none", text_scaling="none")
    return MatchingModel.build(method_config({"name": name}), config, image_dim=4, text_dim=5, seed=3).eval()


def small_pairs(images: int, *, per_image: int = 3, seed: int = 5) -> PairSet:
    owner = torch.arange(images).repeat_interleave(per_image)
    names = tuple(str(n) for n in range(len(owner)))
    features = random(images, 4, seed=seed).float(), random(len(owner), 5, seed=seed + 1).float()
    return PairSet(*features, names[:images], names, owner)


def test_factors_are_the_whole_gauss_newton_matrix_of_a_tiny_layer() -> None:
    """With one image all rows share their input, so the Kronecker product is exact: compare it weight by weight."""
    model, pairs = linear_model(), small_pairs(1, per_image=6)
    factors = PostHocUncertainty.fit(model, pairs, batch_size=6, device="cpu").image.factors
    layer, other = model.image_head.last, model.embed_texts(pairs.texts).mean.detach().double()
    weights = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().double()  # [d, h+1]
    x = with_one(pairs.images)[0]

    def cosines(w: Tensor) -> Tensor:
        return other @ functional.normalize(w @ x, dim=0)

    first = torch.autograd.functional.jacobian(cosines, weights)  # [6, d, h+1]
    scale, bias = model.method.affine.detach().double()  # type: ignore[union-attr]
    chance = torch.sigmoid(scale * cosines(weights) + bias)
    each = scale**2 * chance * (1 - chance)
    whole = 6 * torch.einsum("p,pdh,pek->dhek", each, first, first)  # the image stands in six rows
    torch.testing.assert_close(
        torch.einsum("hk,de->dhek", factors.inputs, factors.outputs), whole, rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("name", ["infonce", "sigmoid"])
def test_factors_are_sums_over_training_rows(name: str) -> None:
    model, pairs = linear_model(name), small_pairs(5, per_image=2)
    found = PostHocUncertainty.fit(model, pairs, batch_size=4, seed=1, device="cpu")
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1)).tolist()
    images = model.image_head(pairs.images).detach().double()
    texts = model.text_head(pairs.texts).detach().double()
    likelihood = likelihood_of(model.method, [])
    inputs, outputs = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    for start in (0, 4, 8):
        captions = order[start : start + 4]
        rows = [int(pairs.caption_image[n]) for n in captions]
        for n in captions:
            x = torch.cat([pairs.texts[n].double(), torch.ones(1)])
            inputs += torch.outer(x, x)
        outputs += slow_curvature(texts[captions], functional.normalize(images[rows], dim=1), likelihood)
    torch.testing.assert_close(found.text.factors.inputs, inputs / 10**0.5, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.text.factors.outputs, outputs / 10**0.5, rtol=1e-3, atol=1e-5)


def random_factors(inputs: int = 4, outputs: int = 3) -> KroneckerFactors:
    x, y = random(9, inputs + 1, seed=1), random(9, outputs, seed=2)
    return KroneckerFactors(x.T @ x, y.T @ y)


def test_the_variance_of_an_output_is_that_of_the_whole_weight_covariance() -> None:
    factors, x = random_factors(), random(3, 4, seed=3)
    found = LayerPosterior(factors, 0.25).variance(x)
    precision = torch.kron(factors.inputs + 0.5 * torch.eye(5), factors.outputs + 0.5 * torch.eye(3))
    for n in range(3):
        first = torch.kron(with_one(x)[n][None], torch.eye(3, dtype=torch.float64))  # outputs by weights
        expected = (first @ torch.linalg.inv(precision) @ first.T).diagonal()
        torch.testing.assert_close(found[n], expected)


def test_the_precision_maximises_the_evidence() -> None:
    factors, layer = random_factors(), nn.Linear(4, 3)
    size = sum(float(p.detach().square().sum()) for p in layer.parameters())

    def evidence(precision: float) -> float:
        eye = precision**0.5
        whole = torch.kron(factors.inputs + eye * torch.eye(5), factors.outputs + eye * torch.eye(3))
        return float(15 * torch.tensor(precision).log() - precision * size - torch.linalg.slogdet(whole).logabsdet)

    found = likeliest_precision(factors, layer)
    assert 1e-8 < found < 1e12
    tried = (10.0 ** torch.linspace(-4, 6, 500)).tolist()
    assert evidence(found) == pytest.approx(max(map(evidence, tried)), abs=1e-2)
    assert found < likeliest_precision(factors, nn.Linear(4, 3).apply(_halve))


def _halve(layer: nn.Module) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.25)


def test_outputs_are_less_certain_off_the_training_inputs_and_surer_with_more_of_them() -> None:
    x = random(50, 4, seed=1)
    x[:, 3] = 0.0  # the last coordinate was never seen
    gram = with_one(x).T @ with_one(x)
    outputs = torch.eye(3, dtype=torch.float64)
    posterior = LayerPosterior(KroneckerFactors(gram, outputs), 1.0)
    seen, unseen = posterior.variance(torch.eye(4, dtype=torch.float64)[[0, 3]])
    assert (unseen > 10 * seen).all()
    more = LayerPosterior(KroneckerFactors(4 * gram, outputs), 1.0)
    assert (more.variance(x) < posterior.variance(x)).all()


class Hinge(nn.Module):
    """Scores by a cosine; its loss is no likelihood."""

    pairwise = True

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        return v.mean @ t.mean.T


def test_a_hinge_gets_the_softmax_that_fits_its_labels() -> None:
    cosine = 0.3 * torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) + 0.3 * torch.eye(40)
    cosine[:10, :10] = cosine[:10, :10].flip(0)  # some labels are wrong, or the best scale were infinite
    own = torch.arange(40)

    def loss(scale: float) -> float:
        return float(sum(functional.cross_entropy(scale * c, own, reduction="sum") for c in (cosine, cosine.T)))

    found = likelihood_of(Hinge(), [LabelledCosines(cosine, torch.eye(40).bool())])  # type: ignore[arg-type]
    assert found.kind == "softmax"
    assert 1.5 < found.scale < 250
    assert loss(found.scale) == pytest.approx(min(map(loss, torch.linspace(1, 300, 3000).tolist())), rel=1e-3)
