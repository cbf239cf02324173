from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig, HeadConfig
from vacsr.config.io import method_config
from vacsr.data.pairs import PairSet, Provenance
from vacsr.errors import DataError, EnvironmentProblem, ProvenanceMismatch, ShapeMismatch, UsageError
from vacsr.model import MatchingModel
from vacsr.provenance import UNKNOWN
from vacsr.scoring import PairScorer, choose_device

IMAGES, TEXTS = 150, 90  # three blocks of rows
METHODS: list[dict[str, Any]] = [
    {"name": "vacsr"},
    {"name": "vacsr", "adapter": {"mixing": "head"}},
    {"name": "vacsr", "adapter": {"trunk_norm": True, "decode": "argmax"}},
    {"name": "sigmoid"},
    {"name": "infonce"},
]
every_method = pytest.mark.parametrize("raw", METHODS, ids=str)


def build(raw: dict[str, Any], *, provenance: Provenance = UNKNOWN) -> MatchingModel:
    model = MatchingModel.build(
        method_config(raw),
        BackboneConfig(head=HeadConfig(dim=8)),
        image_dim=6,
        text_dim=4,
        provenance=provenance,
        seed=1,
    )
    images, texts = inputs()
    model.backbone.fit(SimpleNamespace(images=images, texts=texts))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


def inputs(images: int = IMAGES, texts: int = TEXTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(images, 6, generator=generator) + 2, torch.randn(texts, 4, generator=generator)


@torch.no_grad()
def dense(model: MatchingModel, images: Tensor, texts: Tensor) -> Tensor:
    return model.method.score(model.embed_images(images), model.embed_texts(texts))


def sorted_topk(scores: Tensor, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda j, row=row: (-row[j], j))[:k] for row in scores.tolist()]


@every_method
def test_lazy_scores_are_the_dense_ones(raw: dict[str, Any]) -> None:
    model, (images, texts) = build(raw), inputs()
    scores = PairScorer(model, device="cpu").score_all(images, texts)
    blocks = list(scores.blocks())
    assert len(blocks) > 1
    torch.testing.assert_close(scores.score, dense(model, images, texts), atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat(blocks), scores.score)
    assert torch.equal(torch.cat(list(scores.blocks())), scores.score)


def test_a_cached_matrix_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = PairScorer(build({"name": "vacsr"}), device="cpu")
    scores = scorer.score_all(*inputs())
    calls: list[int] = []
    inner = scorer.engine.block
    monkeypatch.setattr(scorer.engine, "block", lambda v, t: calls.append(len(v.mean)) or inner(v, t))
    whole = scores.score
    assert sum(calls) == IMAGES
    assert max(calls) < IMAGES
    assert scores.score is whole
    scores.topk(3)
    list(scores.blocks())
    assert sum(calls) == IMAGES


@every_method
@pytest.mark.parametrize("cached", [False, True])
def test_topk_is_the_full_sort(raw: dict[str, Any], cached: bool) -> None:
    images, texts = inputs()
    images[70:75], texts[40:44] = images[3], texts[2]  # exact ties, across blocks too
    scores = PairScorer(build(raw), device="cpu").score_all(images, texts)
    matrix = PairScorer(build(raw), device="cpu").score_all(images, texts).score
    if cached:
        _ = scores.score
    for direction, expected in (("i2t", matrix), ("t2i", matrix.T)):
        for k in (1, 10, 1000):
            got = scores.topk(k, direction=direction)  # type: ignore[arg-type]
            assert got.index.tolist() == sorted_topk(expected, k)
            assert torch.equal(got.score, expected.gather(1, got.index))


