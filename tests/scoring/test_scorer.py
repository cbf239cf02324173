"""PairScorer on cached features: lazy scores, single pairs, pairs by name, and what is refused."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from vacsr.data.pairs import PairSet, Provenance
from vacsr.errors import DataError, EnvironmentProblem, ProvenanceMismatch, ShapeMismatch, UsageError
from vacsr.methods.base import Embedding
from vacsr.model import MatchingModel, choose_device
from vacsr.scoring import CosineDistanceScorer, PairScorer, PairScores
from vacsr.scoring.topk import Direction

from .models import IMAGES, TEXTS, inputs, model, sorted_topk

METHODS: list[dict[str, Any]] = [
    {"name": "vacsr"},
    {"name": "vacsr", "adapter": {"mixing": "head"}},
    {"name": "vacsr", "adapter": {"trunk_norm": True, "decode": "argmax"}},
    {"name": "sigmoid"},
    {"name": "infonce"},
]
every_method = pytest.mark.parametrize("raw", METHODS, ids=str)


@pytest.fixture(scope="module")
def scorer() -> PairScorer:
    return PairScorer(model("vacsr"), device="cpu")


@torch.no_grad()
def dense(made: MatchingModel, images: Tensor, texts: Tensor) -> Tensor:
    return made.method.score(made.embed_images(images), made.embed_texts(texts))


@every_method
def test_lazy_scores_are_the_dense_ones(raw: dict[str, Any]) -> None:
    """Without dropout and gradient, though the model was in training."""
    made, (images, texts) = model(raw).train(), inputs()
    scores = PairScorer(made, device="cpu").score_all(images, texts)
    blocks = list(scores.blocks())
    assert len(blocks) > 1
    torch.testing.assert_close(scores.score, dense(made, images, texts), atol=1e-5, rtol=1e-5)
    for again in (blocks, list(scores.blocks())):
        assert torch.equal(torch.cat(again), scores.score)
    assert not scores.score.requires_grad


@every_method
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("images", "texts"), [(IMAGES, TEXTS), (TEXTS, IMAGES), (0, 3), (3, 0), (0, 0)])
def test_topk_is_the_full_sort(
    raw: dict[str, Any], images: int, texts: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each direction, and both in one pass; a matrix that is there is not computed again."""
    x, y = inputs(images, texts)
    x[70:75], y[40:44] = x[3:4], y[2:3]  # exact ties, across blocks too
    scorer = PairScorer(model(raw), device="cpu")
    scores, passes, stream = scorer.score_all(x, y), [], scorer.engine.stream
    matrix = scorer.score_all(x, y).score
    if cached:
        _ = scores.score
    monkeypatch.setattr(scorer.engine, "stream", lambda v, t: passes.append(1) or stream(v, t))
    for k in (1, 10, 1000):
        both = scores.topk_both(k)
        single = scores.topk(k), scores.topk(k, direction="t2i")
        for expected, tops in ((matrix, (both.texts, single[0])), (matrix.T, (both.images, single[1]))):
            for top in tops:
                assert top.index.tolist() == sorted_topk(expected, k)
                assert torch.equal(top.score, expected.gather(1, top.index))
    assert len(passes) == (0 if cached else 9)
    assert single[0].to_dict()["index"] == both.to_dict()["texts"]["index"] == single[0].index.tolist()


