"""Members of an ensemble, against the same members one by one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, load_pairs
from vacsr.methods.base import Embedding, build_method
from vacsr.methods.members import Members
from vacsr.model import MatchingModel, load_model
from vacsr.noise import of_member, seeded
from vacsr.scoring import PairScorer
from vacsr.scoring.folded import BlockScorer
from vacsr.train import fit

from .cases import block, unit

DIM = 6
EVERY = ["vacsr", "infonce", "sigmoid", "vse", "pcme", "pcmepp", "daa", "ncr", "bicro", "npc"]


def build(method: str | dict[str, Any], count: int = 3) -> Members:
    """Members with weights far from their start."""
    raw = {"name": method} if isinstance(method, str) else method
    with seeded(0):
        made = build_method(method_config({**raw, "members": count}), dim=DIM)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    assert isinstance(made, Members)
    return made


def joined(seed: int, items: int, count: int = 3) -> tuple[list[Embedding], Embedding]:
    """Every member's unit vectors, and the model's embedding of the same items."""
    parts = [Embedding(unit(seed + n, items, DIM)) for n in range(count)]
    return parts, Embedding(torch.cat([part.mean for part in parts], dim=1) / count**0.5)


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    return load_pairs("synthetic:images=24,held_out=10,per_image=2", split="train")


@torch.no_grad()
@pytest.mark.parametrize("method", ["vacsr", "infonce", {"name": "vacsr", "adapter": {"decoder_hidden": 0}}])
def test_scores_are_the_mean_of_the_members_scores(method: Any) -> None:
    made, (images, v), (texts, t) = build(method), joined(1, 5), joined(11, 7)
    apart = [member.score(x, y) for member, x, y in zip(made.each, images, texts, strict=True)]
    torch.testing.assert_close(made.score(v, t), sum(apart) / 3)
    torch.testing.assert_close(BlockScorer(made).block(v, t), sum(apart) / 3, atol=1e-5, rtol=1e-5)
    some = Embedding(t.mean[:5])
    aligned = torch.stack([score[:, :5].diagonal() for score in apart])
    torch.testing.assert_close(made.aligned_score(v, some), aligned.mean(dim=0))
    torch.testing.assert_close(BlockScorer(made).aligned(v, some), aligned.mean(dim=0), atol=1e-5, rtol=1e-5)
    graded = aligned.sigmoid() if made.logit_score else aligned  # InfoNCE only ranks
    torch.testing.assert_close(made.disagreement(v, some), graded.std(dim=0))


def test_each_member_learns_from_its_own_loss_and_noise() -> None:
    made, (images, v), (texts, t), pairs = build("vacsr"), joined(1, 4), joined(11, 4), block([0, 1, 1, 2])
    terms = made.loss(v, t, pairs)
    apart = [
        member.loss(x, y, replace(pairs, noise=of_member(pairs.noise, number))).total
        for number, (member, x, y) in enumerate(zip(made.each, images, texts, strict=True))
    ]
    torch.testing.assert_close(terms.total, sum(apart) / 3)
    assert torch.equal(of_member(pairs.noise, 0).normal(3), pairs.noise.normal(3))
    draws = [of_member(pairs.noise, number).normal(3) for number in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    other = torch.autograd.grad(terms.total, list(made.each[1].parameters()), retain_graph=True)
    alone = torch.autograd.grad(apart[1] / 3, list(made.each[1].parameters()))
    for mine, expected in zip(other, alone, strict=True):
        torch.testing.assert_close(mine, expected)


@torch.no_grad()
def test_uncertainties_and_grades_are_averaged() -> None:
    made, (images, v), (texts, t) = build("vacsr"), joined(1, 5), joined(11, 5)
    sigma = [member.uncertainty(x, y) for member, x, y in zip(made.each, images, texts, strict=True)]
    torch.testing.assert_close(made.uncertainty(v, t), sum(sigma) / 3)  # type: ignore[arg-type]
    made = build("sigmoid")
    grades = [member.grade(torch.linspace(-1, 1, 5)) for member in made.each]
    torch.testing.assert_close(made.grade(torch.linspace(-1, 1, 5)), sum(grades) / 3)  # type: ignore[arg-type]
    assert build("infonce").grade(torch.zeros(2)) is None


@pytest.mark.parametrize("method", EVERY)
def test_every_method_trains_with_members_and_loads_again(pairs: PairSet, method: str, tmp_path: Path) -> None:
    config = TrainConfig(epochs=2, batch_size=16, lr=5e-3, device="cpu", ema=0.9)
    raw = {"name": method, "members": 2, **({"warmup": 0.5} if method in ("ncr", "bicro", "npc") else {})}
    model = fit(raw, pairs, config, backbone=BackboneConfig(head=HeadConfig(dim=DIM)), progress=False).model
    networks = 2 * (2 if method in ("ncr", "bicro") else 1)
    assert model.dim == DIM * networks
    scores = PairScorer(model, device="cpu").score_set(pairs)
    v = scores.images.mean.unflatten(1, (networks, DIM)) * networks**0.5
    torch.testing.assert_close(v.norm(dim=2), torch.ones(v.shape[:2]))
    assert float((v[:, 0] - v[:, 1]).abs().max()) > 0.1, "members differ"
    model.save_pretrained(tmp_path)
    again = PairScorer(load_model(tmp_path), device="cpu").score_set(pairs)
    assert torch.equal(again.score, scores.score)


def test_members_multiply_what_is_above_the_backbone() -> None:
    def count(members: int) -> int:
        config = BackboneConfig(head=HeadConfig(dim=DIM))
        raw = method_config({"name": "vacsr", "members": members})
        return MatchingModel.build(raw, config, image_dim=4, text_dim=3).count_parameters()

    assert count(3) == 3 * count(1)


def test_members_share_their_towers(tmp_path: Path) -> None:
    config = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=DIM))
    one, three = (MatchingModel.build(method_config({"name": "infonce", "members": count}), config) for count in (1, 3))
    towers = sum(p.numel() for p in one.backbone.parameters())
    assert sum(p.numel() for p in three.backbone.parameters()) == towers
    three.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    pixels = torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(again.embed_images(pixels).mean, three.eval().embed_images(pixels).mean)
