"""mteb's own evaluation of vacsr's models on drawn pictures, beside vacsr's evaluation and a plain computation."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vacsr
from vacsr import BackboneConfig, HeadConfig, PairScorer, TrainConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import MissingExtra, UsageError
from vacsr.mteb import VacsrEncoder, VacsrReranker

pytestmark = pytest.mark.slow  # importing mteb takes seconds
QUIET = {"encode_kwargs": {"batch_size": 5, "show_progress_bar": False}, "show_progress_bar": False}


@pytest.fixture(scope="module")
def pairs() -> PhotoSet:
    """12 pictures with two captions each."""
    loaded = load_pairs("scenes:images=12,held_out=4,per_image=2,size=32", split="train")
    assert isinstance(loaded, PhotoSet)
    return loaded


@pytest.fixture(scope="module", params=["vacsr", "pcmepp"])
def folder(request: pytest.FixtureRequest, pairs: PhotoSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose score is no cosine; pcmepp's items have variances too."""
    tiny = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
    config = TrainConfig(epochs=3, batch_size=12, lr=0.003, device="cpu")
    run = vacsr.fit(request.param, pairs, config, backbone=tiny, progress=False)
    for name, weight in run.model.named_parameters():
        if "variance" in name:  # after three epochs all items have about the same
            weight.data += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("model") / request.param
    run.model.save_pretrained(path)
    return path


def facts(name: str, kind: str, category: str) -> Any:
    """What mteb wants to know of a task."""
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata(
        name=name, type=kind, category=category, description="Drawn pictures.", modalities=["image", "text"],
        dataset={"path": "drawn/pictures", "revision": "1"}, eval_splits=["test"], eval_langs=["eng-Latn"],
        main_score="text_acc" if kind == "Compositionality" else "ndcg_at_10", bibtex_citation="",
    )  # fmt: skip


def retrieval(pairs: PhotoSet, category: str) -> Any:
    """The pairs as a task of mteb: t2i or i2t."""
    pytest.importorskip("mteb", reason="needs the extra mteb: pip install 'vacsr[mteb]'")
    import datasets
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    pictures = [pairs.photos.open(row) for row in range(len(pairs.photos))]
    images = datasets.Dataset.from_dict({"id": list(pairs.image_ids), "image": pictures})
    texts = datasets.Dataset.from_dict({"id": list(pairs.caption_ids), "text": list(pairs.captions)})
    named = [(pairs.image_ids[row], name) for row, name in zip(pairs.caption_image, pairs.caption_ids, strict=True)]
    relevant: dict[str, dict[str, int]] = {}
    for image, text in named:
        query, item = (text, image) if category == "t2i" else (image, text)
        relevant.setdefault(query, {})[item] = 1
    queries, corpus = (texts, images) if category == "t2i" else (images, texts)

    class Drawn(AbsTaskRetrieval):
        metadata = facts(f"Drawn{category.upper()}", "Any2AnyRetrieval", category)

        def load_data(self, num_proc: int | None = None, **_: Any) -> None:
            parts = {"queries": queries, "corpus": corpus, "relevant_docs": relevant, "top_ranked": None}
            self.dataset = {"default": {"test": parts}}
            self.data_loaded = True

    return Drawn()


