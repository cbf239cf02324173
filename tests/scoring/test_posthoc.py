"""Post-hoc uncertainty: its formulas against samples, autograd and dense algebra; the two scorers; what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.evaluate.retrieval import evaluate_retrieval
from vacsr.methods import InfoNCE, Sigmoid
from vacsr.methods.base import Embedding, Likelihood
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.model import MatchingModel
from vacsr.pairwise import batch_block
from vacsr.scoring import PairScorer
from vacsr.scoring.posthoc import (
    CosineDistanceScorer,
    LayerPosterior,
    PostHocScorer,
    PostHocUncertainty,
    check_posthoc,
    cosine_variance,
    likeliest_precision,
    likelihood_of,
    output_curvature,
    with_one,
)
from vacsr.train import fit


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    found = load_pairs("synthetic:images=150,held_out=60,per_image=2", split="train")
    assert isinstance(found, PairSet)
    return found


@pytest.fixture(scope="module")
def unseen() -> PairSet:
    found = load_pairs("synthetic:images=150,held_out=60,per_image=2", split="test")
    assert isinstance(found, PairSet)
    return found


@pytest.fixture(scope="module", params=["infonce", "sigmoid", "vse"])
def model(request: pytest.FixtureRequest, pairs: PairSet) -> MatchingModel:
    config = TrainConfig(epochs=8, batch_size=50, device="cpu", lr=5e-3)
    return fit(request.param, pairs, config, backbone=BackboneConfig(head=HeadConfig(dim=12)), progress=False).model


@pytest.fixture(scope="module")
def posthoc(model: MatchingModel, pairs: PairSet) -> PostHocUncertainty:
    return PostHocUncertainty.fit(model, pairs, batch_size=50, device="cpu")


def untrained(name: str) -> MatchingModel:
    config = BackboneConfig(head=HeadConfig(kind="linear", dim=3))
    return MatchingModel.build(method_config({"name": name}), config, image_dim=4, text_dim=5, seed=3).eval()


def test_scores_stay_and_every_pair_has_an_uncertainty(
    model: MatchingModel, posthoc: PostHocUncertainty, unseen: PairSet
) -> None:
    scorer, plain = PostHocScorer(model, posthoc, device="cpu"), PairScorer(model, device="cpu")
    assert torch.equal(scorer.score_set(unseen).score, plain.score_set(unseen).score)
    rows, cols = torch.tensor([3, 0, 7]), torch.tensor([1, 5, 9])
    sigma = scorer.score_set(unseen).uncertainty(rows, cols)
    aligned = scorer.score_pairs(unseen.images[rows], unseen.texts[cols])
    assert sigma is not None
    assert aligned.uncertainty is not None
    torch.testing.assert_close(aligned.uncertainty, sigma)
    torch.testing.assert_close(sigma.double(), slow_sigma(model, posthoc, unseen, rows, cols), rtol=1e-3, atol=0)
    plain_report = evaluate_retrieval(plain, unseen).results[0]
    report = evaluate_retrieval(scorer, unseen).results[0]
    assert plain_report["uncertainty"] is None
    assert report["rsum"] == plain_report["rsum"]
    assert {"corr_r1_i2t", "aurc_i2t", "aurc_t2i"} <= report["uncertainty"].keys()


def slow_sigma(model: MatchingModel, posthoc: PostHocUncertainty, pairs: PairSet, rows: Tensor, cols: Tensor) -> Tensor:
    """Un-normalised Gaussians by hand, from the layer's weights."""
    sides = []
    for head, raw, posterior in (
        (model.image_head, model.backbone.encode_images(pairs.images[rows]).values.squeeze(1), posthoc.image),
        (model.text_head, model.backbone.encode_texts(pairs.texts[cols]).values.squeeze(1), posthoc.text),
    ):
        assert head.first is not None
        hidden = functional.gelu(head.first(raw)).detach()  # type: ignore[arg-type]
        mean = hidden @ head.last.weight.detach().T + head.last.bias.detach()
        damp = posterior.precision**0.5
        a, b = (torch.linalg.inv(m + damp * torch.eye(len(m))) for m in (posterior.inputs, posterior.outputs))
        x = with_one(hidden)
        spread = torch.tensor([float(row @ a @ row) for row in x], dtype=torch.float64)
        sides.append(Embedding(mean.double(), (spread[:, None] * b.diagonal()).log()))
    return cosine_variance(*sides).sqrt()


