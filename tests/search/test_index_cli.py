"""`vacsr index`: a data set's images go in once, stops cost a batch at most, and other models are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import load_pairs
from vacsr.errors import DataError, UsageError
from vacsr.scoring import PairScorer
from vacsr.search import embedding_provenance, model_digest, open_index
from vacsr.search.exact import ExactIndex
from vacsr.search.filling import Filled, fill_index

Command = Callable[..., Any]
"""The fixture `vacsr` of conftest.py."""
SPEC = "synthetic:images=30,held_out=10,per_image=2"
PHOTOS = "scenes:images=6,held_out=2,per_image=2,size=32"
TRAIN = TrainConfig(epochs=1, batch_size=8, device="cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: on features, the same with another seed, with variances, and on photos."""
    root, small = tmp_path_factory.mktemp("models"), BackboneConfig(head=HeadConfig(dim=8))
    features, photos = load_pairs(SPEC, split="train"), load_pairs(PHOTOS, split="train")
    tiny = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
    kinds = {
        "one": fit("vacsr", features, TRAIN, backbone=small),
        "other": fit("vacsr", features, TRAIN.model_copy(update={"seed": 1}), backbone=small),
        "variance": fit("pcmepp", features, TRAIN, backbone=small),
        "towers": fit("sigmoid", photos, TRAIN.model_copy(update={"batch_size": 2}), backbone=tiny),
    }
    for name, run in kinds.items():
        run.model.save_pretrained(root / name)
    return {name: root / name for name in kinds}


