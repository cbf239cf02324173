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
from vacsr.evaluate.report import evaluate_retrieval
from vacsr.methods import InfoNCE, Sigmoid
from vacsr.methods.base import Embedding, Likelihood
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.model import MatchingModel
from vacsr.objective import batch_block
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

KINDS = ("laplace", "cosine")


@pytest.fixture(scope="module")
def pairs() -> Any:
    return load_pairs("synthetic:images=150,held_out=60,per_image=2", split="train")


@pytest.fixture(scope="module")
def unseen() -> Any:
    return load_pairs("synthetic:images=150,held_out=60,per_image=2", split="test")


@pytest.fixture(scope="module", params=["infonce", "sigmoid", "vse"])
def model(request: pytest.FixtureRequest, pairs: PairSet) -> MatchingModel:
    config = TrainConfig(epochs=8, batch_size=50, device="cpu", lr=5e-3)
    return fit(request.param, pairs, config, backbone=BackboneConfig(head=HeadConfig(dim=12)), progress=False).model


@pytest.fixture(scope="module")
def posthoc(model: MatchingModel, pairs: PairSet) -> PostHocUncertainty:
    return PostHocUncertainty.fit(model, pairs, batch_size=50, device="cpu")


def linear_model(name: str = "sigmoid") -> MatchingModel:
    config = BackboneConfig(head=HeadConfig(kind="linear", dim=3), image_scaling="none", text_scaling="none")
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


def test_what_is_saved_is_read_again_and_belongs_to_its_weights(
    model: MatchingModel, posthoc: PostHocUncertainty, unseen: PairSet, tmp_path: Path
) -> None:
    posthoc.save(tmp_path / "posthoc.safetensors")
    model.save_pretrained(tmp_path)
    again = PostHocUncertainty.load(tmp_path / "posthoc.safetensors")
    every, loaded = torch.arange(20), MatchingModel.from_pretrained(tmp_path)
    old, new = (
        PostHocScorer(made, p, device="cpu").score_set(unseen).uncertainty(every, every)
        for made, p in ((model, posthoc), (loaded, again))
    )
    assert torch.equal(old, new)  # type: ignore[arg-type]
    assert not model.image_head.last._forward_pre_hooks
    with pytest.raises(DataError, match="other weights"):
        PostHocScorer(linear_model("sigmoid"), posthoc, device="cpu")
    with pytest.raises(DataError, match="holds no post-hoc uncertainty"):
        PostHocUncertainty.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(("name", "kind", "words"), [
    *((name, kind, r"cosine.*evaluate\.posthoc=none") for name in ("vacsr", "pcme", "pcmepp") for kind in KINDS),
    ("ncr", "laplace", r"one network.*evaluate\.posthoc=cosine"),
])  # fmt: skip
def test_methods_that_it_would_not_be_sound_for(name: str, kind: Any, words: str, unseen: PairSet) -> None:
    model = model_of(name, unseen)
    calls: dict[str, Any] = {
        "cosine": lambda: CosineDistanceScorer(model, device="cpu"),
        "laplace": lambda: PostHocUncertainty.fit(model, unseen, device="cpu"),
    }
    for call in (calls[kind], lambda: check_posthoc(model.method, model.config, kind=kind)):
        with pytest.raises(UsageError, match=words):
            call()


def towers(pooling: Any, pairs: Any) -> MatchingModel:
    spec = "tiny:width=16,depth=1,text_depth=1,heads=2,size=32"
    config = BackboneConfig(spec=spec, pooling=pooling, head=HeadConfig(dim=8))
    return MatchingModel.build(method_config({"name": "infonce"}), config, seed=0, fit=pairs).eval()