def test_uncertainty_grows_off_the_training_data(
    model: MatchingModel, posthoc: PostHocUncertainty, pairs: PairSet
) -> None:
    scorer = PostHocScorer(model, posthoc, device="cpu")
    generator = torch.Generator().manual_seed(0)
    images, texts = pairs.images[pairs.caption_image], pairs.texts
    known = scorer.score_pairs(images, texts).uncertainty
    strange = [torch.randn(x.shape, generator=generator) * x.std() + x.mean() for x in (images, texts)]
    noise = scorer.score_pairs(*strange).uncertainty
    assert known is not None
    assert noise is not None
    assert float(noise.median()) > 1.1 * float(known.median())


def test_what_is_saved_is_read_again(
    model: MatchingModel, posthoc: PostHocUncertainty, unseen: PairSet, tmp_path: Path
) -> None:
    posthoc.save(tmp_path / "posthoc.safetensors")
    again = PostHocUncertainty.load(tmp_path / "posthoc.safetensors")
    assert (again.image.precision, again.text.precision) == (posthoc.image.precision, posthoc.text.precision)
    rows, cols = torch.arange(20), torch.arange(20)
    old, new = (
        PostHocScorer(model, p, device="cpu").score_set(unseen).uncertainty(rows, cols) for p in (posthoc, again)
    )
    assert old is not None
    assert new is not None
    assert torch.equal(old, new)


def test_it_belongs_to_its_weights(model: MatchingModel, posthoc: PostHocUncertainty, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="other weights"):
        PostHocScorer(untrained("sigmoid"), posthoc, device="cpu")
    model.save_pretrained(tmp_path)
    PostHocScorer(MatchingModel.from_pretrained(tmp_path), posthoc, device="cpu")
    with pytest.raises(DataError, match="holds no post-hoc uncertainty"):
        PostHocUncertainty.load(tmp_path / "model.safetensors")


def test_the_same_seed_gives_the_same_posterior(
    model: MatchingModel, posthoc: PostHocUncertainty, pairs: PairSet
) -> None:
    again = PostHocUncertainty.fit(model, pairs, batch_size=50, device="cpu")
    assert torch.equal(again.image.outputs, posthoc.image.outputs)
    assert torch.equal(again.text.outputs, posthoc.text.outputs)
    assert not model.image_head.last._forward_pre_hooks


def test_scores_that_are_no_cosines_are_refused(pairs: PairSet) -> None:
    with pytest.raises(UsageError, match="does not score by a cosine"):
        PostHocUncertainty.fit(untrained("vacsr"), pairs, device="cpu")


def test_two_networks_are_refused() -> None:
    method = Sigmoid(SigmoidConfig(), dim=8)
    method.networks = 2  # type: ignore[assignment]
    config = BackboneConfig(head=HeadConfig(kind="linear", dim=3))
    with pytest.raises(UsageError, match=r"one network.*evaluate\.posthoc=cosine"):
        check_posthoc(MatchingModel.build(method, config, image_dim=4, text_dim=5))


TINY = "tiny:width=16,depth=1,text_depth=1,heads=2,size=32"


def towers(pooling: Any, pairs: Any) -> MatchingModel:
    config = BackboneConfig(spec=TINY, pooling=pooling, head=HeadConfig(dim=8))
    return MatchingModel.build(method_config({"name": "infonce"}), config, seed=0, fit=pairs).eval()


def test_towers_whose_pooling_comes_before_the_head_work_and_gpo_is_refused() -> None:
    photos = load_pairs("scenes:images=12,held_out=2,per_image=2,size=32", split="train")
    model = towers("mean", photos)
    scorer = PostHocScorer(model, PostHocUncertainty.fit(model, photos, batch_size=8, device="cpu"), device="cpu")
    every = torch.arange(12)
    sigma = scorer.score_set(photos).uncertainty(every, every)
    alone = scorer.score_all([photos.photos.open(5)], [photos.captions[5]])  # type: ignore[union-attr,index]
    one = alone.uncertainty(torch.tensor([0]), torch.tensor([0]))
    assert sigma is not None
    assert one is not None
    assert float(one) == pytest.approx(float(sigma[5]), rel=1e-3)
    with pytest.raises(UsageError, match=r"backbone\.pooling=mean"):
        check_posthoc(towers("gpo", photos))


