"""`vacsr calibrate` and `vacsr search`, on towers that look at scenes and on features."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.cli.search import PolicyChoice
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError
from vacsr.scoring import PairScorer
from vacsr.search import embedding_provenance, open_index
from vacsr.search.rerank import NO_ANSWER, POLICIES

Command = Callable[..., Any]
"""The fixture `vacsr` of conftest.py."""
SCENES = "scenes:images=40,held_out=120,per_image=2,size=32"
FEATURES = "synthetic:images=200,held_out=60"
TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towers")
    plan = TrainConfig(epochs=1, batch_size=16, device="cpu")
    fit("vacsr", load_pairs(SCENES, split="train"), plan, backbone=TINY).model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    plan, small = TrainConfig(epochs=15, batch_size=32, device="cpu"), BackboneConfig(head=HeadConfig(dim=32))
    fit("infonce", load_pairs(FEATURES, split="train"), plan, backbone=small).model.save_pretrained(folder)
    return folder


@pytest.fixture
def index(vacsr: Command, towers: Path, tmp_path: Path) -> str:
    name = f"exact:{tmp_path / 'photos'}"
    assert vacsr("index", "add", name, "--run", towers, "--pairs", SCENES, "--split", "dev", *CPU).code == 0
    return name


def calibrated(vacsr: Command, run: Path, spec: str, *more: object) -> Any:
    return vacsr("calibrate", run, "--pairs", spec, "--split", "dev", "--candidates", 30, *CPU, *more)


def test_calibrate_prints_what_it_promises_and_what_that_is_worth(vacsr: Command, features: Path) -> None:
    answer = calibrated(vacsr, features, FEATURES, "--check", "test", "--gallery", 10, "--risk", 0.5)
    assert answer.code == 0, answer.err
    assert "**dev**, promised: at most 50% of the answers are wrong, with 90% confidence" in answer.out
    rows = [line for line in answer.out.splitlines() if line.startswith(("| image →", "| text →"))]
    assert len(rows) == 4
    kept = json.loads((features / "search.json").read_text())
    assert kept["t2i"]["gallery"] == 10
    rule = kept["t2i"]["answer"]
    assert rule["threshold"] is not None, answer.out
    assert (
        f"| {100 * rule['answered'] / rule['certified']:.1f}% | {100 * rule['wrong'] / rule['answered']:.1f}% |"
        in rows[1]
    )
    assert str(features / "search.json") in answer.err


def test_calibrate_refuses(vacsr: Command, features: Path) -> None:
    assert calibrated(vacsr, features, FEATURES, "--gallery", 1000).refused(4, "--gallery 60")
    assert calibrated(vacsr, features, FEATURES, "--risk", 2).refused(2, "risk")
    assert vacsr("calibrate", features, *CPU).refused(2, "--pairs")
    assert calibrated(vacsr, features, FEATURES, "--check", "dev").refused(2, "--check test")


def test_a_run_is_not_fitted_to_what_it_was_trained_on(vacsr: Command, features: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(features, run / "model")
    (run / "model" / "search.json").unlink(missing_ok=True)
    (run / "config.yaml").write_text(f'data: {{pairs: "{FEATURES}", train: train}}\ntrain: {{select: best}}\n')
    for split in ("train", "all"):
        assert vacsr("calibrate", run, "--split", split, *CPU).refused(2, "--split dev")
        assert vacsr("calibrate", run / "model", "--split", split, *CPU).refused(2, "--split dev")
        assert vacsr("calibrate", run, "--check", split, *CPU).refused(2, "--check test")
    missing = vacsr("calibrate", run, "--check", "nothing", *CPU)
    assert missing.code in (2, 4)
    assert not (run / "model" / "search.json").exists()
    small = ("--candidates", 30, "--gallery", 20, *CPU)
    answer = vacsr("calibrate", run, *small)
    assert answer.code == 0, answer.err
    assert "chose the epoch on dev" in answer.err
    assert "nobody checks" not in answer.err
    assert json.loads((run / "model" / "search.json").read_text())["selected_on"] == "dev"
    (run / "config.yaml").write_text(f'data: {{pairs: "{FEATURES}"}}\ntrain: {{select: last}}\n')
    answer = vacsr("calibrate", run, *small)
    assert "chose the epoch" not in answer.err
    assert json.loads((run / "model" / "search.json").read_text())["selected_on"] == ""


def test_images_that_were_trained_on_are_known_however_the_data_are_spelled(
    vacsr: Command, features: Path, tmp_path: Path
) -> None:
    run, again = tmp_path / "run", "synthetic:held_out=60,images=200"
    shutil.copytree(features, run / "model")
    (run / "config.yaml").write_text(f'data: {{pairs: "{FEATURES}"}}\n')
    assert vacsr("calibrate", run, "--pairs", again, "--split", "train", *CPU).refused(4, "200 of 200 images")
    assert vacsr("calibrate", run, "--pairs", again, "--check", "train", *CPU).refused(4, "200 of 200 images")
    (run / "config.yaml").write_text(f'data: {{pairs: "{FEATURES}", train: all}}\n')
    assert vacsr("calibrate", run, *CPU).refused(2, "trained on all", "--pairs SPEC")
    assert vacsr("calibrate", run, "--split", "test", *CPU).refused(2, "trained on all")
    assert vacsr("calibrate", run, "--pairs", again, "--split", "test", *CPU).refused(4, "60 of 60 images")


def test_a_check_shares_no_image_with_the_fit(vacsr: Command, features: Path) -> None:
    both = ("calibrate", features, "--pairs", FEATURES, *CPU)
    assert vacsr(*both, "--split", "all", "--check", "test").refused(4, "share 60 images", "--check test")
    assert vacsr(*both, "--split", "dev", "--check", "all").refused(2, "--check test")


def test_what_was_fitted_stays_where_the_check_fails(
    vacsr: Command, features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_given: object) -> None:
        raise DataError("a photo cannot be read — mend it")

    kept = features / "search.json"
    kept.write_text("as it was")
    monkeypatch.setattr("vacsr.search.calibrate.check_calibration", failing)
    answer = calibrated(vacsr, features, FEATURES, "--check", "test", "--gallery", 10)
    assert answer.code == 4
    assert kept.read_text() == "as it was"
    kept.unlink()


def test_what_weakens_the_promise_is_said(vacsr: Command, features: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = calibrated(vacsr, features, FEATURES, "--gallery", 10)
    assert "nobody checks that it has not seen these" in answer.err  # a model folder does not say
    assert "hubs" not in answer.err
    monkeypatch.setattr("vacsr.search.calibrate.hub_share", lambda _rule, _found: 0.456)
    answer = calibrated(vacsr, features, FEATURES, "--gallery", 10)
    assert "text → image: 1% of the items take 45.6% of the wrong answers" in answer.err
    assert json.loads((features / "search.json").read_text())["i2t"]["hub_share"] == 0.456


def test_search_by_text(vacsr: Command, towers: Path, index: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    answer = vacsr("search", towers, "--index", index, "--text", "a red circle", "-k", 3, "--json", out, *CPU)
    assert answer.code == 0, answer.err
    found = json.loads(out.read_text())
    assert [hit["rank"] for hit in found["hits"]] == [1, 2, 3]
    for hit in found["hits"]:
        (line,) = [line for line in answer.out.splitlines() if f" {hit['id']} " in line]
        assert f"{hit['score']:.3f}" in line
        assert f"{hit['uncertainty']:.3f}" in line
    assert (found["answered"], found["calibrated"], found["policy"]) == (True, False, "score")
    assert vacsr("search", towers, "--index", index, "--text", "x", "--policy", "lcb", *CPU).refused(
        2, "vacsr calibrate"
    )


def test_an_abstention_is_said_plainly(vacsr: Command, towers: Path, index: str, tmp_path: Path) -> None:
    assert calibrated(vacsr, towers, SCENES, "--risk", 0.01).code == 0
    out = tmp_path / "found.json"
    ask = ("search", towers, "--index", index, "--text", "a red circle", "--policy", "abstain", "--json", out, *CPU)
    answer = vacsr(*ask)
    assert answer.code == 0, answer.err
    assert answer.out.startswith(NO_ANSWER)
    assert "not vouched for" in answer.out
    assert json.loads(out.read_text())["answered"] is False
    assert "no promise" not in answer.err
    ids = [hit["id"] for hit in json.loads(out.read_text())["hits"]]
    held = open_index(index)
    held.delete([name for name in load_pairs(SCENES, split="dev").image_ids if name not in ids])
    held.close()
    assert "warning: no promise at this size: the index holds 10, thresholds were fitted at 120" in vacsr(*ask).err
    for policy in ("lcb", "missed"):
        other = vacsr("search", towers, "--index", index, "--text", "a dog", "--policy", policy, *CPU)
        assert other.code == 0
        assert "warning: grades and confidence are off" in other.err


def test_a_promise_is_told_with_its_conditions(vacsr: Command, towers: Path, index: str) -> None:
    assert calibrated(vacsr, towers, SCENES).code == 0
    kept = json.loads((towers / "search.json").read_text())
    kept["t2i"]["answer"].update(threshold=0.0, risk=0.125, confidence=0.9999)
    (towers / "search.json").write_text(json.dumps(kept))
    ask = ("search", towers, "--index", index, "--text", "a red circle", *CPU)
    answer = vacsr(*ask, "--policy", "abstain")
    assert answer.code == 0, answer.err
    assert "at most 12.5% of such answers are wrong, with 99.99% confidence, if a match is in the index" in answer.out
    assert "vouched" not in vacsr(*ask).out
    (towers / "search.json").unlink()


def test_search_by_image_finds_texts(vacsr: Command, towers: Path, tmp_path: Path) -> None:
    data, scorer = load_pairs(SCENES, split="dev"), PairScorer.from_pretrained(towers, device="cpu")
    assert isinstance(data, PhotoSet)
    name, photo = f"exact:{tmp_path / 'words'}", tmp_path / "photo.png"
    data.photos.open(0).save(photo)
    words = open_index(name, dim=8, provenance=embedding_provenance(scorer.model, "texts"), create=True)
    words.add(data.caption_ids, scorer.embed_texts(data.captions).mean)
    words.close()
    answer = vacsr("search", towers, "--index", name, "--image", photo, "-k", 2, *CPU)
    assert answer.code == 0, answer.err
    best = scorer.score_all([photo], data.captions).score[0].argmax()
    assert f" {data.caption_ids[int(best)]} " in answer.out


def test_similar_images_and_texts_have_a_cosine_and_no_more(
    vacsr: Command, towers: Path, index: str, tmp_path: Path
) -> None:
    data, scorer = load_pairs(SCENES, split="dev"), PairScorer.from_pretrained(towers, device="cpu")
    assert isinstance(data, PhotoSet)
    out, photo, name = tmp_path / "found.json", tmp_path / "photo.png", f"exact:{tmp_path / 'words'}"
    data.photos.open(7).save(photo)
    answer = vacsr("search", towers, "--index", index, "--image", photo, "-k", 3, "--json", out, *CPU)
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[0] == "similar images, by cosine alone: no grade, no uncertainty, no promise"
    assert answer.out.splitlines()[1].split() == ["rank", "id", "cosine"]
    assert answer.out.splitlines()[2].split() == ["1", data.image_ids[7], "1.000"]
    assert json.loads(out.read_text())["direction"] == "i2i"
    words = open_index(name, dim=8, provenance=embedding_provenance(scorer.model, "texts"), create=True)
    words.add(data.caption_ids, scorer.embed_texts(data.captions).mean)
    words.close()
    answer = vacsr("search", towers, "--index", name, "--text", "a dog", *CPU)
    assert answer.out.startswith("similar texts, by cosine alone")
    refused = vacsr("search", towers, "--index", name, "--text", "a dog", "--policy", "abstain", *CPU)
    assert refused.refused(2, "ask with an image")


def test_the_command_offers_every_policy() -> None:
    assert [choice.value for choice in PolicyChoice] == list(POLICIES)


def test_search_refuses(vacsr: Command, towers: Path, features: Path, index: str, tmp_path: Path) -> None:
    asked = ("--index", index, *CPU)
    assert vacsr("search", towers, *asked).refused(2, "--text")
    assert vacsr("search", towers, *asked, "--text", "a", "--image", "b.png").refused(2, "either")
    assert vacsr("search", towers, *asked, "--text", "a", "-k", 0).refused(2, "k is 0")
    assert vacsr("search", towers, *asked, "--image", tmp_path / "photo.png").refused(4, "photo.png")
    assert vacsr("search", features, *asked, "--text", "a").refused(4, "fill another")
    own = f"exact:{tmp_path / 'features'}"
    assert vacsr("index", "add", own, "--run", features, "--pairs", FEATURES, *CPU).code == 0
    assert vacsr("search", features, "--index", own, "--text", "a", *CPU).refused(2, "cached features")
    assert vacsr("search", towers, "--index", f"exact:{tmp_path / 'none'}", "--text", "a", *CPU).code in (2, 4)