def test_towers_whose_pooling_comes_before_the_head_work_and_gpo_is_refused() -> None:
    photos = load_pairs("scenes:images=12,held_out=2,per_image=2,size=32", split="train")
    model = towers("mean", photos)
    scorer = PostHocScorer(model, PostHocUncertainty.fit(model, photos, batch_size=8, device="cpu"), device="cpu")
    every = torch.arange(12)
    sigma: Any = scorer.score_set(photos).uncertainty(every, every)
    one = scorer.score_pairs([photos.photos.open(5)], [photos.captions[5]])  # type: ignore[union-attr,index]
    assert float(one.uncertainty) == pytest.approx(float(sigma[5]), rel=1e-3)
    pooled = towers("gpo", photos)
    with pytest.raises(UsageError, match=r"backbone\.pooling=mean"):
        PostHocUncertainty.fit(pooled, photos, device="cpu")
    scores = CosineDistanceScorer(pooled, device="cpu").score_set(photos)
    torch.testing.assert_close(scores.uncertainty(every, every), 1 - scores.score[every, every])


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


def slow_curvature(outputs: Tensor, other: Tensor, likelihood: Likelihood) -> Tensor:
    """The method's outputs loss, differentiated twice by its cosines, row by row."""
    rows, cols = len(outputs), len(other)
    block = batch_block(torch.arange(rows), seed=0, step=0)

    def loss(cosine: Tensor) -> Tensor:  # summed over rows; t = I makes the method's v·t the cosines themselves
        return rows * method_of(likelihood).loss(Embedding(cosine), Embedding(torch.eye(cols)), block).total

    cosine = functional.normalize(outputs, dim=1) @ other.T
    second = torch.autograd.functional.hessian(loss, cosine)
    total = torch.zeros(outputs.shape[1], outputs.shape[1], dtype=torch.float64)
    for i in range(rows):
        first = torch.autograd.functional.jacobian(lambda f: other @ functional.normalize(f, dim=0), outputs[i])
        total += first.T @ second[i, :, i, :].double() @ first
    return total


@pytest.mark.parametrize("likelihood", [Likelihood("softmax", 6.0), Likelihood("logistic", 5.0, -1.0)], ids=str)
def test_the_curvature_is_that_of_the_method_s_loss(likelihood: Likelihood) -> None:
    outputs, other = 3.0 * random(5, 4, seed=1), functional.normalize(random(5, 4, seed=2), dim=1)
    curvature = output_curvature(outputs, other, likelihood)
    torch.testing.assert_close(curvature, slow_curvature(outputs, other, likelihood), rtol=1e-4, atol=1e-5)


def small_pairs(images: int, *, per_image: int = 3, seed: int = 5) -> PairSet:
    owner = torch.arange(images).repeat_interleave(per_image)
    names = tuple(str(n) for n in range(len(owner)))
    features = random(images, 4, seed=seed).float(), random(len(owner), 5, seed=seed + 1).float()
    return PairSet(*features, names[:images], names, owner)


@pytest.mark.parametrize("name", ["infonce", "sigmoid"])
def test_factors_are_sums_over_training_rows(name: str) -> None:
    model, pairs = linear_model(name), small_pairs(5, per_image=2)
    posthoc = PostHocUncertainty.fit(model, pairs, batch_size=4, seed=1, device="cpu")
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
    torch.testing.assert_close(posthoc.text.inputs, inputs / 10**0.5, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(posthoc.text.outputs, outputs / 10**0.5, rtol=1e-3, atol=1e-5)


def random_factors(inputs: int = 4, outputs: int = 3) -> tuple[Tensor, Tensor]:
    x, y = random(9, inputs + 1, seed=1), random(9, outputs, seed=2)
    return x.T @ x, y.T @ y


def test_the_variance_of_an_output_is_that_of_the_whole_weight_covariance() -> None:
    (inputs, outputs), x = random_factors(), random(3, 4, seed=3)
    variance = LayerPosterior(inputs, outputs, 0.25).variance(x)
    precision = torch.kron(inputs + 0.5 * torch.eye(5), outputs + 0.5 * torch.eye(3))
    for n in range(3):
        first = torch.kron(with_one(x)[n][None], torch.eye(3, dtype=torch.float64))  # outputs by weights
        expected = (first @ torch.linalg.inv(precision) @ first.T).diagonal()
        torch.testing.assert_close(variance[n], expected)


def test_the_precision_maximises_the_evidence() -> None:
    (inputs, outputs), layer = random_factors(), nn.Linear(4, 3)
    size = sum(float(p.detach().square().sum()) for p in layer.parameters())

    def evidence(precision: float) -> float:
        eye = precision**0.5
        whole = torch.kron(inputs + eye * torch.eye(5), outputs + eye * torch.eye(3))
        return float(15 * torch.tensor(precision).log() - precision * size - torch.linalg.slogdet(whole).logabsdet)

    precision = likeliest_precision(inputs, outputs, layer=layer)
    assert 1e-8 < precision < 1e12
    tried = (10.0 ** torch.linspace(-4, 6, 500)).tolist()
    assert evidence(precision) == pytest.approx(max(map(evidence, tried)), abs=1e-2)
    assert precision < likeliest_precision(inputs, outputs, layer=nn.Linear(4, 3).apply(_halve))


def _halve(layer: nn.Module) -> None:
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.25)