# --------------------------------------------------------------------------------------------------------- the formulas


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussians(dim: int, *, spread: float, seed: int) -> Embedding:
    """One vector of unit length whose squared noise is about ``spread``, unevenly over the coordinates."""
    noise = torch.rand(1, dim, generator=torch.Generator().manual_seed(seed))
    return Embedding(functional.normalize(random(1, dim, seed=seed), dim=1), (spread / dim * 2.0 * noise).log())


def test_the_variance_of_the_cosine_is_that_of_samples() -> None:
    x, y = gaussians(7, spread=1.0, seed=1), gaussians(7, spread=0.3, seed=2)
    a, b = (g.mean + (0.5 * g.log_var).exp() * random(50_000, 7, seed=seed) for g, seed in ((x, 3), (y, 4)))
    lengths = (a.square().sum(dim=1).mean() * b.square().sum(dim=1).mean()).sqrt()
    assert float(cosine_variance(x, y)) == pytest.approx(float(((a * b).sum(dim=1) / lengths).var()), rel=0.02)
    longer = Embedding(3.0 * x.mean, x.log_var + math.log(9.0))
    torch.testing.assert_close(cosine_variance(longer, y), cosine_variance(x, y))


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
    factors = PostHocUncertainty.fit(model, pairs, batch_size=6, device="cpu").image
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
    torch.testing.assert_close(found.text.inputs, inputs / 10**0.5, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.text.outputs, outputs / 10**0.5, rtol=1e-3, atol=1e-5)


def random_factors(inputs: int = 4, outputs: int = 3) -> tuple[Tensor, Tensor]:
    x, y = random(9, inputs + 1, seed=1), random(9, outputs, seed=2)
    return x.T @ x, y.T @ y


def test_the_variance_of_an_output_is_that_of_the_whole_weight_covariance() -> None:
    (inputs, outputs), x = random_factors(), random(3, 4, seed=3)
    found = LayerPosterior(inputs, outputs, 0.25).variance(x)
    precision = torch.kron(inputs + 0.5 * torch.eye(5), outputs + 0.5 * torch.eye(3))
    for n in range(3):
        first = torch.kron(with_one(x)[n][None], torch.eye(3, dtype=torch.float64))  # outputs by weights
        expected = (first @ torch.linalg.inv(precision) @ first.T).diagonal()
        torch.testing.assert_close(found[n], expected)


def test_the_precision_maximises_the_evidence() -> None:
    (inputs, outputs), layer = random_factors(), nn.Linear(4, 3)
    size = sum(float(p.detach().square().sum()) for p in layer.parameters())

    def evidence(precision: float) -> float:
        eye = precision**0.5
        whole = torch.kron(inputs + eye * torch.eye(5), outputs + eye * torch.eye(3))
        return float(15 * torch.tensor(precision).log() - precision * size - torch.linalg.slogdet(whole).logabsdet)

    found = likeliest_precision(inputs, outputs, layer=layer)
    assert 1e-8 < found < 1e12
    tried = (10.0 ** torch.linspace(-4, 6, 500)).tolist()
    assert evidence(found) == pytest.approx(max(map(evidence, tried)), abs=1e-2)
    assert found < likeliest_precision(inputs, outputs, layer=nn.Linear(4, 3).apply(_halve))


def _halve(layer: nn.Module) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.25)


def test_outputs_are_less_certain_off_the_training_inputs_and_surer_with_more_of_them() -> None:
    x = random(50, 4, seed=1)
    x[:, 3] = 0.0  # the last coordinate was never seen
    gram = with_one(x).T @ with_one(x)
    outputs = torch.eye(3, dtype=torch.float64)
    posterior = LayerPosterior(gram, outputs, 1.0)
    seen, unseen = posterior.variance(torch.eye(4, dtype=torch.float64)[[0, 3]])
    assert (unseen > 10 * seen).all()
    more = LayerPosterior(4 * gram, outputs, 1.0)
    assert (more.variance(x) < posterior.variance(x)).all()


class Hinge(nn.Module):
    """Scores by a cosine; its loss is no likelihood."""

    def likelihood(self) -> None:
        return None

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        return v.mean @ t.mean.T