@every_method
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(("images", "texts"), [(IMAGES, TEXTS), (TEXTS, IMAGES), (0, 3), (3, 0), (0, 0)])
def test_topk_both_is_topk_twice(
    raw: dict[str, Any], images: int, texts: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = inputs(images, texts)
    x[70:75], y[40:44] = x[3:4], y[2:3]
    scorer = PairScorer(build(raw), device="cpu")
    scores, asked, stream = scorer.score_all(x, y), [], scorer.engine.stream
    expected = [(scores.topk(k), scores.topk(k, direction="t2i")) for k in (1, 10, 1000)]
    if cached:
        _ = scores.score
    monkeypatch.setattr(scorer.engine, "stream", lambda v, t: asked.append(1) or stream(v, t))
    for k, both in zip((1, 10, 1000), expected, strict=True):
        for got, right in zip(scores.topk_both(k), both, strict=True):
            assert torch.equal(got.index, right.index)
            assert torch.equal(got.score, right.score)
    assert len(asked) == (0 if cached else 3)  # one pass each


@every_method
def test_uncertainty_of_the_pairs_asked_for(raw: dict[str, Any]) -> None:
    model, (images, texts) = build(raw), inputs()
    scorer = PairScorer(model, device="cpu")
    scores = scorer.score_all(images, texts)
    rows = torch.randint(IMAGES, (9000,), generator=torch.Generator().manual_seed(0))  # more than one chunk
    cols = torch.randint(TEXTS, (9000,), generator=torch.Generator().manual_seed(1))
    got = scores.uncertainty(rows, cols)
    if raw["name"] != "vacsr":
        assert got is None
        return
    assert got is not None
    with torch.no_grad():
        v, t = model.embed_images(images).mean, model.embed_texts(texts).mean
        expected = model.method.adapter.uncertainty(v[:, None], t[None])[rows, cols]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert ((got > 0) & (got < 1)).all()


@every_method
def test_aligned_and_picked_pairs(raw: dict[str, Any]) -> None:
    model, (images, texts) = build(raw), inputs()
    scorer = PairScorer(model, device="cpu")
    matrix = dense(model, images, texts)
    rows = torch.randint(IMAGES, (9000,), generator=torch.Generator().manual_seed(0))
    cols = torch.randint(TEXTS, (9000,), generator=torch.Generator().manual_seed(1))
    lazy = scorer.score_all(images, texts)
    picked = scorer.score_at(lazy, rows=rows, cols=cols)
    torch.testing.assert_close(picked.score, matrix[rows, cols], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(picked.grade, model.method.grade(picked.score))
    aligned = scorer.score_pairs(images[:TEXTS], texts)
    torch.testing.assert_close(aligned.score, matrix.diagonal(), atol=1e-5, rtol=1e-5)
    assert ((aligned.grade > 0) & (aligned.grade < 1)).all()
    assert (aligned.uncertainty is None) == (picked.uncertainty is None) == (raw["name"] != "vacsr")
    if aligned.uncertainty is not None:
        every = torch.arange(TEXTS)
        torch.testing.assert_close(aligned.uncertainty, lazy.uncertainty(every, every))


def test_aligned_pairs_need_equal_counts() -> None:
    with pytest.raises(ShapeMismatch, match="150 and 90"):
        PairScorer(build({"name": "vacsr"}), device="cpu").score_pairs(*inputs())


@pytest.mark.parametrize("side", [0, 1])
def test_a_wrong_dimension_is_refused(side: int) -> None:
    wrong = list(inputs())
    wrong[side] = torch.ones(3, 9)
    with pytest.raises(ShapeMismatch, match="these have 9") as caught:
        PairScorer(build({"name": "vacsr"}), device="cpu").score_all(*wrong)
    assert caught.value.exit_code == 4


def test_scores_are_float32_whatever_comes_in() -> None:
    scorer, (images, texts) = PairScorer(build({"name": "vacsr"}), device="cpu"), inputs()
    exact = scorer.score_all(images, texts).score
    assert scorer.score_all(images.double(), texts.double()).score.dtype == torch.float32
    torch.testing.assert_close(scorer.score_all(images.double(), texts.double()).score, exact)
    low = PairScorer(build({"name": "vacsr"}), device="cpu", dtype=torch.bfloat16).score_all(images, texts).score
    assert low.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.02 * (exact.max() - exact.min())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4", np.longdouble])
def test_numpy_arrays_are_taken_too(dtype: Any) -> None:
    scorer = PairScorer(build({"name": "vacsr"}), device="cpu")
    images, texts = (x.numpy().astype(dtype) for x in inputs(20, 20))
    tensors = [torch.from_numpy(x.astype(np.float32)) for x in (images, texts)]
    expected = scorer.score_all(*tensors)
    assert torch.equal(scorer.score_all(images, texts).score, expected.score)
    assert torch.equal(scorer.score_pairs(images, texts).score, scorer.score_pairs(*tensors).score)
    assert torch.equal(scorer.embed_images(images).mean, expected.images.mean)
    assert torch.equal(scorer.embed_texts(texts).mean, expected.texts.mean)


def test_any_numpy_layout_and_no_warning() -> None:
    scorer, (images, texts) = PairScorer(build({"name": "vacsr"}), device="cpu"), inputs(20, 20)
    expected, image_array, text_array = scorer.score_all(images, texts).score, images.numpy(), texts.numpy()
    read_only = image_array.copy()
    read_only.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(scorer.score_all(read_only, np.asfortranarray(text_array)).score, expected)
        backwards = scorer.score_all(images.flip(0), texts).score
        assert torch.equal(scorer.score_all(image_array[::-1], text_array).score, backwards)
        with pytest.raises(DataError, match="1 of 20 images have NaN or infinite features, first in row 19"):
            scorer.score_all(np.vstack([image_array[:19].astype(float), np.full((1, 6), 1e300)]), texts)


ENTRIES: dict[str, Any] = {
    "score_all": lambda scorer, images, texts: scorer.score_all(images, texts),
    "score_pairs": lambda scorer, images, texts: scorer.score_pairs(images, texts),
    "embed": lambda scorer, images, texts: (scorer.embed_images(images), scorer.embed_texts(texts)),
}
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
both_sides = pytest.mark.parametrize(("side", "kind"), [(0, "image"), (1, "text")])
tensor_or_array = pytest.mark.parametrize("convert", [lambda x: x, lambda x: x.numpy()], ids=["torch", "numpy"])


@every_entry
@both_sides
@tensor_or_array
def test_a_wrong_number_of_dimensions_is_refused(entry: Any, side: int, kind: str, convert: Any) -> None:
    scorer = PairScorer(build({"name": "vacsr"}), device="cpu")
    for shape in ([], [6], [4], [3, 2, 4]):
        wrong = [convert(x) for x in inputs(3, 3)]
        wrong[side] = convert(torch.ones(shape))
        with pytest.raises(ShapeMismatch) as caught:
            entry(scorer, *wrong)
        assert f"{kind} features have shape {shape}, expected [N, D] — " in str(caught.value)


@every_entry
@both_sides
@tensor_or_array
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_features_that_are_not_finite_are_refused(entry: Any, side: int, kind: str, convert: Any, value: float) -> None:
    wrong = inputs(9, 9)
    wrong[side][5, 1] = wrong[side][7] = value
    with pytest.raises(DataError, match=f"2 of 9 {kind}s have NaN or infinite features, first in row 5 .*— "):
        entry(PairScorer(build({"name": "vacsr"}), device="cpu"), *map(convert, wrong))


def test_features_that_are_no_floats_are_refused() -> None:
    scorer, (images, texts) = PairScorer(build({"name": "vacsr"}), device="cpu"), inputs(3, 3)
    with pytest.raises(UsageError, match="image features are a list — pass a tensor or a numpy array"):
        scorer.score_all(images.tolist(), texts)
    with pytest.raises(DataError, match="text features are object, expected floats — "):
        scorer.score_all(images, texts.numpy().astype(object))


def test_a_data_set_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, pairs = PairScorer(build({"name": "vacsr"}), device="cpu"), pair_set(Provenance())
    expected = scorer.score_all(pairs.images, pairs.texts).score
    monkeypatch.setattr("vacsr.scoring.scorer._checked_features", lambda *_, **__: pytest.fail("checked twice"))
    assert torch.equal(scorer.score_set(pairs).score, expected)
    assert not scorer.score_set(pairs).score.requires_grad


@every_method
def test_scoring_has_no_dropout_and_no_gradient(raw: dict[str, Any]) -> None:
    model, (images, texts) = build(raw).train(), inputs()
    scorer = PairScorer(model, device="cpu")
    first = scorer.score_all(images, texts).score
    assert torch.equal(scorer.score_all(images, texts).score, first)
    assert not first.requires_grad


@pytest.mark.parametrize("images", [0, 3])
def test_no_texts_or_no_images(images: int) -> None:
    scorer = PairScorer(build({"name": "vacsr"}), device="cpu")
    texts = 3 - images
    assert scorer.score_all(*inputs(images, texts)).score.shape == (images, texts)


@every_method
@pytest.mark.parametrize(("images", "texts"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("cached", [False, True])
def test_topk_of_nothing_is_empty(raw: dict[str, Any], images: int, texts: int, cached: bool) -> None:
    scores = PairScorer(build(raw), device="cpu").score_all(*inputs(images, texts))
    if cached:
        _ = scores.score
    for direction, queries, candidates in (("i2t", images, texts), ("t2i", texts, images)):
        for k in (1, 2, 10):
            got = scores.topk(k, direction=direction)  # type: ignore[arg-type]
            assert got.score.shape == got.index.shape == (queries, min(k, candidates))
            assert (got.score.dtype, got.index.dtype) == (torch.float32, torch.int64)


def test_topk_refuses_what_it_does_not_know() -> None:
    scores = PairScorer(build({"name": "vacsr"}), device="cpu").score_all(*inputs())
    for direction in ("I2T", "t2t", ""):
        with pytest.raises(UsageError, match=r"use i2t .* or t2i"):
            scores.topk(3, direction=direction)  # type: ignore[arg-type]
    for k in (0, -1, 2.5, 1e6, "3", None):
        for call in (scores.topk, scores.topk_both):
            with pytest.raises(UsageError, match=f"ask for {call.__name__}"):
                call(k)  # type: ignore[operator]
    assert scores.topk(np.int64(3)).index.shape == (IMAGES, 3)  # type: ignore[arg-type]
    for m in (0, -7, 20.5):
        with pytest.raises(UsageError, match="use prefilter=30"):
            scores.topk(3, prefilter=m)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- from files


@every_method
def test_from_pretrained_is_bit_exact(raw: dict[str, Any], tmp_path: Path) -> None:
    model, (images, texts) = build(raw), inputs()
    before = PairScorer(model, device="cpu").score_pairs(images[:TEXTS], texts)
    model.save_pretrained(tmp_path / "model")
    for folder in (tmp_path, str(tmp_path / "model")):
        after = PairScorer.from_pretrained(folder, device="cpu").score_pairs(images[:TEXTS], texts)
        assert torch.equal(after.score, before.score)
        assert torch.equal(after.grade, before.grade)
        if before.uncertainty is not None:
            assert torch.equal(after.uncertainty, before.uncertainty)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError) as caught:
            PairScorer.from_pretrained(folder)
        assert caught.value.exit_code == 4


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_file(name: str, tmp_path: Path) -> None:
    build({"name": "vacsr"}).save_pretrained(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=name):
        PairScorer.from_pretrained(tmp_path)


def pair_set(provenance: Provenance) -> PairSet:
    images, texts = inputs(3, 5)
    return PairSet(images, texts, ("a", "b", "c"), tuple("vwxyz"), torch.tensor([0, 0, 1, 2, 2]), provenance=provenance)


def test_embeddings_from_elsewhere_are_refused(tmp_path: Path) -> None:
    build({"name": "vacsr"}, provenance=Provenance("clip:a", revision="1")).save_pretrained(tmp_path)
    scorer = PairScorer.from_pretrained(tmp_path, device="cpu")
    for other in (Provenance("clip:b", revision="1"), Provenance("clip:a", revision="2")):
        with pytest.raises(ProvenanceMismatch) as caught:
            scorer.score_set(pair_set(other))
        assert caught.value.exit_code == 4
    for same in (Provenance("clip:a", revision="1"), Provenance("clip:a"), Provenance()):
        pairs = pair_set(same)
        assert torch.equal(scorer.score_set(pairs).score, scorer.score_all(pairs.images, pairs.texts).score)


# ----------------------------------------------------------------------------------------------------------- devices


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(torch.device("meta")) == torch.device("meta")
    for present, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        assert choose_device("auto").type == kind
    with pytest.raises(EnvironmentProblem, match="device=cpu") as caught:
        choose_device("cuda:0")
    assert caught.value.exit_code == 3