def test_features_go_in_and_are_found(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    spec = f"exact:{tmp_path / 'i'}"
    answer = vacsr("index", "add", spec, "--run", models["one"], "--pairs", SPEC, "--batch", 7, "--device", "cpu")
    assert (answer.code, answer.out) == (0, f"{spec}\n")
    pairs = load_pairs(SPEC, split="all")
    count = len(pairs.image_ids)
    assert f"added {count}, replaced 0, left 0" in answer.err
    assert "images/s" in answer.err
    scorer = PairScorer.from_pretrained(models["one"], device="cpu")
    vectors = scorer.embed_images(pairs.images).mean
    found = open_index(spec, provenance=embedding_provenance(scorer.model)).search(vectors, 1)
    assert [ids[0] for ids in found.ids] == list(pairs.image_ids)
    torch.testing.assert_close(found.vectors[:, 0], vectors, atol=1e-6, rtol=0)
    assert found.metadata[0][0]["source"] == SPEC
    words = [c for c, row in zip(pairs.captions or (), pairs.caption_image.tolist(), strict=False) if row == 0]
    assert found.metadata[0][0]["captions"] == words


def test_the_same_command_leaves_what_is_there_unless_told(
    vacsr: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    spec = f"exact:{tmp_path / 'i'}"
    add = ("index", "add", spec, "--run", models["one"], "--pairs", SPEC, "--device", "cpu")
    assert vacsr(*add, "--split", "train", "--dtype", "float16").code == 0
    assert len(open_index(spec)) == 30
    answer = vacsr(*add)
    assert "replaced 0, left 30 that were there" in answer.err
    total = len(open_index(spec))
    assert f"added {total - 30}," in answer.err
    assert f"added 0, replaced {total}, left 0" in vacsr(*add, "--replace").err
    assert vacsr(*add, "--dtype", "float32").refused(2, "keeps vectors as float16")


def test_a_stop_costs_one_batch(models: dict[str, Path], tmp_path: Path) -> None:
    scorer, pairs = PairScorer.from_pretrained(models["one"], device="cpu"), load_pairs(SPEC, split="train")
    index = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    told: list[Filled] = []

    def stop(done: Filled) -> None:
        told.append(done)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_index(index, scorer, pairs, batch=4, committed=stop)
    assert [done.added for done in told] == [4, 8, 12]
    assert sum(open_index(f"exact:{tmp_path / 'i'}").known(pairs.image_ids)) == 12
    assert fill_index(index, scorer, pairs, batch=4) == Filled(added=18, skipped=12, of=30)
    with pytest.raises(UsageError, match="batch is 0"):
        fill_index(index, scorer, pairs, batch=0)


def test_an_id_from_another_source_is_refused_unless_replaced(models: dict[str, Path], tmp_path: Path) -> None:
    scorer, pairs = PairScorer.from_pretrained(models["one"], device="cpu"), load_pairs(SPEC, split="train")
    index = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    index.add(pairs.image_ids[:1], torch.ones(1, 8))  # from nobody knows where
    assert fill_index(index, scorer, pairs, source="one").skipped == 1
    with pytest.raises(DataError, match=f"'{pairs.image_ids[1]}' is in the index from 'one'.* 'two'.*--replace"):
        fill_index(index, scorer, pairs, source="two")
    assert fill_index(index, scorer, pairs, source="one").skipped == fill_index(index, scorer, pairs).skipped == 30
    assert fill_index(index, scorer, pairs, source="two", replace=True).replaced == 30
    assert {facts["source"] for facts in index.search(torch.ones(1, 8), 99).metadata[0]} == {"two"}


def test_the_index_is_closed_after_an_error(
    vacsr: Command, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, closed = f"exact:{tmp_path / 'i'}", list[ExactIndex]()
    add = ("index", "add", spec, "--run", models["one"], "--device", "cpu", "--pairs")
    assert vacsr(*add, SPEC).code == 0
    monkeypatch.setattr(ExactIndex, "close", lambda self: closed.append(self))
    assert vacsr(*add, SPEC.replace("images=30", "images=31")).refused(4, "--replace")
    assert len(closed) == 1
    assert vacsr("index", "rm", spec, "none").refused(4, "none of these ids")
    assert len(closed) == 2


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_photos_are_embedded_as_the_scorer_does(
    vacsr: Command, models: dict[str, Path], tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vacsr.search.filling._PHOTOS", {"cpu": 2})
    spec = f"exact:{tmp_path / 'i'}"
    add = ("index", "add", spec, "--run", models["towers"], "--pairs", PHOTOS, "--batch", batch, "--device", "cpu")
    assert vacsr(*add, "--skip").code == 0
    pairs = load_pairs(PHOTOS, split="all")
    scorer = PairScorer.from_pretrained(models["towers"], device="cpu")
    mean = scorer.score_set(pairs).images.mean
    found = open_index(spec).search(torch.eye(8)[:1], 1000)
    assert sorted(found.ids[0]) == sorted(pairs.image_ids)
    for name, vector, facts in zip(found.ids[0], found.vectors[0], found.metadata[0], strict=True):
        row = pairs.image_ids.index(name)
        torch.testing.assert_close(vector, mean[row], atol=1e-5, rtol=0)
        assert facts["source"] == pairs.photos.name(row)  # type: ignore[union-attr]
        assert len(facts["captions"]) == 2


def test_what_does_not_fit_is_refused_and_nothing_is_made(
    vacsr: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    spec, index = f"exact:{tmp_path / 'i'}", tmp_path / "i"

    def add(model: str, pairs: str) -> Any:
        return vacsr("index", "add", spec, "--run", models[model], "--pairs", pairs, "--device", "cpu")

    assert add("towers", SPEC).refused(4, "the model reads photos")
    assert add("one", PHOTOS).refused(4, "vacsr embed")
    assert add("variance", SPEC).refused(2, "pcmepp", "variance", "vacsr")
    assert not index.exists()
    assert vacsr("index", "info", spec).refused(4, "vacsr index add")
    assert vacsr("index", "rm", spec, "a").refused(4, "vacsr index add")
    assert add("one", SPEC).code == 0
    assert add("other", SPEC).refused(4, "another model, or other weights")
    assert vacsr("index", "add", "i", "--run", models["one"], "--pairs", SPEC).refused(2, "exact:FOLDER")


def test_rm_and_info(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    spec = f"exact:{tmp_path / 'i'}"
    vacsr("index", "add", spec, "--run", models["one"], "--pairs", SPEC, "--split", "train", "--device", "cpu")
    first = load_pairs(SPEC, split="train").image_ids[0]
    answer = vacsr("index", "rm", spec, first, "no such")
    assert (answer.code, answer.out) == (0, "")
    assert "removed 1, 1 were not there, first 'no such'; 29 in the index" in answer.err
    assert vacsr("index", "rm", spec, first).refused(4, first, "nothing was removed")
    said = json.loads(vacsr("index", "info", spec, "--json").out)
    model = PairScorer.from_pretrained(models["one"], device="cpu").model
    expected = {"schema": 1, "kind": "exact", "vectors": 29, "dim": 8, "dtype": "float32", "dead": 1, "parts": 1}
    assert expected.items() <= said.items()
    assert said["provenance"] == embedding_provenance(model)
    plain = vacsr("index", "info", spec).out.splitlines()
    assert ["vectors", "29"] in [line.split() for line in plain]


def test_provenance_follows_what_embeds_and_nothing_else(models: dict[str, Path]) -> None:
    one, again, other = (PairScorer.from_pretrained(models[n], device="cpu").model for n in ("one", "one", "other"))
    assert embedding_provenance(one) == embedding_provenance(again)
    assert model_digest(one) == model_digest(again)
    assert embedding_provenance(one) != embedding_provenance(other)
    with torch.no_grad():
        next(again.method.parameters()).add_(1)  # type: ignore[attr-defined]
    assert embedding_provenance(one) == embedding_provenance(again)
    assert model_digest(one) != model_digest(again)
    with torch.no_grad():
        next(again.image_head.parameters()).add_(1)
    assert embedding_provenance(one) != embedding_provenance(again)


def test_the_index_is_the_default_kind(tmp_path: Path) -> None:
    assert isinstance(open_index(f"exact:{tmp_path}", dim=2, create=True), ExactIndex)