def test_a_hinge_gets_the_softmax_that_fits_its_labels() -> None:
    cosine = 0.3 * torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) + 0.3 * torch.eye(40)
    cosine[:10, :10] = cosine[:10, :10].flip(0)  # some labels are wrong, or the best scale were infinite
    own = torch.arange(40)

    def loss(scale: float) -> float:
        return float(sum(functional.cross_entropy(scale * c, own, reduction="sum") for c in (cosine, cosine.T)))

    found = likelihood_of(Hinge(), [(cosine, torch.eye(40).bool())])  # type: ignore[arg-type]
    assert found.kind == "softmax"
    assert 1.5 < found.scale < 250
    assert loss(found.scale) == pytest.approx(min(map(loss, torch.linspace(1, 300, 3000).tolist())), rel=1e-3)


# ----------------------------------------------------------------------------------------------------------- 1 − cosine


def model_of(name: str, unseen: PairSet) -> MatchingModel:
    config = BackboneConfig(head=HeadConfig(dim=6))
    image_dim, text_dim = unseen.images.shape[1], unseen.texts.shape[1]
    return MatchingModel.build(method_config({"name": name}), config, image_dim=image_dim, text_dim=text_dim, seed=5)


def slow_cosine(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True)) / math.hypot(*x) / math.hypot(*y)


@pytest.mark.parametrize("name", ["infonce", "sigmoid", "vse", "npc", "ncr", "bicro"])
def test_it_is_one_minus_the_mean_cosine_of_the_networks(name: str, unseen: PairSet) -> None:
    model = model_of(name, unseen)
    scorer, plain = CosineDistanceScorer(model, device="cpu"), PairScorer(model, device="cpu")
    rows, cols = torch.tensor([3, 0, 24]), torch.tensor([1, 5, 49])
    found = scorer.score_set(unseen).uncertainty(rows, cols)
    assert found is not None
    assert plain.score_set(unseen).uncertainty(rows, cols) is None
    for value, i, j in zip(found.tolist(), rows.tolist(), cols.tolist(), strict=True):
        cosines = []
        for network in model.networks:
            v = network.image_head(network.backbone.encode_images(unseen.images[i : i + 1]).values.squeeze(1))
            t = network.text_head(network.backbone.encode_texts(unseen.texts[j : j + 1]).values.squeeze(1))
            cosines.append(slow_cosine(v[0].tolist(), t[0].tolist()))
        assert len(cosines) == (2 if name in ("ncr", "bicro") else 1)
        assert value == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-5)


def test_scores_stay_and_the_distance_orders_a_query_as_its_ranking(unseen: PairSet) -> None:
    model = model_of("infonce", unseen)
    found, plain = (kind(model, device="cpu").score_set(unseen) for kind in (CosineDistanceScorer, PairScorer))
    assert torch.equal(found.score, plain.score)
    captions = torch.arange(len(unseen.caption_ids))
    sigma = found.uncertainty(torch.full_like(captions, 7), captions)
    assert sigma is not None
    torch.testing.assert_close(sigma, 1 - plain.score[7])
    assert int(sigma.argmin()) == int(plain.score[7].argmax())
    report, before = (
        evaluate_retrieval(kind(model, device="cpu"), unseen) for kind in (CosineDistanceScorer, PairScorer)
    )
    assert report.results[0]["rsum"] == before.results[0]["rsum"]
    assert before.results[0]["uncertainty"] is None
    assert report.results[0]["uncertainty"]["aurc_i2t"] > 0


@pytest.mark.parametrize("name", ["vacsr", "pcme", "pcmepp"])
def test_the_distance_of_scores_that_are_no_cosines_is_refused(name: str, unseen: PairSet) -> None:
    with pytest.raises(UsageError, match=r"does not score by a cosine.*evaluate\.posthoc=none"):
        CosineDistanceScorer(model_of(name, unseen), device="cpu")


def test_pooling_after_the_head_is_no_hindrance() -> None:
    photos = load_pairs("scenes:images=6,held_out=2,per_image=2,size=32", split="train")
    config = BackboneConfig(
        spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", pooling="gpo", head=HeadConfig(dim=8)
    )
    scorer = CosineDistanceScorer(
        MatchingModel.build(method_config({"name": "infonce"}), config, seed=0, fit=photos), device="cpu"
    )
    scores = scorer.score_set(photos)
    every = torch.arange(len(photos.image_ids))
    found = scores.uncertainty(every, every)
    assert found is not None
    torch.testing.assert_close(found, 1 - scores.score[every, every])
