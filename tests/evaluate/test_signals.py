"""Uncertainties of pairs and of answers, against plain loops."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.data import PairSet
from vacsr.evaluate.metrics import hits_at
from vacsr.evaluate.protocols import Gallery
from vacsr.evaluate.report import evaluate_scores
from vacsr.evaluate.score_files import MatrixScores
from vacsr.evaluate.signals import (
    Temperature,
    answer_signals,
    confidence,
    fit_temperature,
    flip_distance,
    pair_signals,
    vote_share,
)
from vacsr.evaluate.uncertainty import aurc
from vacsr.scoring.scorer import Vectors
from vacsr.scoring.topk import DIRECTIONS, Direction

IMAGES, EACH, NETWORKS, WIDTH = 20, 2, 3, 6


class EnsembleScores(MatrixScores):
    """The cosines of joined vectors, with σ and a disagreement that are matrices."""

    def vectors(self) -> Vectors:
        images, texts = (unit(x) for x in made())
        return Vectors(images, texts, NETWORKS)

    def disagreement(self, rows: Tensor, cols: Tensor) -> Tensor:
        return (self.score[rows, cols] * 7).frac()

    def temperature(self) -> float:
        return 0.1


def made() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, NETWORKS, WIDTH, generator=generator)
    texts = images.repeat_interleave(EACH, 0) + torch.randn(IMAGES * EACH, NETWORKS, WIDTH, generator=generator)
    return images, texts


def unit(x: Tensor) -> Tensor:
    """Members of length 1 end to end, all of length 1 together."""
    return functional.normalize(x, dim=2).flatten(1) / math.sqrt(NETWORKS)


@pytest.fixture
def scores() -> EnsembleScores:
    images, texts = (unit(x) for x in made())
    sigma = torch.rand(IMAGES, IMAGES * EACH, generator=torch.Generator().manual_seed(1))
    return EnsembleScores(images @ texts.T, sigma)


@pytest.fixture
def pairs() -> PairSet:
    owner = torch.arange(IMAGES).repeat_interleave(EACH)
    ids = tuple(f"i{row}" for row in range(IMAGES)), tuple(f"c{col}" for col in range(IMAGES * EACH))
    return PairSet(torch.ones(IMAGES, 2), torch.ones(IMAGES * EACH, 2), *ids, owner, split="dev")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_answers_one_by_one(scores: EnsembleScores, pairs: PairSet, direction: Direction) -> None:
    gallery = Gallery.of_labels(pairs)
    signals = answer_signals(scores, gallery, direction, temperature=0.2)
    assert set(signals) == {"sigma", "disagreement", "one_minus_cosine", "confidence", "perturbation", "votes"}
    sides = made() if direction == "i2t" else made()[::-1]
    matrix = scores.score if direction == "i2t" else scores.score.T
    for query in range(len(matrix)):
        first, second = matrix[query].argsort(descending=True)[:2].tolist()
        pair = (query, first) if direction == "i2t" else (first, query)
        assert scores.sigma is not None
        expected = {
            "sigma": scores.sigma[pair],
            "disagreement": (scores.score[pair] * 7).frac(),
            "one_minus_cosine": 1 - matrix[query, first],
            "confidence": 1 - (matrix[query] / 0.2).softmax(0)[first],
        }
        votes = Counter(
            int(functional.cosine_similarity(sides[0][query, member], sides[1][:, member], dim=1).argmax())
            for member in range(NETWORKS)
        )
        expected["votes"] = torch.tensor(1 - votes.most_common(1)[0][1] / NETWORKS)
        asked = unit(sides[0])[query].clone().requires_grad_()
        near = functional.cosine_similarity(asked[None], unit(sides[1])[[first, second]], dim=1)
        (gradient,) = torch.autograd.grad(near[0] - near[1], asked)
        expected["perturbation"] = -(near[0] - near[1]).detach() / gradient.norm()
        for name, value in expected.items():
            assert float(signals[name][query]) == pytest.approx(float(value), abs=1e-5), name


def test_a_move_of_the_flip_distance_brings_the_second_item_level() -> None:
    query, first, second = (
        functional.normalize(torch.randn(50, 8, generator=torch.Generator().manual_seed(n)), dim=1) for n in (1, 2, 3)
    )
    near = functional.normalize(first + 0.02 * second, dim=1)
    far = flip_distance(query, first, near)
    apart = first - near
    gradient = apart - (query * apart).sum(1, keepdim=True) * query
    moved = functional.normalize(query - far[:, None] * functional.normalize(gradient, dim=1), dim=1)
    lead = (query * apart).sum(1).abs()
    assert bool(((moved * apart).sum(1).abs() <= 0.2 * lead + 1e-6).all())


def test_the_temperature_is_that_of_highest_likelihood() -> None:
    rng = np.random.default_rng(0)
    top = -np.sort(-rng.normal(size=(3000, 20)), axis=1)
    right = (rng.random(3000) < confidence(top, 0.35)).astype(float)
    right[:5] = np.nan
    fitted = fit_temperature(top, right)
    assert fitted == pytest.approx(0.35, rel=0.1)

    def loss(temperature: float) -> float:
        terms = []
        for row, hit in zip(top, right, strict=True):
            chance = math.exp(row[0] / temperature) / sum(math.exp(value / temperature) for value in row)
            if hit == hit:
                terms.append(-math.log(chance if hit else 1 - chance))
        return sum(terms) / len(terms)

    assert loss(fitted) <= min(loss(fitted * 0.98), loss(fitted * 1.02))


def evaluated(scores: MatrixScores, pairs: PairSet, **options: Any) -> dict[str, Any]:
    (result,) = evaluate_scores(scores, pairs, **options).results
    return result


def test_the_report_has_every_signal(scores: EnsembleScores, pairs: PairSet) -> None:
    result = evaluated(scores, pairs)
    own = result["signals"]["confidence"]
    assert (own["temperature_i2t"], own["temperature_t2i"], own["fitted_on"]) == (0.1, 0.1, None)
    gallery = Gallery.of_labels(pairs)
    for direction, ranks in zip(DIRECTIONS, gallery.ranks(scores), strict=True):
        values = answer_signals(scores, gallery, direction, temperature=0.1)
        for name, value in values.items():
            expected = 100 * aurc(value, 1 - hits_at(ranks, 1))
            assert result["signals"][name][f"aurc_{direction}"] == pytest.approx(expected), name
            assert result["signals"][name][f"risk_{direction}"]["risk"][-1] == pytest.approx(
                100 - result[direction]["r1"]
            )
    assert result["signals"]["sigma"]["aurc_i2t"] == result["uncertainty"]["aurc_i2t"]


def test_a_fitted_temperature_is_stated_and_passed_on(scores: EnsembleScores, pairs: PairSet) -> None:
    report = evaluate_scores(scores, pairs, temperature="fit")
    fitted = report.temperature
    assert fitted is not None
    assert fitted.split == "dev"
    top = scores.score.sort(dim=1, descending=True).values.double().numpy()
    right = hits_at(Gallery.of_labels(pairs).ranks(scores)[0], 1).numpy()
    assert fitted.i2t == pytest.approx(fit_temperature(top, right))
    given = evaluated(scores, pairs, temperature=Temperature(0.3, 0.4, "dev"))["signals"]["confidence"]
    assert (given["temperature_i2t"], given["temperature_t2i"], given["fitted_on"]) == (0.3, 0.4, "dev")


def test_scores_alone_have_no_signals(scores: EnsembleScores, pairs: PairSet) -> None:
    assert evaluated(MatrixScores(scores.score), pairs)["signals"] == {}
    assert set(evaluated(MatrixScores(scores.score, scores.sigma), pairs)["signals"]) == {"sigma"}
    rows = torch.tensor([0, 3])
    assert set(pair_signals(MatrixScores(scores.score), rows, rows)) == {"score"}
    assert vote_share(scores.vectors()._replace(networks=1), Gallery.of_labels(pairs), "t2i").tolist() == [1.0] * 40
