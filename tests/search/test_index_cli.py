"""`vacsr index`: images and captions go in once, changes are seen, stops cost a batch, other models are refused."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import PairSet, load_pairs
from vacsr.data.listed import ListedPhotos
from vacsr.data.photos import ArrayPhotos, Photos
from vacsr.data.sources import FilePhotos, JoinedPhotos, TarMember, TarPhotos, ZipPhotos
from vacsr.errors import DataError, UsageError
from vacsr.scoring import PairScorer
from vacsr.search import embedding_provenance, model_digest, open_index
from vacsr.search.exact import ExactIndex
from vacsr.search.filling import Filled, fill_index
from vacsr.search.marks import photo_mark
from vacsr.search.sources import noted_spec

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


def test_captions_go_in_and_are_found(vacsr: Command, models: dict[str, Path], tmp_path: Path) -> None:
    for model, pairs_spec in (("one", SPEC), ("towers", PHOTOS)):
        spec = f"exact:{tmp_path / model}"
        add = ("index", "add", spec, "--run", models[model], "--pairs", pairs_spec, "--device", "cpu", "--texts")
        answer = vacsr(*add, "--batch", 5)
        pairs = load_pairs(pairs_spec, split="all")
        assert f"added {len(pairs)}, replaced 0, left 0" in answer.err
        assert "texts/s" in answer.err
        assert f"added 0, replaced 0, left {len(pairs)} that were there" in vacsr(*add).err
        scorer = PairScorer.from_pretrained(models[model], device="cpu")
        truth = scorer.score_set(pairs).texts.mean
        index = open_index(spec, provenance=embedding_provenance(scorer.model, "texts"))
        assert index.holds == "texts"
        found = index.get(pairs.caption_ids)
        torch.testing.assert_close(
            torch.stack([found[name].vector for name in pairs.caption_ids]), truth, atol=1e-5, rtol=0
        )
        first = found[pairs.caption_ids[0]].metadata
        assert first["image"] == pairs.image_ids[int(pairs.caption_image[0])]
        assert first["text"] == (pairs.captions[0] if pairs.captions else "")
        assert vacsr(*add[:-1]).refused(4, "holds texts, these are images")


def draw_photos(folder: Path, **colours: int) -> None:
    """Plain squares, with a caption each."""
    folder.mkdir(exist_ok=True)
    for name, grey in colours.items():
        Image.new("RGB", (40, 40), (grey, grey // 2, 255 - grey)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a square named {name}", encoding="utf-8")


def test_changed_photos_are_embedded_again_and_absent_ones_go_when_asked(
    vacsr: Command, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, spec = tmp_path / "photos", f"exact:{tmp_path / 'i'}"
    draw_photos(photos, a=0, b=60, c=120, d=250)
    monkeypatch.chdir(tmp_path)
    add = ("index", "add", spec, "--run", models["towers"], "--pairs", "folder:photos", "--device", "cpu")
    assert vacsr(*add).code == 0
    before = open_index(spec).get(["a.png", "b.png"])
    assert before["a.png"].metadata["source"] == str(photos / "a.png")
    draw_photos(photos, b=200)
    os.utime(photos / "b.png", ns=(1, 1))  # as old a file as can be, put in its place
    (photos / "c.png").unlink()
    (photos / "c.txt").unlink()
    monkeypatch.chdir(photos)
    answer = vacsr(*add[:-3], f"folder:{photos}", *add[-2:])
    assert "added 0, replaced 1, left 2 that were there; " in answer.err
    assert "4 in the index" in answer.err
    after = open_index(spec).get(["a.png", "b.png"])
    assert torch.equal(after["a.png"].vector, before["a.png"].vector)
    assert not torch.equal(after["b.png"].vector, before["b.png"].vector)
    answer = vacsr(*add[:-3], f"folder:{photos}", *add[-2:], "--prune")
    assert "added 0, replaced 0, left 3 that were there, removed 1 that are gone" in answer.err
    assert open_index(spec).known(["a.png", "c.png"]) == [True, False]
    assert open_index(spec).sources == (f"folder:{photos}",)


def test_pruning_keeps_other_sources_and_refuses_what_looks_like_a_mistake(
    vacsr: Command, models: dict[str, Path], tmp_path: Path
) -> None:
    photos, other, spec = tmp_path / "photos", tmp_path / "other", f"exact:{tmp_path / 'i'}"
    draw_photos(photos, a=0, b=60, c=120)
    draw_photos(other, x=9)

    def add(folder: Path, *more: str) -> Any:
        pairs = ("--pairs", f"folder:{folder}", "--device", "cpu")
        return vacsr("index", "add", spec, "--run", models["towers"], *pairs, *more)

    assert add(other).code == 0
    assert add(photos).code == 0
    open_index(spec).add(["mine"], torch.ones(1, 8))
    for name in ("a", "b"):
        for kind in ("png", "txt"):
            (photos / f"{name}.{kind}").rename(photos / f"{name}2.{kind}")
    assert add(photos, "--prune").refused(2, "2 of the 3 items", f"folder:{photos}", "'a.png'", "--yes")
    assert open_index(spec).known(["a.png", "a2.png"]) == [True, False]
    assert add(photos, "--yes").refused(2, "--prune")
    assert "added 2, replaced 0, left 1 that were there, removed 2 that are gone" in add(photos, "--prune", "--yes").err
    found = open_index(spec)
    assert sorted(name for name, _ in found.records()) == ["a2.png", "b2.png", "c.png", "mine", "x.png"]
    assert found.sources == (f"folder:{other}", f"folder:{photos}")


def test_a_split_is_pruned_alone_or_with_all(models: dict[str, Path], tmp_path: Path) -> None:
    scorer, pairs = PairScorer.from_pretrained(models["one"], device="cpu"), load_pairs(SPEC, split="train")
    index = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    assert isinstance(pairs, PairSet)
    first, second, third = pairs.subset(range(10)), pairs.subset(range(10, 20)), pairs.subset(range(20, 30))
    fill_index(index, scorer, first, source="csv:/a.csv,split=train")
    fill_index(index, scorer, second, source="csv:/a.csv,split=dev")
    fill_index(index, scorer, third, source="csv:/b.csv")
    kept = pairs.subset([0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14])
    done = fill_index(index, scorer, kept.subset(range(7)), source="csv:/a.csv,split=train", prune=True)
    assert (done.removed, len(index)) == (3, 27)
    done = fill_index(index, scorer, kept, source="csv:/a.csv", prune=True)
    assert (done.skipped, done.removed, len(index)) == (12, 5, 22)
    assert all(index.known([*kept.image_ids, *third.image_ids]))


def test_changed_features_and_captions_are_embedded_again(models: dict[str, Path], tmp_path: Path) -> None:
    scorer, pairs = PairScorer.from_pretrained(models["one"], device="cpu"), load_pairs(SPEC, split="train")
    assert isinstance(pairs, PairSet)
    images = open_index(f"exact:{tmp_path / 'i'}", dim=8, create=True)
    texts = open_index(f"exact:{tmp_path / 't'}", dim=8, create=True)
    fill_index(images, scorer, pairs, source="csv:/a.csv")
    fill_index(texts, scorer, pairs, source="csv:/a.csv", texts=True)
    moved, words = pairs.caption_image.clone(), list(pairs.captions or [""] * len(pairs))
    moved[0] = 1 - moved[0]
    words[5] = "other words"
    new_images, new_texts = pairs.images.clone(), pairs.texts.clone()
    new_images[3] += 1
    new_texts[7] += 1
    new = replace(
        pairs,
        images=new_images,
        texts=new_texts,
        caption_image=moved,
        captions=tuple(words) if pairs.captions else None,
    )
    assert fill_index(images, scorer, new, source="csv:/a.csv").replaced == 1
    assert fill_index(texts, scorer, new, source="csv:/a.csv", texts=True).replaced == (3 if pairs.captions else 2)
    assert texts.get([pairs.caption_ids[0]])[pairs.caption_ids[0]].metadata["image"] == pairs.image_ids[int(moved[0])]


def test_each_kind_of_photos_has_a_mark_that_changes_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"one")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("a.jpg", b"one")
        archive.writestr("b.jpg", b"two")
    (tmp_path / "s.tar").write_bytes(b"shard")
    pixels = np.zeros((2, 2, 2, 3), np.uint8)
    pixels[1, 0, 0, 0] = 1
    files = FilePhotos(tmp_path, ("a.jpg", "none.jpg"))
    members = (TarMember(0, "a", 0, 3), TarMember(0, "b", 512, 3))
    kinds: list[Photos] = [
        files,
        ZipPhotos(tmp_path / "z.zip", ["a.jpg", "b.jpg"]),
        TarPhotos((tmp_path / "s.tar",), members),
        ArrayPhotos(pixels, ("a", "b")),
        JoinedPhotos((files,), ((0, 0), (0, 1))),
    ]
    assert all(photo_mark(photos, 0) not in ("", photo_mark(photos, 1)) for photos in kinds)
    before = photo_mark(files, 0), photo_mark(kinds[2], 0)
    assert before[0] == photo_mark(kinds[4], 0)
    for name in ("a.jpg", "s.tar"):
        os.utime(tmp_path / name, ns=(5, 5))
    assert (photo_mark(files, 0) == before[0], photo_mark(kinds[2], 0) == before[1]) == (False, False)
    assert photo_mark(files, 1) == photo_mark(ListedPhotos(("a.jpg",)), 0) == ""


@pytest.mark.parametrize(
    ("spec", "split", "noted"),
    [
        ("folder:photos", None, "folder:{here}/photos"),
        ("folder:./photos/", "dev", "folder:{here}/photos,split=dev"),
        ("features:a,text=t,captions=c", "all", "features:{here}/a,captions={here}/c,text={here}/t"),
        ("coco:/c,split=val,captions=5,images=i", None, "coco:/c,captions=5,images={here}/i,split=val"),
        ("csv:p.csv,root=../r", "test", "csv:{here}/p.csv,root={up}/r,split=test"),
        ("shards:d/{{00..11}}.tar", None, "shards:{here}/d/{{00..11}}.tar"),
        ("scenes:images=6", "dev", "scenes:images=6,split=dev"),
    ],
)
def test_a_noted_source_means_the_same_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, split: str | None, noted: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = noted_spec(spec.format(), split=split)
    assert found == noted.format(here=tmp_path, up=tmp_path.parent)
    monkeypatch.chdir("/")
    assert noted_spec(found) == found


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_photos_are_embedded_as_the_scorer_does(
    vacsr: Command, models: dict[str, Path], tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vacsr.search.items._PHOTOS", {"cpu": 2})
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
    assert (said["holds"], said["exact"], said["sources"]) == ("images", True, [f"{SPEC},split=train"])
    plain = vacsr("index", "info", spec).out.splitlines()
    assert ["sources", f"{SPEC},split=train"] in [line.split() for line in plain]
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