@every_method
def test_aligned_and_picked_pairs(raw: dict[str, Any]) -> None:
    made, (images, texts) = model(raw), inputs()
    scorer, matrix = PairScorer(made, device="cpu"), dense(made, images, texts)
    rows = torch.randint(IMAGES, (9000,), generator=torch.Generator().manual_seed(0))  # more than one chunk
    cols = torch.randint(TEXTS, (9000,), generator=torch.Generator().manual_seed(1))
    picked = scorer.score_all(images, texts).at(rows, cols)
    torch.testing.assert_close(picked.score, matrix[rows, cols], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        grade = made.method.grade(picked.score)
    aligned = scorer.score_pairs(images[:TEXTS], texts)
    torch.testing.assert_close(aligned.score, matrix.diagonal(), atol=1e-5, rtol=1e-5)
    if picked.grade is None or aligned.grade is None:
        assert (raw["name"], grade) == ("infonce", None)
    else:
        torch.testing.assert_close(picked.grade, grade)
        assert ((aligned.grade > 0) & (aligned.grade < 1)).all()
    assert aligned.to_dict()["score"] == aligned.score.tolist()
    none = scorer.score_all(images, texts).at(rows[:0], cols[:0])
    assert len(none.score) == 0
    unsure = [one.uncertainty is None for one in (aligned, picked, none)]
    assert set(unsure) == {raw["name"] != "vacsr"}
    if picked.uncertainty is None or aligned.uncertainty is None:
        return
    with torch.no_grad():
        v, t = made.embed_images(images).mean, made.embed_texts(texts).mean
        sigma = made.method.adapter.uncertainty(v[:, None], t[None])
    torch.testing.assert_close(picked.uncertainty, sigma[rows, cols], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(aligned.uncertainty, sigma.diagonal(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4", np.longdouble])
def test_numpy_arrays_of_any_kind_and_layout(scorer: PairScorer, dtype: Any) -> None:
    images, texts = (x.numpy().astype(dtype) for x in inputs(20, 20))
    tensors = [torch.from_numpy(x.astype(np.float32)) for x in (images, texts)]
    expected = scorer.score_all(*tensors).score
    read_only = images.copy()
    read_only.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(scorer.score_all(read_only, np.asfortranarray(texts)).score, expected)
        backwards = scorer.score_all(tensors[0].flip(0), tensors[1]).score
        assert torch.equal(scorer.score_all(images[::-1], texts).score, backwards)
    assert scorer.score_all(tensors[0].double(), tensors[1].double()).score.dtype == torch.float32


def spoiled(row: Any) -> Tensor:
    features = torch.ones(9, 6)
    features[5, 1] = features[7] = row
    return features


@pytest.mark.parametrize("call", ["score_all", "score_pairs"])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("features", "error", "words"),
    [
        (torch.ones(3, 9), ShapeMismatch, "have 9"),
        (torch.ones(6), ShapeMismatch, r"shape \[6\], expected \[N, D\]"),
        (np.ones((3, 2, 4)), ShapeMismatch, r"shape \[3, 2, 4\]"),
        (spoiled(torch.nan), DataError, "2 of 9 .*first in row 5 — "),
        (spoiled(-torch.inf).numpy(), DataError, "2 of 9 .*first in row 5 — "),
        (np.full((2, 6), 1e300), DataError, "2 of 2 .*infinite"),
        ([[1.0] * 6], UsageError, "pass a tensor or a numpy array"),
        (np.array([["a"] * 6]), UsageError, "pass a tensor or a numpy array"),
    ],
)
def test_features_that_cannot_be_scored(
    scorer: PairScorer, call: str, side: int, features: Any, error: type[Exception], words: str
) -> None:
    wrong: list[Any] = list(inputs(3, 3))
    wrong[side] = features
    with pytest.raises(error, match=words):
        getattr(scorer, call)(*wrong)


def test_topk_refuses_what_it_does_not_know(scorer: PairScorer) -> None:
    scores = scorer.score_all(*inputs())
    for direction in ("I2T", ""):
        with pytest.raises(UsageError, match="'i2t' or 't2i'"):
            scores.topk(3, direction=direction)  # type: ignore[arg-type]
    for k in (0, -1):
        for call in (scores.topk, scores.topk_both):
            with pytest.raises(UsageError, match="ask for topk"):
                call(k)
    assert scores.topk(np.int64(3)).index.shape == (IMAGES, 3)  # type: ignore[arg-type]


def pair_set(provenance: Provenance = Provenance()) -> PairSet:  # noqa: B008
    images, texts = inputs(3, 5)
    words = tuple(f"words {n}" for n in range(5))
    owner = torch.tensor([0, 0, 1, 2, 2])
    return PairSet(images, texts, ("im-a", "im-b", "im-c"), tuple("vwxyz"), owner, words, provenance=provenance)


def test_a_data_set_is_not_checked_again(scorer: PairScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pair_set()
    expected = scorer.score_all(pairs.images, pairs.texts).score
    monkeypatch.setattr("vacsr.scoring.scorer._checked_features", lambda *_, **__: pytest.fail("checked twice"))
    assert torch.equal(scorer.score_set(pairs).score, expected)


def test_embeddings_from_elsewhere_are_refused() -> None:
    scorer = PairScorer(model("vacsr", provenance=Provenance("clip:a", revision="1")), device="cpu")
    for other in (Provenance("clip:b", revision="1"), Provenance("clip:a", revision="2")):
        for call in (scorer.score_set, lambda pairs: scorer.score_named(pairs, "im-a", ["v"])):
            with pytest.raises(ProvenanceMismatch):
                call(pair_set(other))
    for same in (Provenance("clip:a", revision="1"), Provenance("clip:a"), Provenance()):
        assert scorer.score_set(pair_set(same)).score.shape == (3, 5)


# ------------------------------------------------------------------------------------------------------ pairs by name


@every_method
def test_named_pairs_are_the_matrix_entries(raw: dict[str, Any]) -> None:
    """Captions by id or by their words, in any order."""
    scorer, pairs = PairScorer(model(raw), device="cpu"), pair_set()
    named = scorer.score_named(pairs, "im-c", ["z", "words 0", "w", "z"])
    assert isinstance(named, PairScores)
    torch.testing.assert_close(named.score, scorer.score_set(pairs).score[2:, [4, 0, 1, 4]], atol=1e-5, rtol=1e-5)


def test_a_wrong_name_is_answered_with_the_nearest(scorer: PairScorer) -> None:
    with pytest.raises(DataError, match=r"no file or image id 'im-d' among 3 .did you mean 'im-"):
        scorer.score_named(pair_set(), "im-d", ["v"])
    for pairs in (pair_set(), replace(pair_set(), captions=None)):
        with pytest.raises(DataError, match=r"no caption id '%%' among 5 — .* such as 'v'"):
            scorer.score_named(pairs, "im-a", ["%%"])


# --------------------------------------------------------------------------------------------------------- 1 − cosine


@pytest.mark.parametrize("name", ["infonce", "sigmoid", "vse", "npc", "ncr", "bicro"])
def test_uncertainty_is_one_minus_the_mean_cosine_of_the_networks(name: str) -> None:
    made, pairs, rows, cols = model(name), pair_set(), torch.tensor([2, 0]), torch.tensor([1, 4])
    assert PairScorer(made, device="cpu").score_set(pairs).uncertainty(rows, cols) is None
    sigma = CosineDistanceScorer(made, device="cpu").score_set(pairs).uncertainty(rows, cols)
    cosines = []
    for network in made.networks:
        v = network.image_head(network.backbone.encode_images(pairs.images[rows]).values.squeeze(1))
        t = network.text_head(network.backbone.encode_texts(pairs.texts[cols]).values.squeeze(1))
        cosines.append(functional.cosine_similarity(v, t).detach())
    assert len(cosines) == (2 if name in ("ncr", "bicro") else 1)
    torch.testing.assert_close(sigma, 1 - torch.stack(cosines).mean(dim=0), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["vacsr", "pcme", "pcmepp"])
def test_a_method_that_does_not_score_by_a_cosine_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"cosine.*evaluate\.posthoc=none"):
        CosineDistanceScorer(model(name), device="cpu")


# ----------------------------------------------------------------------------------------------------------- devices


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(torch.device("meta")) == torch.device("meta")
    for present, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        assert choose_device("auto").type == kind
    with pytest.raises(EnvironmentProblem, match="device=cpu"):
        choose_device("cuda:0")
    with pytest.raises(UsageError, match="use auto, cpu or cuda"):
        choose_device("tpu")


@pytest.mark.parametrize("method", ["vacsr", "infonce"])
def test_members_disagree_and_their_vectors_stand_end_to_end(method: str) -> None:
    made, (images, texts) = model({"name": method, "members": 3}), inputs()
    scores = PairScorer(made, device="cpu").score_all(images, texts)
    rows, cols = torch.tensor([0, 4, 4]), torch.tensor([2, 0, 1])
    with torch.no_grad():
        v, t = made.embed_images(images), made.embed_texts(texts)
        expected = made.method.disagreement(Embedding(v.mean[rows]), Embedding(t.mean[cols]))
    torch.testing.assert_close(scores.at(rows, cols).disagreement, expected)
    vectors = scores.vectors()
    assert vectors.networks == 3
    torch.testing.assert_close(vectors.images, v.mean)
    likelihood = made.method.likelihood()
    assert scores.temperature() == (1.0 if likelihood is None else pytest.approx(1 / likelihood.scale))


def test_the_same_images_against_other_texts(scorer: PairScorer) -> None:
    images, texts = inputs()
    scores, other = scorer.score_all(images, texts), texts.flip(0)
    against = scores.against(other)
    assert against is not None
    torch.testing.assert_close(against.score, scores.score.flip(1))
    assert scores.against(["words"]) is None, "a model on features of unknown origin embeds no words"
    assert scores.disagreement(torch.tensor([0]), torch.tensor([0])) is None


@pytest.mark.parametrize("direction", ["i2t", "t2i"])
@pytest.mark.parametrize("name", ["vacsr", "pcme", "pcmepp", "daa", "infonce"])
def test_lists_of_own_items_have_the_scores_of_the_matrix(name: str, direction: Direction) -> None:
    """Also where the score of (v, t) is not that of (t, v)."""
    images, texts = inputs()
    scores = PairScorer(model(name), device="cpu").score_all(images, texts)
    matrix = scores.score if direction == "i2t" else scores.score.T
    generator = torch.Generator().manual_seed(3)
    queries = torch.randint(len(matrix), (5,), generator=generator)
    items = torch.randint(matrix.shape[1], (5, 7), generator=generator)
    expected = matrix[queries].gather(1, items)
    torch.testing.assert_close(scores.score_lists(queries, items, direction=direction), expected, atol=1e-5, rtol=1e-5)


def test_a_scorer_that_has_scored_can_be_copied() -> None:
    made = PairScorer(model("vacsr"), device="cpu", dtype=torch.bfloat16)
    images, texts = inputs()
    expected = made.score_all(images, texts).score
    assert torch.equal(copy.deepcopy(made).score_all(images, texts).score, expected)
