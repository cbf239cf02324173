"""`vacsr index`: images and captions go in once, changes are seen, stops cost a batch, other models are refused."""

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

from vacsr.data import PairSet, load_pairs
from vacsr.data.archives import StoredPhotos, TarPhoto, file_photos, zip_photos
from vacsr.data.photos import ArrayPhotos, Photos
from vacsr.errors import DataError
from vacsr.scoring import PairScorer
from vacsr.search import VectorIndex, embedding_provenance, open_index
from vacsr.search.fill import Filled, fill_index
from vacsr.search.local import ExactIndex

Models = dict[str, Path]
Patch = pytest.MonkeyPatch
Command = Callable[..., Any]
"""The fixture `vacsr` of conftest.py."""
CPU = ("--device", "cpu")


@pytest.fixture
def index(tmp_path: Path, scorer: PairScorer) -> VectorIndex:
    return open_index(f"exact:{tmp_path / 'i'}", dim=scorer.model.dim, create=True)


@pytest.fixture
def few(pairs: PairSet) -> PairSet:
    """30 images with five captions each, for the fixture `scorer`."""
    return pairs.subset(range(30))


def reopened(tmp_path: Path) -> VectorIndex:
    return open_index(f"exact:{tmp_path / 'i'}")


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(("model", "batch"), [("features", 7), ("towers", 1), ("towers", 3), ("towers", 100)])
def test_images_and_captions_go_in_as_the_scorer_embeds_them(
    vacsr: Command, models: Models, features: str, scenes: str, tmp_path: Path,
    monkeypatch: Patch, model: str, batch: int, texts: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr("vacsr.search.fill._PHOTOS", {"cpu": 2})
    spec, source, kind = (
        f"exact:{tmp_path / 'i'}",
        features if model == "features" else scenes,
        ("images", "texts")[texts],
    )
    add = ("index", "add", spec, "--run", models[model], "--pairs", source, *CPU, *(["--texts"] if texts else []))
    answer = vacsr(*add, "--batch", batch, "--skip")
    pairs = load_pairs(source, split="all")
    ids = pairs.caption_ids if texts else pairs.image_ids
    assert (answer.code, answer.out) == (0, f"{spec}\n"), answer.err
    assert f"added {len(ids)}, replaced 0, unchanged 0" in answer.err
    assert f"{kind}/s" in answer.err
    scores = PairScorer.from_pretrained(models[model], device="cpu").score_set(pairs)
    index = open_index(spec, provenance=embedding_provenance(scores.scorer.model, kind))
    entries = index.get(ids)
    vectors = torch.stack([entries[name].vector for name in ids])
    torch.testing.assert_close(vectors, (scores.texts if texts else scores.images).mean, atol=1e-5, rtol=0)
    first, words = entries[ids[0]].metadata, list(pairs.captions or ())
    if texts:
        assert (first["text"], first["image"]) == (words[0], pairs.image_ids[int(pairs.caption_image[0])])
    else:
        assert first["captions"] == [text for text, row in zip(words, pairs.caption_image, strict=True) if row == 0]
        assert first["source"] == source
    other = add[:-1] if texts else (*add, "--texts")
    assert vacsr(*other).refused(4, f"holds {kind}, these are")


def test_the_same_command_leaves_what_is_there(
    vacsr: Command, models: Models, features: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Ctrl-C says what that is."""
    add = ("index", "add", f"exact:{tmp_path / 'i'}", "--run", models["features"], "--pairs", features, *CPU)
    first = (*add, "--split", "train", "--dtype", "float16", "--batch", 16)
    calls, stored = list[int](), ExactIndex._add

    def interrupted(*args: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return stored(*args)

    monkeypatch.setattr(ExactIndex, "_add", interrupted)
    answer = vacsr(*first)
    assert (answer.code, answer.out, len(reopened(tmp_path))) == (130, "", 32)
    assert "32 of 40 images are stored" in answer.err
    assert "added 8, replaced 0, unchanged 32" in vacsr(*first).err
    answer = vacsr(*add)
    total = len(reopened(tmp_path))
    assert f"added {total - 40}, replaced 0, unchanged 40" in answer.err
    assert f"added 0, replaced {total}, unchanged 0" in vacsr(*add, "--replace").err
    assert vacsr(*add, "--dtype", "float32").refused(2, "float16")


def test_a_stop_costs_one_batch(scorer: PairScorer, few: PairSet, index: VectorIndex, tmp_path: Path) -> None:
    reports: list[Filled] = []

    def stop(done: Filled) -> None:
        reports.append(done)
        if len(reports) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill_index(index, scorer, few, batch=4, committed=stop)
    assert [done.added for done in reports] == [4, 8, 12]
    assert sum(reopened(tmp_path).known(few.image_ids)) == 12
    assert fill_index(index, scorer, few, batch=4) == Filled(added=18, skipped=12, of=30)


def test_an_id_from_another_source_is_refused(scorer: PairScorer, few: PairSet, index: VectorIndex) -> None:
    index.add(few.image_ids[:1], torch.ones(1, 16))  # from nobody knows where
    assert fill_index(index, scorer, few, source="one").skipped == 1
    with pytest.raises(DataError, match=f"'{few.image_ids[1]}' was indexed from 'one'.* 'two'.*--replace"):
        fill_index(index, scorer, few, source="two")
    assert fill_index(index, scorer, few, source="one").skipped == fill_index(index, scorer, few).skipped == 30
    assert fill_index(index, scorer, few, source="two", replace=True).replaced == 30
    assert {item["source"] for _, item in index.records()} == {"two"}


def test_drawn_photos_of_another_seed(vacsr: Command, models: Models, scenes: str, tmp_path: Path) -> None:
    add = ("index", "add", f"exact:{tmp_path / 'i'}", "--run", models["towers"], *CPU, "--pairs")
    assert vacsr(*add, f"{scenes},split=dev").code == vacsr(*add, scenes).code == 0
    assert vacsr(*add, f"{scenes},seed=5").refused(4, "--replace")
    assert vacsr(*add, f"{scenes},seed=5", "--replace").code == 0


def test_ids_are_checked_under_the_lock(scorer: PairScorer, few: PairSet, index: VectorIndex, tmp_path: Path) -> None:
    other, name = reopened(tmp_path), few.image_ids[15]

    def meanwhile(done: Filled) -> None:
        if done.added == 10:
            other.add([name], torch.ones(1, 16), [{"source": "two"}])

    with pytest.raises(DataError, match="--replace"):
        fill_index(index, scorer, few, source="one", batch=10, committed=meanwhile)
    assert reopened(tmp_path).metadata([name]) == {name: {"source": "two"}}
    assert len(index) == 11
    assert fill_index(index, scorer, few, source="one", replace=True).replaced == 11


def draw_photos(folder: Path, **colours: int) -> None:
    folder.mkdir(exist_ok=True)
    for name, grey in colours.items():
        Image.new("RGB", (40, 40), (grey, grey // 2, 255 - grey)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a square named {name}", encoding="utf-8")


def test_changed_photos_and_pruning(vacsr: Command, models: Models, tmp_path: Path, monkeypatch: Patch) -> None:
    photos, spec = tmp_path / "photos", f"exact:{tmp_path / 'i'}"
    draw_photos(photos, a=0, b=60, c=120, d=250)
    add = ("index", "add", spec, "--run", models["towers"], *CPU, "--pairs")
    monkeypatch.chdir(tmp_path)
    assert vacsr(*add, "folder:photos").code == 0
    before = reopened(tmp_path).get(["a.png", "b.png"])
    assert before["a.png"].metadata["source"] == str(photos / "a.png")
    draw_photos(photos, b=200)
    os.utime(photos / "b.png", ns=(1, 1))  # as old a file as can be, in the place of the other
    for name in ("c.png", "c.txt"):
        (photos / name).unlink()
    monkeypatch.chdir(photos)
    answer = vacsr(*add, f"folder:{photos}")
    assert "added 0, replaced 1, unchanged 2; " in answer.err
    assert "4 in the index" in answer.err
    after = reopened(tmp_path).get(["a.png", "b.png"])
    assert torch.equal(after["a.png"].vector, before["a.png"].vector)
    assert not torch.equal(after["b.png"].vector, before["b.png"].vector)
    answer = vacsr(*add, f"folder:{photos}", "--prune")
    assert "added 0, replaced 0, unchanged 3, removed 1" in answer.err
    assert reopened(tmp_path).known(["a.png", "c.png"]) == [True, False]
    assert reopened(tmp_path).sources == (f"folder:{photos}",)


def test_pruning_keeps_other_sources(vacsr: Command, models: Models, tmp_path: Path) -> None:
    photos, other = tmp_path / "photos", tmp_path / "other"
    draw_photos(photos, a=0, b=60, c=120)
    draw_photos(other, x=9)

    def add(folder: Path, *more: str) -> Any:
        pairs = ("--pairs", f"folder:{folder}", *CPU)
        return vacsr("index", "add", f"exact:{tmp_path / 'i'}", "--run", models["towers"], *pairs, *more)

    assert (add(other).code, add(photos).code) == (0, 0)
    reopened(tmp_path).add(["mine"], torch.ones(1, 8))
    for path in [*photos.glob("a.*"), *photos.glob("b.*")]:
        path.rename(path.with_stem(f"{path.stem}2"))
    assert add(photos, "--prune").refused(2, "2 of the 3 items", f"folder:{photos}", "'a.png'", "--yes")
    assert reopened(tmp_path).known(["a.png", "a2.png"]) == [True, False]
    assert add(photos, "--yes").refused(2, "--prune")
    assert "added 2, replaced 0, unchanged 1, removed 2" in add(photos, "--prune", "--yes").err
    index = reopened(tmp_path)
    assert sorted(name for name, _ in index.records()) == ["a2.png", "b2.png", "c.png", "mine", "x.png"]
    assert index.sources == (f"folder:{other}", f"folder:{photos}")


def test_a_photo_is_indexed_once_whatever_its_spec(
    vacsr: Command, models: Models, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A plain folder, also one that has a scheme's name; then its parent, where only the new photo is added."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/a.png", "photos/b.png", "c.png"):
        Path(name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (ord(name[-5]), 0, 0)).save(name)
    add = ("index", "add", "index", "--run", models["towers"], *CPU, "--pairs")
    assert vacsr(*add, "photos").code == 0
    twice = vacsr(*add, ".", "--replace")
    assert (twice.code, twice.err.count("warning: 2 photos are in the index already")) == (0, 1), twice.err
    held = {name: metadata["source"] for name, metadata in open_index("exact:index").records()}
    assert held == {name: str(tmp_path / name.replace("a", "photos/a").replace("b", "photos/b")) for name in held}
    assert sorted(held) == ["a.png", "b.png", "c.png"]
    Path("photos").rename("moved")  # the old files are gone, so these are not their copies
    assert "added 2" in vacsr(*add, ".").err


def test_a_split_is_pruned_alone_or_with_all(scorer: PairScorer, few: PairSet, index: VectorIndex) -> None:
    parts = [few.subset(range(start, start + 10)) for start in (0, 10, 20)]
    for part, source in zip(parts, ("csv:/a.csv,split=train", "csv:/a.csv,split=dev", "csv:/b.csv"), strict=True):
        fill_index(index, scorer, part, source=source)
    kept = few.subset([0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 14])
    done = fill_index(index, scorer, kept.subset(range(7)), source="csv:/a.csv,split=train", prune=True)
    assert (done.removed, len(index)) == (3, 27)
    done = fill_index(index, scorer, kept, source="csv:/a.csv", prune=True)
    assert (done.skipped, done.removed, len(index)) == (12, 5, 22)
    assert all(index.known([*kept.image_ids, *parts[2].image_ids]))


def test_changed_features_and_captions(scorer: PairScorer, few: PairSet, index: VectorIndex, tmp_path: Path) -> None:
    texts = open_index(f"exact:{tmp_path / 't'}", dim=16, create=True)
    fill_index(index, scorer, few, source="csv:/a.csv")
    fill_index(texts, scorer, few, source="csv:/a.csv", texts=True)
    moved, words = few.caption_image.clone(), list(few.captions or ())
    moved[0] = 1 - moved[0]
    words[5] = "other words"
    new_images, new_texts = few.images.clone(), few.texts.clone()
    new_images[3] += 1
    new_texts[7] += 1
    new = replace(few, images=new_images, texts=new_texts, caption_image=moved, captions=tuple(words))
    assert fill_index(index, scorer, new, source="csv:/a.csv").replaced == 1
    assert fill_index(texts, scorer, new, source="csv:/a.csv", texts=True).replaced == 3
    assert texts.metadata([few.caption_ids[0]])[few.caption_ids[0]]["image"] == few.image_ids[int(moved[0])]


def test_each_kind_of_photos_has_a_fingerprint_that_changes_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"one")
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("a.jpg", b"one")
        archive.writestr("b.jpg", b"two")
    (tmp_path / "s.tar").write_bytes(b"shard")
    pixels = np.zeros((2, 2, 2, 3), np.uint8)
    pixels[1, 0, 0, 0] = 1
    files, shard = file_photos(tmp_path, ["a.jpg", "none.jpg"]), tmp_path / "s.tar"
    kinds: list[Photos] = [
        files,
        zip_photos(tmp_path / "z.zip", ["a.jpg", "b.jpg"]),
        StoredPhotos((TarPhoto(shard, "a", 0, 3), TarPhoto(shard, "b", 512, 3))),
        ArrayPhotos(pixels, ("a", "b")),
    ]
    assert all(photos.fingerprint(0) not in ("", photos.fingerprint(1)) for photos in kinds)
    before = files.fingerprint(0), kinds[2].fingerprint(0)
    for name in ("a.jpg", "s.tar"):
        os.utime(tmp_path / name, ns=(5, 5))
    assert (files.fingerprint(0) == before[0], kinds[2].fingerprint(0) == before[1]) == (False, False)
    assert files.fingerprint(1) == ""


def test_what_does_not_fit(vacsr: Command, models: Models, features: str, scenes: str, tmp_path: Path) -> None:
    spec = f"exact:{tmp_path / 'i'}"

    def add(model: str, pairs: str) -> Any:
        return vacsr("index", "add", spec, "--run", models[model], "--pairs", pairs, *CPU)

    assert add("towers", features).refused(4, "the model reads photos")
    assert add("features", scenes).refused(4, "vacsr embed")
    assert add("variance", features).refused(2, "pcmepp", "variance", "vacsr")
    assert not (tmp_path / "i").exists()
    assert vacsr("index", "info", spec).refused(4, "vacsr index add")
    assert vacsr("index", "rm", spec, "a").refused(4, "vacsr index add")
    assert add("features", features).code == 0
    assert add("other", features).refused(4, "another model, or other weights")


def test_rm_and_info(vacsr: Command, models: Models, features: str, tmp_path: Path) -> None:
    spec, source = f"exact:{tmp_path / 'i'}", f"{features},split=train"
    vacsr("index", "add", spec, "--run", models["features"], "--pairs", source, *CPU)
    first = load_pairs(source).image_ids[0]
    answer = vacsr("index", "rm", spec, first, "no such")
    assert (answer.code, answer.out) == (0, "")
    assert "removed 1, 1 were not found, first 'no such'; 39 in the index" in answer.err
    assert vacsr("index", "rm", spec, first).refused(4, first, "nothing was removed")
    printed = json.loads(vacsr("index", "info", spec, "--json").out)
    expected = {"schema": 1, "kind": "exact", "vectors": 39, "dim": 16, "dtype": "float32", "dead": 1, "parts": 1}
    assert expected.items() <= printed.items()
    assert (printed["holds"], printed["exact"], printed["sources"]) == ("images", True, [source])
    lines = [line.split() for line in vacsr("index", "info", spec).out.splitlines()]
    assert ["sources", source] in lines
    assert ["vectors", "39"] in lines