def run(model: Any, task: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """The scores that mteb wrote to its JSON."""
    import mteb

    mteb.evaluate(model, task, cache=mteb.ResultCache(folder), **QUIET, **options)
    meta = model.mteb_model_meta
    file = folder / "results" / meta.name.replace("/", "__") / meta.revision / f"{task.metadata.name}.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["task_name"] == task.metadata.name
    return dict(written["scores"]["test"][0])


def ndcg(scores: np.ndarray, relevant: np.ndarray, k: int = 10) -> float:
    """Of rows of scores and their relevant columns, by the definition."""
    gains = 1 / np.log2(np.arange(2, k + 2))
    values = []
    for row, right in zip(scores, relevant, strict=True):
        hits = right[np.argsort(-row, kind="stable")[:k]]
        values.append((hits * gains[: len(hits)]).sum() / gains[: min(k, right.sum())].sum())
    return float(np.mean(values))


def by_query(pairs: PhotoSet, scores: torch.Tensor, category: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores [I, T] and what is relevant, one row per query."""
    relevant = np.arange(len(pairs.image_ids))[:, None] == pairs.caption_image.numpy()[None]
    found = scores.double().numpy()
    return (found.T, relevant.T) if category == "t2i" else (found, relevant)


@pytest.mark.parametrize("category", ["t2i", "i2t"])
def test_two_stages_of_retrieval(folder: Path, pairs: PhotoSet, category: str, tmp_path: Path) -> None:
    scorer, task = PairScorer.from_pretrained(folder, device="cpu"), retrieval(pairs, category)
    exact = scorer.score_set(pairs)
    encoder = VacsrEncoder(folder, device="cpu")
    assert encoder.mteb_model_meta.name == f"vacsr/{folder.name}"
    first = run(encoder, task, tmp_path, prediction_folder=tmp_path)
    cosines = exact.images.mean @ exact.texts.mean.T
    scores, relevant = by_query(pairs, cosines, category)
    assert first["ndcg_at_10"] == pytest.approx(ndcg(scores, relevant), abs=1e-4)
    hits = relevant[np.arange(len(scores)), scores.argmax(axis=1)]
    assert first["hit_rate_at_1"] == pytest.approx(hits.mean(), abs=1e-4)

    # All candidates are reranked, so the result is that of vacsr's own evaluation.
    reranker = VacsrReranker(scorer, name=f"vacsr/{folder.name}")
    every = run(reranker, task.convert_to_reranking(tmp_path, top_k=scores.shape[1]), tmp_path)
    scores, relevant = by_query(pairs, exact.score, category)
    assert every["ndcg_at_10"] == pytest.approx(ndcg(scores, relevant), abs=1e-4)
    assert every["ndcg_at_10"] != pytest.approx(first["ndcg_at_10"], abs=1e-3)
    report = vacsr.evaluate_retrieval(scorer, pairs).to_dict()["results"][0][category]
    assert 100 * every["hit_rate_at_1"] == pytest.approx(report["r1"], abs=1e-2)


def test_few_candidates_are_reranked_by_pair_scores(folder: Path, pairs: PhotoSet, tmp_path: Path) -> None:
    scorer, task = PairScorer.from_pretrained(folder, device="cpu"), retrieval(pairs, "t2i")
    run(VacsrEncoder(scorer), task, tmp_path, prediction_folder=tmp_path)
    again = run(VacsrReranker(scorer), task.convert_to_reranking(tmp_path, top_k=3), tmp_path)
    exact = scorer.score_set(pairs)
    cosines, relevant = by_query(pairs, exact.images.mean @ exact.texts.mean.T, "t2i")
    scores, _ = by_query(pairs, exact.score, "t2i")
    kept = np.argsort(np.argsort(-cosines, axis=1), axis=1) < 3
    assert again["ndcg_at_3"] == pytest.approx(ndcg(np.where(kept, scores, -np.inf), relevant, k=3), abs=1e-4)


def test_compositionality(clip_checkpoint: Path, pairs: PhotoSet, tmp_path: Path) -> None:
    """Two pictures and two captions per sample, as in Winoground, with encoders that nothing was trained on."""
    pytest.importorskip("mteb", reason="needs the extra mteb: pip install 'vacsr[mteb]'")
    import datasets
    from mteb.abstasks.image import AbsTaskImageTextPairClassification

    rows = [{"a": 2 * n, "b": 2 * n + 1} for n in range(6)]
    columns = {f"image_{side}": [pairs.photos.open(row[side]) for row in rows] for side in "ab"}
    columns |= {f"text_{side}": [pairs.captions[2 * row[side]] for row in rows] for side in "ab"}
    drawn = datasets.DatasetDict(test=datasets.Dataset.from_dict(columns))

    class Pairs(AbsTaskImageTextPairClassification):
        metadata = facts("DrawnPairs", "Compositionality", "i2t")
        images_column_names = ("image_a", "image_b")
        texts_column_names = ("text_a", "text_b")

        def load_data(self, num_proc: int | None = None, **_: Any) -> None:
            self.dataset, self.data_loaded = drawn, True

    spec = f"clip:{clip_checkpoint}"
    scores = run(VacsrEncoder(spec, device="cpu"), Pairs(), tmp_path)
    scorer = PairScorer.from_pretrained(spec, device="cpu")
    right = []
    for row in rows:
        pictures = [pairs.photos.open(row[side]) for side in "ab"]
        square = scorer.score_all(pictures, [pairs.captions[2 * row[side]] for side in "ab"]).score
        by_image = bool(square[0, 0] > square[0, 1] and square[1, 1] > square[1, 0])
        right.append((by_image, bool(square[0, 0] > square[1, 0] and square[1, 1] > square[0, 1])))
    text, image = np.mean(right, axis=0)
    assert scores["text_acc"] == pytest.approx(text, abs=1e-4)
    assert scores["image_acc"] == pytest.approx(image, abs=1e-4)
    assert scores["accuracy"] == pytest.approx(np.mean([all(one) for one in right]), abs=1e-4)


def test_similarities_are_cosines_of_whatever_vectors_mteb_made(folder: Path) -> None:
    """It may average them, as it does with several views of a class."""
    pytest.importorskip("mteb", reason="needs the extra mteb: pip install 'vacsr[mteb]'")
    encoder, one, other = VacsrEncoder(folder, device="cpu"), torch.randn(3, 8), torch.randn(3, 8)
    expected = torch.nn.functional.cosine_similarity(one[:, None], other[None], dim=-1)
    torch.testing.assert_close(encoder.similarity(one, other.numpy()), expected)
    torch.testing.assert_close(encoder.similarity_pairwise(one, other), expected.diagonal())


def test_items_are_embedded_a_few_at_a_time(folder: Path, pairs: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mteb", reason="needs the extra mteb: pip install 'vacsr[mteb]'")
    encoder, sizes = VacsrEncoder(folder, device="cpu"), list[int]()
    embed = encoder.scorer.embed_texts
    monkeypatch.setattr("vacsr.mteb._CHUNK", 5)
    monkeypatch.setattr(encoder.scorer, "embed_texts", lambda some: sizes.append(len(some)) or embed(some))
    batches = [{"text": list(pairs.captions[start : start + 2])} for start in range(0, 14, 2)]
    vectors = encoder.encode(batches, task_metadata=None, hf_split="test", hf_subset="default")
    assert (sizes, len(vectors)) == ([6, 6, 2], 14)


def test_other_weights_are_another_revision(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("mteb", reason="needs the extra mteb: pip install 'vacsr[mteb]'")
    first, same = VacsrEncoder(folder, device="cpu"), VacsrReranker(folder, device="cpu")
    assert first.mteb_model_meta.revision == same.mteb_model_meta.revision
    assert first.mteb_model_meta.name != same.mteb_model_meta.name  # neither takes the other's stored results
    changed = PairScorer.from_pretrained(folder, device="cpu")
    next(changed.model.parameters()).data.add_(1.0)
    assert VacsrEncoder(changed).mteb_model_meta.revision != first.mteb_model_meta.revision


def test_what_cannot_be_evaluated(folder: Path, pairs: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mteb", reason="needs the extra mteb: pip install 'vacsr[mteb]'")
    import datasets
    from torch.utils.data import DataLoader

    names = {"task_metadata": None, "hf_split": "test", "hf_subset": "default"}
    scorer = PairScorer.from_pretrained(folder, device="cpu")
    texts = DataLoader(datasets.Dataset.from_dict({"id": ["a", "b"], "text": ["a dog", "a cat"]}), batch_size=2)
    with pytest.raises(UsageError, match="VacsrEncoder"):
        VacsrReranker(scorer).predict(texts, texts, **names)
    both = [{"image": [pairs.photos.open(0)], "text": ["a dog"]}]
    with pytest.raises(UsageError, match="image and text"):
        VacsrEncoder(scorer).encode(both, **names)
    data = load_pairs("synthetic:images=20", split="train")
    features = vacsr.fit("infonce", data, TrainConfig(epochs=1, batch_size=16, device="cpu"), progress=False)
    with pytest.raises(UsageError, match="cached features"):
        VacsrEncoder(PairScorer(features.model, device="cpu"))
    monkeypatch.setitem(sys.modules, "mteb.models", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[mteb\]"):
        VacsrEncoder(folder)
