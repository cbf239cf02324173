import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.errors import UsageError
from vacsr.methods import Embedding
from vacsr.methods.daa import Daa, DaaConfig, rank_agreement
from vacsr.methods.vse import Vse, VseConfig
from vacsr.model import MatchingModel

from .cases import assert_same, block, pair

CAPTIONS = ("A dog runs.", "a brown dog", "two cats, two hats", "two cats sleep", "a dog and a cat", "the")
IMAGES = torch.tensor([0, 0, 1, 1, 2, 3])


def agreement(score: Tensor, words: Tensor, temperature: float) -> Tensor:
    """Query by query, item by item."""

    def rank(row: Tensor, j: int) -> Tensor:
        above = [torch.sigmoid((row[k] - row[j]) / temperature) for k in range(len(row)) if k != j]
        return 1 + torch.stack([0 * row[j], *above]).sum()

    shares = []
    for a, b in zip(score, words, strict=True):
        for j in range(len(a)):
            x, y = rank(a, j), rank(b, j)
            shares.append(torch.minimum(x, y) / torch.maximum(x, y))
    return torch.stack(shares).mean()


def vectors() -> list[dict[str, float]]:
    """The captions' unit TF-IDF vectors as plain dictionaries."""
    plain = [caption.lower().replace(".", "").replace(",", "").split() for caption in CAPTIONS]
    split = [[word for word in words if len(word) > 1] for words in plain]  # as scikit-learn: "a" does not count
    result = []
    for words in split:
        vector = {}
        for word in set(words):
            frequency = sum(word in other for other in split)
            vector[word] = words.count(word) * (math.log((1 + len(CAPTIONS)) / (1 + frequency)) + 1)
        norm = math.sqrt(sum(x * x for x in vector.values()))
        result.append({word: x / norm for word, x in vector.items()})
    return result


def likeness(captions: Tensor) -> Tensor:
    """Of the image of caption i with caption j: the mean over its captions of a sum over words."""
    known = vectors()
    rows = []
    for i in captions.tolist():
        mates = [m for m in range(len(CAPTIONS)) if IMAGES[m] == IMAGES[i]]
        rows.append([
            sum(known[m].get(w, 0.0) * x for m in mates for w, x in known[j].items()) / len(mates)
            for j in captions.tolist()
        ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 5), st.floats(0.01, 3), st.integers(0, 99))
def test_soft_ranks_and_their_agreement_item_by_item(rows: int, cols: int, temperature: float, seed: int) -> None:
    score, words = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    score.requires_grad_()
    expected = agreement(score, words, temperature)
    assert_same(rank_agreement(score, words, temperature=temperature), expected, [score], atol=1e-9, rtol=1e-7)


def test_relevance_is_the_mean_cosine_with_the_images_captions() -> None:
    """Float32 also under autocast; the table moves with its method."""
    method = Daa(DaaConfig(), dim=8)
    method.fit(CAPTIONS, IMAGES)
    assert method.words is not None
    batch = torch.tensor([4, 2, 0, 1, 5])
    relevance = method.words.relevance(batch)
    torch.testing.assert_close(relevance.double(), likeness(batch), atol=1e-6, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(method.words.relevance(batch), relevance)
    method.to("meta")
    assert {buffer.device.type for buffer in method.buffers()} == {"meta"}


def test_the_loss_is_the_bases_and_both_directions_of_disagreement() -> None:
    method, captions = Daa(DaaConfig(base=VseConfig(), weight=30.0, temperature=0.2), dim=8), torch.tensor([3, 0, 4, 2])
    method.fit(CAPTIONS, IMAGES)
    (v, t), pairs = pair(3, 4), block(IMAGES[captions], captions=captions)
    terms = method.loss(v, t, pairs)
    score, words = v.mean.double() @ t.mean.double().T, likeness(captions)
    rows, cols = 1 - agreement(score, words, 0.2), 1 - agreement(score.T, words.T, 0.2)
    expected = Vse(VseConfig(), dim=8).loss(v, t, pairs).total + 30.0 * (rows + cols)
    assert_same(terms.total, expected, [v.mean, t.mean], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(terms.parts["asp_i2t"].double(), rows.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms.parts["asp_t2i"].double(), cols.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", ["pcme", "vse", "infonce", "sigmoid"])
def test_everything_else_is_the_bases(base: str) -> None:
    config = method_config({"name": "daa", "base": {"name": base}})
    method: Any = MatchingModel.build(config, BackboneConfig(), image_dim=3, text_dim=3).method
    assert method.config.base.name == base
    v, t = (Embedding(x.mean, torch.full_like(x.mean, -3.0)) for x in pair(3, 3))
    score = method.score(v, t)
    assert torch.equal(score, method.base.score(v, t))
    grade, expected = method.grade(score), method.base.grade(score)
    assert (grade is None) == (expected is None) == (base in ("vse", "infonce"))
    assert grade is None or torch.equal(grade, expected)
    assert (method.uncertainty(v, t) is None) == (base != "pcme")
    assert (method.log_var_start, method.variance_norm) == (method.base.log_var_start, method.base.variance_norm)
    assert [id(p) for g in method.param_groups() for p in g.params] == [id(p) for p in method.parameters()]


def test_without_captions_it_says_what_to_do() -> None:
    method, (v, t) = Daa(DaaConfig(base=VseConfig()), dim=8), pair(3, 2)
    with pytest.raises(UsageError, match="captions=FILE"):
        method.fit(None, IMAGES)
    with pytest.raises(UsageError, match="fit"):
        method.loss(v, t, block([0, 1], captions=torch.tensor([0, 2])))
    method.fit(CAPTIONS, IMAGES)
    with pytest.raises(UsageError, match="fit"):
        method.loss(v, t, block([0, 1]))


def test_a_saved_model_carries_no_training_captions(tmp_path: Path) -> None:
    backbone = BackboneConfig(head=HeadConfig(dim=4))
    model = MatchingModel.build(method_config("daa"), backbone, image_dim=3, text_dim=3)
    model.method.fit(CAPTIONS, IMAGES)
    model.save_pretrained(tmp_path)
    again: Any = MatchingModel.from_pretrained(tmp_path)
    assert again.method.words is None
    x = torch.ones(2, 3)
    scores = [m.method.score(m.embed_images(x), m.embed_texts(x)) for m in (again, model.eval())]
    assert torch.equal(*scores)


def test_the_papers_settings_with_another_base() -> None:
    """Whose fields are its own: those of the preset's base do not fit."""
    config: Any = method_config({"name": "daa", "preset": "paper", "base": {"name": "vse", "margin": 0.1}})
    assert config.base == VseConfig(margin=0.1)
    same: Any = method_config({"name": "daa", "preset": "paper", "base": {"vib_weight": 0.5}})
    assert (same.base.name, same.base.samples, same.base.vib_weight) == ("pcme", 5, 0.5)
