from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from vacsr.cli.lookup import score_named
from vacsr.config import BackboneConfig, HeadConfig
from vacsr.data import PairSet, Provenance, load_pairs
from vacsr.errors import DataError, ProvenanceMismatch
from vacsr.methods.infonce import InfoNCEConfig
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    return load_pairs("synthetic:images=12,per_image=2", split="train")


def scorer(pairs: PairSet, config: VacsrConfig | SigmoidConfig | InfoNCEConfig) -> PairScorer:
    head = BackboneConfig(head=HeadConfig(dim=8))
    dims = {"image_dim": pairs.images.shape[1], "text_dim": pairs.texts.shape[1]}
    return PairScorer(MatchingModel.build(config, head, **dims, provenance=pairs.provenance), device="cpu")


@pytest.mark.parametrize("config", [VacsrConfig(), SigmoidConfig(), InfoNCEConfig()])
def test_lines_are_the_matrix_entries(pairs: PairSet, config: VacsrConfig | SigmoidConfig | InfoNCEConfig) -> None:
    judge = scorer(pairs, config)
    texts = [pairs.caption_ids[7], pairs.caption_ids[0], pairs.caption_ids[20]]
    lines = list(score_named(judge, pairs, image=pairs.image_ids[3], texts=texts))
    matrix = judge.score_set(pairs)
    for line, text, column in zip(lines, texts, (7, 0, 20), strict=True):
        score = matrix.score[3, column]
        assert line[:2] == (pairs.image_ids[3], text)
        assert float(line[2]) == pytest.approx(float(score), abs=1e-4)
        assert float(line[3]) == pytest.approx(float(judge.model.method.grade(score).detach()), abs=1e-4)
        sigma = matrix.uncertainty(torch.tensor([3]), torch.tensor([column]))
        assert line[4] == ("–" if sigma is None else f"{float(sigma):.4f}")


def test_a_caption_may_be_given_by_its_words(pairs: PairSet) -> None:
    judge = scorer(pairs, SigmoidConfig())
    assert pairs.captions is not None
    column = next(n for n, text in enumerate(pairs.captions) if pairs.captions.count(text) == 1)
    by_words = list(score_named(judge, pairs, image=pairs.image_ids[0], texts=[pairs.captions[column]]))
    by_id = list(score_named(judge, pairs, image=pairs.image_ids[0], texts=[pairs.caption_ids[column]]))
    assert by_words[0][2:] == by_id[0][2:]
    assert by_words[0][1] == pairs.captions[column]


def with_words(pairs: PairSet, *columns: int) -> PairSet:
    """The same pairs, these captions with the same words. Image n has the captions 2n and 2n + 1."""
    words = tuple("the same words" if n in columns else f"words {n}" for n in range(len(pairs.caption_ids)))
    return replace(pairs, captions=words)


@pytest.mark.parametrize(
    ("columns", "taken", "warned"),
    [
        ((9,), 9, None),
        ((2, 7, 9), 7, None),
        ((2, 9), 2, "other images"),
        ((2, 6, 7), 6, "image 'train-0003'"),
    ],
)
def test_words_of_several_captions(pairs: PairSet, columns: tuple[int, ...], taken: int, warned: str | None) -> None:
    judge, same = scorer(pairs, VacsrConfig()), with_words(pairs, *columns)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (by_words,) = score_named(judge, same, image="train-0003", texts=["the same words"])
    (by_id,) = score_named(judge, same, image="train-0003", texts=[same.caption_ids[taken]])
    assert by_words[2:] == by_id[2:]
    assert by_words[1] == "the same words"
    assert len(caught) == (warned is not None)
    assert all(warned and warned in str(one.message) and "give a caption id" in str(one.message) for one in caught)


def test_a_wrong_name_is_answered_with_the_nearest(pairs: PairSet) -> None:
    judge = scorer(pairs, SigmoidConfig())
    with pytest.raises(DataError, match="no image id 'train-003' among 12 — did you mean 'train-0003'"):
        list(score_named(judge, pairs, image="train-003", texts=[pairs.caption_ids[0]]))
    with pytest.raises(DataError, match="no caption id '%%%' among 24 — the first is 'train-0000#0'"):
        list(score_named(judge, pairs, image="train-0003", texts=["%%%"]))


def test_embeddings_of_another_kind_are_refused(pairs: PairSet) -> None:
    judge = scorer(pairs, SigmoidConfig())
    judge.model.provenance = Provenance("clip:other")
    with pytest.raises(ProvenanceMismatch):
        list(score_named(judge, pairs, image=pairs.image_ids[0], texts=[pairs.caption_ids[0]]))
