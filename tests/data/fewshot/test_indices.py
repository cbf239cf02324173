from __future__ import annotations

import json
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vacsr.data.fewshot import FewshotSource, draw_shots, load_classes, load_shots, save_shots, take_shots
from vacsr.errors import DataError

Made = Callable[..., FewshotSource]
MODULE = "dassl.data.datasets.base_dataset"


@pytest.fixture
def source(made: Made) -> FewshotSource:
    return made([6, 7, 8], val=[5, 5, 5])


def refused(path: Path, source: FewshotSource, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        load_shots(path, source)
    assert all(word in str(caught.value) for word in (str(path), *words, " — ")), str(caught.value)


def entries(split: str, labels: list[int]) -> list[list[Any]]:
    return [[f"{split}/{label}/{number}.jpg", label, f"class {label}"] for number in range(2) for label in labels]


@pytest.mark.parametrize("val", [None, [5, 5, 5]])
def test_saved_draw_comes_back_from_files_in_another_order(tmp_path: Path, made: Made, val: list[int] | None) -> None:
    one, other = made([6, 7, 8], val=val), made([6, 7, 8], val=val, order=3)
    draw = draw_shots(one, shots=3, seed=2)
    save_shots(tmp_path / "shots.json", draw, source=one)
    back = load_shots(tmp_path / "shots.json", other)
    assert back.hash == draw.hash
    assert [split.ids() for split in take_shots(other, back)] == [split.ids() for split in take_shots(one, draw)]
    assert load_shots(tmp_path / "shots.json", one).val.tolist() == draw.val.tolist()


def test_saved_draw_that_was_changed(tmp_path: Path, source: FewshotSource) -> None:
    file = tmp_path / "shots.json"
    save_shots(file, draw_shots(source, shots=3, seed=2), source=source)
    value = json.loads(file.read_text())
    value["train"].pop()
    file.write_text(json.dumps(value))
    refused(file, source, "hash", "was changed")
    del value["hash"]
    file.write_text(json.dumps(value))
    assert len(load_shots(file, source).train) == 8


def test_published_json_keeps_order_and_repeats(tmp_path: Path, source: FewshotSource) -> None:
    file = tmp_path / "index.json"
    listed = [*entries("train", [2, 0, 1]), entries("train", [2])[0]]
    file.write_text(json.dumps({"train": listed, "val": entries("val", [0])}))
    shots = load_shots(file, source)
    assert source.train.take(shots.train).ids() == [path for path, _, _ in listed]
    assert source.val is not None
    assert source.val.take(shots.val).ids() == ["val/0/0.jpg", "val/0/1.jpg"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"train": [["train/0/9.jpg", 0, "class 0"]]}, ["1 of 1", "made/train", "train/0/9.jpg"]),
        ({"train": [["train/0/1.jpg", 1, "class 0"]]}, ["class 1", "in the data set it is 0"]),
        ({"train": [["train/0/1.jpg", 0, "kitten"]]}, ["'kitten'", "'class 0'"]),
        ({"train": [["train/0/1.jpg"]]}, ["train, entry 0"]),
        ({"train": []}, ["no photos"]),
        ({"train": entries("train", [0]), "val": 3}, ["val is not a list"]),
        ({"val": []}, ["train"]),
        ([], ["train"]),
    ],
)
def test_json_that_does_not_fit(tmp_path: Path, source: FewshotSource, value: Any, words: list[str]) -> None:
    file = tmp_path / "index.json"
    file.write_text(json.dumps(value))
    refused(file, source, *words)


def test_train_and_val_must_not_share_where_val_comes_from_train(tmp_path: Path, made: Made) -> None:
    file = tmp_path / "index.json"
    file.write_text(json.dumps({"train": entries("train", [0, 1]), "val": entries("train", [1])}))
    with pytest.raises(DataError, match="both trained and validated on"):
        load_shots(file, made([3, 3]))


def test_text_of_paths(tmp_path: Path, source: FewshotSource) -> None:
    file = tmp_path / "index.txt"
    file.write_text("/there/train/1/2.jpg\n\n./train/0/1.jpg\r\nC:\\data\\train\\2\\0.jpg\n")
    shots = load_shots(file, source)
    assert source.train.take(shots.train).ids() == ["train/1/2.jpg", "train/0/1.jpg", "train/2/0.jpg"]
    assert shots.val.tolist() == []
    file.write_text("1/2.jpg\n")
    assert source.train.take(load_shots(file, source).train).ids() == ["train/1/2.jpg"]
    file.write_text("2.jpg\n")  # three classes have one
    refused(file, source, "2.jpg")


def test_other_files_are_refused(tmp_path: Path, source: FewshotSource) -> None:
    (tmp_path / "index.npy").write_bytes(b"")
    refused(tmp_path / "index.npy", source, ".json, .pkl, .txt")
    refused(tmp_path / "none.json", source, "no such index file")
    (tmp_path / "bad.json").write_text("{")
    refused(tmp_path / "bad.json", source)
    (tmp_path / "twice.json").write_text('{"train": [], "val": [], "train": []}')
    refused(tmp_path / "twice.json", source, "twice.json: duplicate key 'train'")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    refused(tmp_path / "bad.txt", source, "UTF-8")