class Hinge(nn.Module):
    """Scores by a cosine; its loss is no likelihood."""

    def likelihood(self) -> None:
        return None

    def score(self, v: Embedding, t: Embedding) -> Tensor:
        return v.mean @ t.mean.T


def test_a_hinge_gets_the_softmax_that_fits_its_labels_in_both_directions() -> None:
    """Some texts are near to every image: that confuses the softmax over texts alone."""
    hubs = torch.cat([torch.zeros(10), torch.full((10,), 0.5)])
    cosine = 0.2 * torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) + 0.3 * torch.eye(20) + hubs
    match = torch.eye(20).bool()
    fitted = [likelihood_of(Hinge(), [(x, match)]) for x in (cosine, cosine.T)]  # type: ignore[arg-type]
    scales = [likelihood.scale for likelihood in fitted]
    assert {likelihood.kind for likelihood in fitted} == {"softmax"}
    assert scales[0] == pytest.approx(scales[1])
    labels = torch.arange(20)

    def best(matrices: list[Tensor]) -> float:
        losses = [float(sum(functional.cross_entropy(s * c, labels) for c in matrices)) for s in range(1, 300)]
        return 1.0 + losses.index(min(losses))

    both, rows, columns = best([cosine, cosine.T]), best([cosine]), best([cosine.T])
    assert scales[0] == pytest.approx(both, rel=0.1)
    assert min(abs(rows - both), abs(columns - both)) > 0.2 * both


# ----------------------------------------------------------------------------------------------------------- 1 − cosine


def model_of(name: str, unseen: PairSet) -> MatchingModel:
    config = BackboneConfig(head=HeadConfig(dim=6))
    image_dim, text_dim = unseen.images.shape[1], unseen.texts.shape[1]
    return MatchingModel.build(method_config({"name": name}), config, image_dim=image_dim, text_dim=text_dim, seed=5)


@pytest.mark.parametrize("name", ["infonce", "sigmoid", "vse", "npc", "ncr", "bicro"])
def test_it_is_one_minus_the_mean_cosine_of_the_networks(name: str, unseen: PairSet) -> None:
    model = model_of(name, unseen)
    scorer, plain = CosineDistanceScorer(model, device="cpu"), PairScorer(model, device="cpu")
    rows, cols = torch.tensor([3, 0, 24]), torch.tensor([1, 5, 49])
    sigma = scorer.score_set(unseen).uncertainty(rows, cols)
    assert sigma is not None
    assert plain.score_set(unseen).uncertainty(rows, cols) is None
    for value, i, j in zip(sigma.tolist(), rows.tolist(), cols.tolist(), strict=True):
        cosines = []
        for network in model.networks:
            v = network.image_head(network.backbone.encode_images(unseen.images[i : i + 1]).values.squeeze(1))
            t = network.text_head(network.backbone.encode_texts(unseen.texts[j : j + 1]).values.squeeze(1))
            cosines.append(functional.cosine_similarity(v, t).item())
        assert len(cosines) == (2 if name in ("ncr", "bicro") else 1)
        assert value == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-5)
