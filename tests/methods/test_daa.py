from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import UsageError
from vacsr.methods import Daa, Embedding, Vse
from vacsr.methods.daa import DaaConfig, WordTable, captions_by_image, rank_agreement, soft_ranks
from vacsr.methods.vse import VseConfig
from vacsr.model import MatchingModel
from vacsr.pairwise import PairBlock, batch_block

CAPTIONS = ("A dog runs.", "a brown dog", "two cats, two hats", "a cat sleeps", "a dog and a cat", "the")
IMAGES = torch.tensor([0, 0, 1, 1, 2, 3])
FLICKR8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "flickr8k" / "captions.json"


def matrix(rows: int, cols: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ranks(row: torch.Tensor, temperature: float) -> list[torch.Tensor]:
    return [
        1 + sum(torch.sigmoid((row[k] - row[j]) / temperature) for k in range(len(row)) if k != j)
        for j in range(len(row))
    ]


def agreement(score: torch.Tensor, words: torch.Tensor, temperature: float) -> torch.Tensor:
    """Query by query, item by item."""
    shares = []
    for a, b in zip(score, words, strict=True):
        for x, y in zip(ranks(a, temperature), ranks(b, temperature), strict=True):
            x, y = torch.as_tensor(x, dtype=score.dtype), torch.as_tensor(y, dtype=score.dtype)
            shares.append(torch.minimum(x, y) / torch.maximum(x, y))
    return torch.stack(shares).mean()


def vectors(rarity: str) -> list[dict[str, float]]:
    """The captions' unit TF-IDF vectors as plain dictionaries."""
    plain = [caption.lower().replace(".", "").replace(",", "").split() for caption in CAPTIONS]
    split = [[word for word in words if len(word) > 1] for words in plain]  # as scikit-learn: "a" does not count
    result = []
    for words in split:
        vector = {}
        for word in set(words):
            found = [int(image) for other, image in zip(split, IMAGES, strict=True) if word in other]
            smoothed = math.log((1 + len(CAPTIONS)) / (1 + len(found))) + 1
            rare = smoothed if rarity == "captions" else math.log(4 / len(set(found)))
            vector[word] = words.count(word) * rare
        norm = math.sqrt(sum(x * x for x in vector.values()))
        result.append({word: x / norm for word, x in vector.items()})
    return result


def likeness(i: int, j: int, rarity: str = "captions") -> float:
    known = vectors(rarity)
    mates = [m for m in range(len(CAPTIONS)) if IMAGES[m] == IMAGES[i]]
    return sum(known[m].get(w, 0.0) * x for m in mates for w, x in known[j].items()) / len(mates)


# ------------------------------------------------------------------------------------------------------------ ranks


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 5), st.floats(0.01, 3), st.integers(0, 99))
def test_soft_ranks_and_their_agreement_item_by_item(rows: int, cols: int, temperature: float, seed: int) -> None:
    score, words = matrix(rows, cols, seed).requires_grad_(), matrix(rows, cols, seed + 1)
    expected = agreement(score, words, temperature)
    found = rank_agreement(score, words, temperature=temperature)
    torch.testing.assert_close(found, expected)
    if cols > 1:
        for ours, theirs in zip(torch.autograd.grad(found, score), torch.autograd.grad(expected, score), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_cold_soft_ranks_are_ranks() -> None:
    score = torch.tensor([[0.3, 0.9, -1.0, 0.5]])
    torch.testing.assert_close(soft_ranks(score, temperature=1e-3), torch.tensor([[3.0, 1.0, 4.0, 2.0]]))


def test_like_orders_agree_and_opposite_ones_do_not() -> None:
    score = matrix(3, 6, 0)
    assert rank_agreement(score, 7 * score + 2, temperature=1e-3) == pytest.approx(1.0, abs=1e-6)
    opposite = sum(min(r, 7 - r) / max(r, 7 - r) for r in range(1, 7)) / 6
    assert rank_agreement(score, -score, temperature=1e-4).item() == pytest.approx(opposite, rel=1e-3)


# ------------------------------------------------------------------------------------------------------------ words


@pytest.mark.parametrize("rarity", ["captions", "images"])
def test_relevance_is_the_mean_cosine_with_the_images_captions(rarity: Any) -> None:
    table = WordTable(CAPTIONS, IMAGES, rarity=rarity)
    batch = torch.tensor([4, 2, 0, 1, 5])
    found = table.relevance(batch)
    for row, i in enumerate(batch.tolist()):
        for col, j in enumerate(batch.tolist()):
            assert found[row, col].item() == pytest.approx(likeness(i, j, rarity), abs=1e-6), (i, j)


def test_relevance_is_that_of_float32_also_under_autocast() -> None:
    table, batch = WordTable(CAPTIONS, IMAGES), torch.tensor([4, 2, 0, 1, 5])
    with torch.autocast("cpu", torch.bfloat16):
        found = table.relevance(batch)
    assert found.dtype == torch.float32
    assert torch.equal(found, table.relevance(batch))


def test_a_word_of_all_images_weighs_nothing_where_images_are_counted() -> None:
    table = WordTable(("the", "the dog", "the"), torch.tensor([0, 1, 2]), rarity="images")
    torch.testing.assert_close(table.relevance(torch.arange(3)), torch.diag(torch.tensor([0.0, 1.0, 0.0])))
    table = WordTable(("the", "the dog", "the"), torch.tensor([0, 1, 2]), rarity="captions")
    assert (table.relevance(torch.arange(3)) > 0.3).all()


def test_words_of_one_letter_do_not_count() -> None:
    """As in the public code, whose vectorizer takes words of two characters at least."""
    table = WordTable(("a dog", "a cat", "I see a dog, x"), torch.tensor([0, 1, 2]))
    assert table.size == 3
    relevance = table.relevance(torch.arange(3))
    assert relevance[0, 1].item() == 0.0
    assert relevance[0, 2].item() > 0.3


def test_the_method_counts_as_its_config_says() -> None:
    found = []
    for rarity in ("captions", "images"):
        method: Any = Daa(method_config({"name": "daa", "rarity": rarity}), dim=8)  # type: ignore[arg-type]
        method.fit(CAPTIONS, IMAGES)
        found.append(method.words.relevance(torch.tensor([0, 3])))
        assert found[-1][0, 1].item() == pytest.approx(likeness(0, 3, rarity), abs=1e-6)
    assert not torch.allclose(*found)


@pytest.mark.shared
@pytest.mark.skipif(not FLICKR8K.is_file(), reason="needs ../shared/data/flickr8k beside the checkout")
@pytest.mark.parametrize(("rarity", "expected"), [("images", 0.29), ("captions", 0.35)])
def test_equal_scores_agree_with_words_less_where_captions_are_counted(rarity: Any, expected: float) -> None:
    """The lower, the more the term invites all items into one place; docs/methods/daa.md has these figures."""
    known = [item["captions"] for item in json.loads(FLICKR8K.read_text()) if item["split"] == "train"]
    image = torch.arange(len(known)).repeat_interleave(5)
    table = WordTable([caption for captions in known for caption in captions], image, rarity=rarity)
    words = table.relevance(torch.randperm(len(image), generator=torch.Generator().manual_seed(0))[:128])
    found = 1 - rank_agreement(torch.zeros_like(words), words, temperature=0.01)
    assert found.item() == pytest.approx(expected, abs=0.01)


def test_captions_by_image_in_order() -> None:
    found = captions_by_image(torch.tensor([2, 0, 2, 2, 0]))
    assert found.tolist() == [[1, 4, -1], [-1, -1, -1], [0, 2, 3]], "an image without captions has none"


# ----------------------------------------------------------------------------------------------------------- method


def case(count: int) -> tuple[Embedding, Embedding]:
    v, t = functional.normalize(torch.randn(2, count, 5, generator=torch.Generator().manual_seed(3)), dim=-1)
    return Embedding(v.requires_grad_()), Embedding(t.requires_grad_())


def block(captions: torch.Tensor) -> PairBlock:
    return batch_block(IMAGES[captions], seed=0, step=0, captions=captions)


def test_the_loss_is_the_bases_and_both_directions_of_disagreement() -> None:
    method, captions = Daa(DaaConfig(base=VseConfig(), weight=30.0, temperature=0.2), dim=8), torch.tensor([3, 0, 4, 2])
    method.fit(CAPTIONS, IMAGES)
    v, t = case(4)
    terms = method.loss(v, t, block(captions))
    score = v.mean.double() @ t.mean.double().T
    words = torch.tensor([[likeness(i, j) for j in captions.tolist()] for i in captions.tolist()], dtype=torch.float64)
    rows, cols = 1 - agreement(score, words, 0.2), 1 - agreement(score.T, words.T, 0.2)
    base = Vse(VseConfig(), dim=8).loss(v, t, block(captions)).total
    expected = base + 30.0 * (rows + cols)
    torch.testing.assert_close(terms.total.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(terms.parts["asp_i2t"].double(), rows.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms.parts["asp_t2i"].double(), cols.detach(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(terms.total, [v.mean, t.mean]),
        torch.autograd.grad(expected, [v.mean, t.mean]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("base", ["pcme", "vse", "infonce", "sigmoid"])
def test_everything_else_is_the_bases(base: str) -> None:
    method: Any = MatchingModel.build(
        method_config({"name": "daa", "base": {"name": base}}), BackboneConfig(), image_dim=3, text_dim=3
    ).method
    assert method.config.base.name == base
    v, t = (Embedding(x.mean, torch.full_like(x.mean, -3.0)) for x in case(3))
    score = method.score(v, t)
    assert torch.equal(score, method.base.score(v, t))
    grade = method.grade(score)
    assert ((grade > 0) & (grade < 1)).all()
    assert (method.uncertainty(v, t) is None) == (base != "pcme")
    assert (method.log_var_start is None) == (base != "pcme")
    assert [id(p) for g in method.param_groups() for p in g.params] == [id(p) for p in method.parameters()]


def test_without_words_it_says_what_to_give() -> None:
    with pytest.raises(UsageError, match="captions=FILE") as caught:
        Daa(DaaConfig(), dim=8).fit(None, IMAGES)
    assert caught.value.exit_code == 2


def test_before_fit_it_has_no_loss() -> None:
    method = Daa(DaaConfig(base=VseConfig()), dim=8)
    with pytest.raises(UsageError, match="fit"):
        method.loss(*case(2), block(torch.tensor([0, 2])))
    method.fit(CAPTIONS, IMAGES)
    with pytest.raises(UsageError, match="fit"):
        method.loss(*case(2), batch_block(torch.tensor([0, 1]), seed=0, step=0))


def test_a_saved_model_carries_no_training_captions(tmp_path: Path) -> None:
    backbone = BackboneConfig(head=HeadConfig(dim=4))
    model = MatchingModel.build(method_config("daa"), backbone, image_dim=3, text_dim=3)
    method: Any = model.method
    method.fit(CAPTIONS, IMAGES)
    model.save_pretrained(tmp_path)
    again: Any = MatchingModel.from_pretrained(tmp_path)
    assert not any("study" in name for name in again.state_dict())
    assert again.method.words is None
    x = torch.ones(2, 3)
    assert torch.equal(
        again.method.score(again.embed_images(x), again.embed_texts(x)),
        model.eval().method.score(model.embed_images(x), model.embed_texts(x)),
    )


def test_the_table_moves_with_the_model() -> None:
    method: Any = Daa(DaaConfig(), dim=8)
    method.fit(CAPTIONS, IMAGES)
    method.to("meta")
    assert {buffer.device.type for buffer in method.buffers()} == {"meta"}


def test_the_papers_settings() -> None:
    config: Any = method_config("daa-paper")
    assert (config.weight, config.temperature) == (1000.0, 0.01)
    base = config.base
    assert (base.name, base.samples, base.scale, base.shift) == ("pcme", 5, 15.0, 15.0)
    assert (base.vib_weight, base.vib_reduction) == (1e-5, "sum")


def test_the_papers_settings_with_another_base() -> None:
    """Whose fields are its own: those of the preset's base do not fit."""
    config: Any = method_config({"name": "daa", "preset": "paper", "base": {"name": "vse", "margin": 0.1}})
    assert config.base == VseConfig(margin=0.1)
    same: Any = method_config({"name": "daa", "preset": "paper", "base": {"vib_weight": 0.5}})
    assert (same.base.name, same.base.samples, same.base.vib_weight) == ("pcme", 5, 0.5)