@pytest.fixture
def datum() -> Iterator[Callable[..., Any]]:
    """Records that pickle as Dassl's do; the module exists while a test writes them."""

    class Datum:
        def __init__(self, impath: str = "", label: int = 0, classname: str = "", **more: Any) -> None:
            self._impath, self._label, self._domain, self._classname = impath, label, 0, classname
            self.__dict__.update(more)

    Datum.__module__, Datum.__qualname__ = MODULE, "Datum"
    names = [MODULE.rsplit(".", cut)[0] for cut in (3, 2, 1, 0)]
    modules = {name: types.ModuleType(name) for name in names}
    modules[MODULE].Datum = Datum  # type: ignore[attr-defined]
    sys.modules.update(modules)
    yield Datum
    for name in modules:
        sys.modules.pop(name, None)


def without_dassl() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "dassl"]:
        del sys.modules[name]


@pytest.mark.parametrize("protocol", [2, 4, pickle.HIGHEST_PROTOCOL])
def test_published_pickle(tmp_path: Path, world: Any, datum: Callable[..., Any], protocol: int) -> None:
    source, truth = load_classes(f"coop:{world.root},set=food101"), world.truth["food101"]
    there = "/raid/someone/food-101/images"
    splits = {
        split: [datum(f"{there}/{path}", label, name) for path, label, name in listed[::3]]
        for split, listed in (("train", truth.train), ("val", truth.val))
    }
    file = tmp_path / "shot_16-seed_1.pkl"
    file.write_bytes(pickle.dumps(splits, protocol=protocol))
    without_dassl()
    shots = load_shots(file, source)
    drawn = take_shots(source, shots)
    assert drawn.train.ids() == [path for path, _, _ in truth.train[::3]]
    assert drawn.val.labels.tolist() == [label for _, label, _ in truth.val[::3]]
    save_shots(tmp_path / "again.json", shots, source=source)
    assert load_shots(tmp_path / "again.json", source).hash == shots.hash


def test_published_pickle_of_imagenet_has_no_val(tmp_path: Path, world: Any, datum: Callable[..., Any]) -> None:
    source, truth = load_classes(f"coop:{world.root},set=imagenet"), world.truth["imagenet"]
    records = [datum(f"/d/imagenet/images/{path}", label, name) for path, label, name in truth.train[:50]]
    file = tmp_path / "shot_16-seed_1.pkl"
    file.write_bytes(pickle.dumps({"train": records}))
    without_dassl()
    shots = load_shots(file, source)
    assert shots.train.tolist() == list(range(50))
    assert shots.val.tolist() == []


class Evil:
    """Runs a command when an ordinary reader opens it."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


def test_malicious_pickles_do_not_run(tmp_path: Path, source: FewshotSource, datum: Callable[..., Any]) -> None:
    mark, file = tmp_path / "ran", tmp_path / "shot.pkl"
    calls = [
        Evil(os.mkdir, str(mark)),
        Evil(eval, f"__import__('os').mkdir({str(mark)!r})"),
        Evil(exec, f"open({str(mark)!r}, 'w')"),
        Evil(getattr, "x", "upper"),
    ]
    pickle.loads(pickle.dumps(calls[0]))
    assert mark.exists(), "the attack itself works"
    mark.rmdir()
    good = datum("train/0/0.jpg", 0, "class 0")
    for evil in calls:
        for value in (evil, {"train": [good, evil]}, {"train": [datum(evil, 0, "class 0")]}, {evil.call: [good]}):
            file.write_bytes(pickle.dumps(value))
            refused(file, source, "it asks for", MODULE)
            assert not mark.exists()


def test_pickles_of_another_shape(tmp_path: Path, source: FewshotSource, datum: Callable[..., Any]) -> None:
    file = tmp_path / "shot.pkl"
    good = datum("train/0/0.jpg", 0, "class 0")
    wrong: list[tuple[Any, str]] = [
        ({"train": [datum("train/0/0.jpg", 0, "class 0", more=1)]}, "other fields"),
        ({"train": [datum("train/0/0.jpg", "0", "class 0")]}, "_label"),
        ({"train": [datum(["train/0/0.jpg"], 0, "class 0")]}, "_impath"),
        ({"train": [good, "train/0/1.jpg"]}, "something else"),
        ({"train": [good], "val": (good,)}, "something else"),
        ({"val": [good]}, "no list 'train'"),
        ([good], "no list 'train'"),
        ({"train": [Path("a")]}, "it asks for"),
    ]
    for value, word in wrong:
        file.write_bytes(pickle.dumps(value))
        refused(file, source, word)
    empty = b"\x80\x02}U\x05train]c" + MODULE.encode() + b"\nDatum\n)\x81as."  # a record that never got its fields
    file.write_bytes(empty)
    refused(file, source, "something else")


def test_broken_pickles(tmp_path: Path, source: FewshotSource, datum: Callable[..., Any]) -> None:
    file = tmp_path / "shot.pkl"
    whole = pickle.dumps({"train": [datum("train/0/0.jpg", 0, "class 0")]})
    state_of_the_class = b"\x80\x02c" + MODULE.encode() + b"\nDatum\n}b."
    for data in (b"", whole[:-20], b"not a pickle", b"\x80\x09.", state_of_the_class):
        file.write_bytes(data)
        refused(file, source, "not a whole pickle")


def test_huge_pickle_is_not_read(tmp_path: Path, source: FewshotSource) -> None:
    file = tmp_path / "shot.pkl"
    with file.open("wb") as stream:
        stream.truncate(65 << 20)
    refused(file, source, "limit")
