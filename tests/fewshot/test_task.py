"""Protocols: which shots are learned from, and which classes each test set is answered over."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vacsr.data.fewshot import load_classes
from vacsr.errors import DataError, UsageError
from vacsr.fewshot.config import FewshotDataConfig, dataset_of
from vacsr.fewshot.task import load_sets, read_sentences

SPEC = "scenes:classes=7,train=6,test=2,size=32"


def task(**fields: Any) -> Any:
    return load_sets(FewshotDataConfig(**{"spec": SPEC, "shots": 3, **fields}))


def test_base_to_novel_tests_each_half_over_itself() -> None:
    sets, whole = task(), load_classes(SPEC)
    names = whole.test.classes
    assert sets.classes.names == sets.train.classes == names[:4]
    assert torch.bincount(sets.train.labels).tolist() == [3] * 4
    assert torch.bincount(sets.val.labels).tolist() == [3] * 4
    base, new = sets.tests
    assert (base.split, base.classes.names, new.split, new.classes.names) == ("base", names[:4], "new", names[4:])
    assert sorted(base.photos.labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(new.photos.labels.tolist()) == [0, 0, 1, 1, 2, 2]
    assert base.classes.template == whole.template
    for row in range(len(sets.train)):  # a shot is the photo of the class that its label says
        name = sets.train.photos.name(row)
        position = whole.train.ids().index(name)
        assert names[int(whole.train.labels[position])] == sets.train.classes[int(sets.train.labels[row])]


def test_shots_are_drawn_before_the_halves() -> None:
    assert task().shots.hash == task(protocol="all").shots.hash
    assert task().shots.hash != task(seed=2).shots.hash


def test_all_trains_and_tests_every_class() -> None:
    sets = task(protocol="all")
    assert len(sets.classes.names) == 7
    assert [one.split for one in sets.tests] == ["test"]
    assert len(sets.train) == 21


def test_targets_have_their_own_classes_and_sentence(tmp_path: Path) -> None:
    with (tmp_path / "other.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label", "split"])
        for number, name in enumerate(["cat", "dog", "cat", "dog"]):
            Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
            writer.writerow([f"{number}.png", name, "train" if number < 2 else "test"])
    targets = {"blur": f"{SPEC},domain=blur", "other": f"csv:{tmp_path / 'other.csv'}"}
    sets = task(protocol="domain", targets=targets)
    assert [one.split for one in sets.tests] == ["source", "blur", "other"]
    source, blur, other = sets.tests
    assert source.classes == sets.classes
    assert blur.classes == sets.classes._replace(shifted=True)
    assert other.classes.shifted
    assert sorted(other.classes.names) == ["cat", "dog"]
    assert other.classes.template == "a photo of a {}."
    assert len(other.photos) == 2
    same = task(protocol="domain", targets=targets, template="one {}.")
    assert {one.classes.template for one in same.tests} == {"one {}."}


def test_a_target_without_splits_is_tested_on_all_its_photos(tmp_path: Path) -> None:
    for name in ("plain/cat", "plain/dog", "split/train/cat", "split/train/dog", "split/test/cat", "split/test/dog"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(3 if "test" in name else 10):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    targets = {name: f"folder:{tmp_path / name}" for name in ("plain", "split")}
    sets = task(protocol="domain", targets=targets)
    assert [len(one.photos) for one in sets.tests] == [14, 20, 6]
    assert torch.bincount(sets.tests[1].photos.labels).tolist() == [10, 10]
    own = task(spec=targets["plain"], protocol="all")  # as the source it is shared out
    assert [len(one.photos) for one in own.tests] == [6]


def test_a_saved_draw_is_taken_up(tmp_path: Path) -> None:
    from vacsr.data.fewshot import save_shots

    first = task(seed=5)
    save_shots(tmp_path / "shots.json", first.shots, source=first.source)
    again = task(shots_file=str(tmp_path / "shots.json"), shots=1, seed=1)
    assert again.shots.hash == first.shots.hash
    assert torch.equal(again.train.labels, first.train.labels)


def test_refusals() -> None:
    with pytest.raises(UsageError, match=r"needs data\.targets"):
        task(protocol="domain")
    with pytest.raises(UsageError, match=r"no use for data\.targets"):
        task(targets={"blur": SPEC})
    with pytest.raises(UsageError, match="give it another name"):
        task(protocol="domain", targets={"source": SPEC})
    with pytest.raises(UsageError, match=r"one \{\}"):
        task(template="no place")


def test_sentences_come_in_the_order_of_the_classes(tmp_path: Path) -> None:
    names = task().classes.names
    path = tmp_path / "sentences.json"
    written = {name.upper().replace(" ", "_"): [f"about {name}", "and more"] for name in reversed(names)}
    path.write_text(json.dumps(written))
    sets = task(sentences=str(path))
    assert sets.classes.sentences == tuple((f"about {name}", "and more") for name in names)
    assert all(one.classes.sentences == () for one in sets.tests)
    assert read_sentences(path, names[1:2]) == ((f"about {names[1]}", "and more"),)


@pytest.mark.parametrize("value", [[], {}, {"red circle": "one"}, {"red circle": []}, {"red circle": [3]}])
def test_sentences_that_are_none(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "sentences.json"
    path.write_text(json.dumps(value))
    with pytest.raises(DataError, match=r"sentences\.json"):
        read_sentences(path, ["red circle"])


def test_data_sets_are_known_by_their_spec() -> None:
    assert dataset_of("coop:/data,set=sun397") == "sun397"
    assert dataset_of("folder:photos") == "folder"
    with pytest.raises(UsageError):
        dataset_of("nothing")
