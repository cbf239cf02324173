from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vacsr.data.fewshot import COOP_SETS, SHIFT_SETS, LabelledPhotos, base_and_new, draw_shots, load_classes, take_shots
from vacsr.errors import DataError, UsageError, VacsrError

ALL = [
    "imagenet", "caltech101", "oxford_pets", "stanford_cars", "oxford_flowers", "food101", "fgvc_aircraft", "sun397",
    "dtd", "eurosat", "ucf101", "imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r",
]  # fmt: skip
SHIFTS = ALL[11:]


def listed(photos: LabelledPhotos) -> list[tuple[str, int, str]]:
    labels = photos.labels.tolist()
    return [(path, label, photos.classes[label]) for path, label in zip(photos.ids(), labels, strict=True)]


def refused(spec: str, *words: str, error: type[VacsrError] = DataError) -> str:
    with pytest.raises(error) as caught:
        load_classes(spec)
    assert all(word in str(caught.value) for word in (*words, " — ")), str(caught.value)
    return str(caught.value)


def test_names_of_the_sets() -> None:
    assert [*COOP_SETS, *SHIFT_SETS] == ALL


@pytest.mark.parametrize("name", ALL)
def test_layout_loads_as_written(world: Any, name: str) -> None:
    source, truth = load_classes(f"coop:{world.root},set={name}"), world.truth[name]
    assert list(source.test.classes) == truth.classes
    assert source.template == truth.template
    assert source.name == name
    assert listed(source.test) == truth.test
    assert sorted(listed(source.train)) == sorted(truth.train)
    assert (source.val is None) == (truth.val is None)
    if source.val is not None:
        assert sorted(listed(source.val)) == sorted(truth.val)
    for split in (source.train, source.val, source.test):
        if split is not None and len(split):
            split.check_files()
            assert split.photos.open(len(split) - 1).size == (4, 3)
            assert split.photos.open(0).mode == "RGB"


@pytest.mark.parametrize("name", ALL[:11])
def test_sixteen_shots_of_each_layout(world: Any, name: str) -> None:
    source, truth = load_classes(f"coop:{world.root},set={name}"), world.truth[name]
    shots = draw_shots(source, shots=16, seed=1)
    drawn = take_shots(source, shots)
    per_train = min(16, len(truth.train) // len(truth.classes))
    per_val = 0 if truth.val is None else 4  # ImageNet's two photos a class are all drawn to train
    every = range(len(truth.classes))
    assert Counter(drawn.train.labels.tolist()) == Counter({label: per_train for label in every})
    assert Counter(drawn.val.labels.tolist()) == Counter({label: per_val for label in every if per_val})
    assert set(listed(drawn.train)) <= set(truth.train)
    assert len(set(drawn.train.ids())) == len(drawn.train)
    halves = base_and_new(len(truth.classes))
    new = source.test.only(halves.new)
    expected = [(path, label - len(halves.base), name) for path, label, name in truth.test if label in halves.new]
    assert listed(new) == expected
    assert list(new.classes) == truth.classes[len(halves.base) :]
    assert set(drawn.train.only(halves.base).labels.tolist()) == set(halves.base)


def test_few_shots_of_imagenet_leave_the_rest_to_validation(world: Any) -> None:
    source = load_classes(f"coop:{world.root},set=imagenet")
    drawn = take_shots(source, draw_shots(source, shots=1, seed=1))
    assert Counter(drawn.train.labels.tolist()) == Counter(dict.fromkeys(range(1000), 1))
    assert Counter(drawn.val.labels.tolist()) == Counter(dict.fromkeys(range(1000), 1))
    assert not set(drawn.train.ids()) & set(drawn.val.ids())


@pytest.mark.parametrize("name", SHIFTS)
def test_shifted_sets_are_for_tests_only(world: Any, name: str) -> None:
    source = load_classes(f"coop:{world.root},set={name}")
    assert len(source.train) == 0
    assert source.val is None
    with pytest.raises(UsageError, match="tests only"):
        draw_shots(source, shots=16, seed=1)


def test_a_and_r_are_200_way_over_their_own_folders(world: Any) -> None:
    load = {name: load_classes(f"coop:{world.root},set={name}") for name in ("imagenet", *SHIFTS)}
    ways = {name: len(source.test.classes) for name, source in load.items()}
    assert ways == {"imagenet": 1000, "imagenetv2": 1000, "imagenet_sketch": 1000, "imagenet_a": 200, "imagenet_r": 200}
    thousand, few = load["imagenet"].test.classes, load["imagenet_r"].test
    assert few.classes == thousand[::5]
    assert int(few.labels.max()) == 199
    assert load["imagenetv2"].test.classes == load["imagenet_sketch"].test.classes == thousand


def test_template_can_be_replaced(world: Any) -> None:
    spec = f"coop:{world.root},set=dtd,template=a rough, {{}} thing."
    assert load_classes(spec).template == "a rough, {} thing."
    for wrong in ("no place", "{} {}", "{0}", "{name}", "{} {x}", "{{}}"):
        refused(f"coop:{world.root},set=dtd,template={wrong}", "{}", error=UsageError)


@pytest.mark.parametrize("name", ALL)
def test_missing_set_lists_what_is_expected_where(tmp_path: Path, world: Any, name: str) -> None:
    folders = {path.name for path in world.root.iterdir()}
    message = refused(f"coop:{tmp_path},set={name}", "MISSING", name)
    paths = [Path(line.split("MISSING ")[1]) for line in message.splitlines() if "MISSING" in line]
    for path in paths:
        inside = path.relative_to(tmp_path)
        assert inside.parts[0] in folders
        assert (world.root / inside).exists(), path
    assert len(paths) >= 2


def test_missing_file_beside_found_ones(tmp_path: Path, write: Callable[..., Any]) -> None:
    write(tmp_path, "oxford_pets")
    split = tmp_path / "oxford_pets" / "split_zhou_OxfordPets.json"
    split.unlink()
    message = refused(f"coop:{tmp_path},set=oxford_pets", f"MISSING {split}")
    assert f"found   {tmp_path / 'oxford_pets'}/images/" in message


def test_root_one_level_too_deep(tmp_path: Path, write: Callable[..., Any]) -> None:
    write(tmp_path, "dtd")
    refused(f"coop:{tmp_path / 'dtd'},set=dtd", f"write coop:{tmp_path},set=dtd")


def test_unknown_or_no_set(tmp_path: Path) -> None:
    refused(f"coop:{tmp_path}", "names no data set", "set=NAME", "ucf101", error=UsageError)
    refused(f"coop:{tmp_path},set=oxfordpets", "did you mean 'oxford_pets'", error=UsageError)
    refused(f"coop:{tmp_path},sett=dtd", "did you mean 'set'", error=UsageError)
    refused("coop:", "needs a path", error=UsageError)
    refused("coco:x", "unknown scheme", "coop:ROOT", error=UsageError)
    refused("oxford_pets", "no scheme", error=UsageError)
    refused("coop:x,set=dtd,set=dtd", "twice", error=UsageError)
    refused("coop:x,set=", "is empty", error=UsageError)
    refused("scenes:there", "takes no path", error=UsageError)


SPLIT = {
    "train": [["a.jpg", 0, "ant"], ["b.jpg", 1, "bee"]],
    "val": [["c.jpg", 0, "ant"]],
    "test": [["d.jpg", 1, "bee"]],
}
BROKEN = [
    ({"train": [["a.jpg", 0, "ant"], ["b.jpg", 1, "bee"], ["e.jpg", 1, "wasp"]]}, ["class 1", "'bee'", "'wasp'"]),
    ({"train": [["a.jpg", 0, "ant"], ["b.jpg", 1, "bee"], ["e.jpg", -1, "wasp"]]}, ["-1", "out of range"]),
    ({"train": [["a.jpg", 0, "ant"], ["b.jpg", 1, "bee"], ["e.jpg", 7, "wasp"]]}, ["class 2 has no photo", "7"]),
    ({"train": [["a.jpg", 0, "ant"]]}, ["dtd/train", "no photo", "'bee'"]),
    ({"train": [["a.jpg", 0, "ant"]], "test": [["d.jpg", 0, "ant"]]}, ["1 class"]),
    ({"test": []}, ["no test photos"]),
    ({"train": [["a.jpg", 0, " "], ["b.jpg", 1, "bee"]], "val": []}, ["class 0 has no name"]),
    ({"train": [["a.jpg", 0]]}, ["train, entry 0", "[path, label, class name]"]),
    ({"train": [["a.jpg", "x", "ant"]]}, ["entry 0"]),
    ({"train": [["a.jpg", True, "ant"]]}, ["entry 0"]),
    ({"train": [["a.jpg", 1.5, "ant"]]}, ["entry 0"]),
    ({"train": {"a.jpg": 0}}, ["train and val and test"]),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_broken_split_files(tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    (tmp_path / "dtd" / "images").mkdir(parents=True)
    file = tmp_path / "dtd" / "split_zhou_DescribableTextures.json"
    spec = f"coop:{tmp_path},set=dtd"
    file.write_text(json.dumps(SPLIT))
    assert load_classes(spec).test.classes == ("ant", "bee")
    file.write_text(json.dumps({**SPLIT, **change}))
    refused(spec, *words)


def test_split_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "dtd" / "images").mkdir(parents=True)
    file = tmp_path / "dtd" / "split_zhou_DescribableTextures.json"
    for text in ("{", "[]", '{"train": []}', ""):
        file.write_text(text)
        refused(f"coop:{tmp_path},set=dtd", str(file))


def test_absent_photo_is_named(tmp_path: Path, write: Callable[..., Any]) -> None:
    truth = write(tmp_path, "dtd")
    source = load_classes(f"coop:{tmp_path},set=dtd")
    shots = draw_shots(source, shots=2, seed=1)
    lost = tmp_path / "dtd" / "images" / source.train.ids()[int(shots.train[0])]
    lost.unlink()
    assert len(load_classes(f"coop:{tmp_path},set=dtd").train) == len(truth.train)
    with pytest.raises(DataError, match=lost.name):
        take_shots(source, shots)
    with pytest.raises(DataError, match=lost.name):
        source.train.photos.open(int(shots.train[0]))


def small_imagenet(root: Path, classes: int = 3) -> Path:
    place, ids = root / "imagenet", [f"n{number:08}" for number in range(classes)]
    for part in ("train", "val"):
        for wnid in ids:
            folder = place / "images" / part / wnid
            folder.mkdir(parents=True)
            (folder / "a.JPEG").write_bytes(b"")
    (place / "classnames.txt").write_text("".join(f"{wnid} thing {wnid}\n" for wnid in ids))
    return place


def test_imagenet_classes_must_agree(tmp_path: Path) -> None:
    place, spec = small_imagenet(tmp_path), f"coop:{tmp_path},set=imagenet"
    assert len(load_classes(spec).train) == 3
    (place / "images" / "train" / ".hidden").mkdir()
    (place / "images" / "train" / "n00000001" / ".a.JPEG").write_bytes(b"")
    (place / "images" / "train" / "n00000001" / "Thumbs.db").write_bytes(b"")
    assert len(load_classes(spec).train) == 3
    shutil.rmtree(place / "images" / "val" / "n00000001")
    refused(spec, "n00000001", "train only")
    shutil.rmtree(place / "images" / "train" / "n00000001")
    assert load_classes(spec).test.classes == ("thing n00000000", "thing n00000002")
    (place / "images" / "train" / "n00000002" / "a.JPEG").unlink()
    refused(spec, "imagenet/train", "no photo", "thing n00000002")


def test_imagenet_val_that_was_never_sorted(tmp_path: Path) -> None:
    place = small_imagenet(tmp_path)
    shutil.rmtree(place / "images" / "val")
    (place / "images" / "val").mkdir()
    (place / "images" / "val" / "ILSVRC2012_val_00000001.JPEG").write_bytes(b"")
    refused(f"coop:{tmp_path},set=imagenet", "ILSVRC2012_val_00000001.JPEG", "one folder per class")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n00000000 a\nn00000001 b\n", ["does not name 1 of 3", "n00000002"]),
        ("n00000000 a\nn00000000 b\n", ["line 2", "again"]),
        ("n00000000\n", ["line 1", "no class name"]),
    ],
)
def test_classnames_that_do_not_fit(tmp_path: Path, text: str, words: list[str]) -> None:
    (small_imagenet(tmp_path) / "classnames.txt").write_text(text)
    refused(f"coop:{tmp_path},set=imagenet", "classnames.txt", *words)


def test_numbered_folders_out_of_range_or_empty(tmp_path: Path) -> None:
    place = tmp_path / "imagenetv2"
    photos = place / "imagenetv2-matched-frequency-format-val"
    for name in ("0", "1", "10"):
        (photos / name).mkdir(parents=True)
        (photos / name / "a.jpeg").write_bytes(b"")
    names = [f"n{number:08} thing {number}\n" for number in range(11)]
    spec = f"coop:{tmp_path},set=imagenetv2"
    (place / "classnames.txt").write_text("".join(names[::-1]))
    refused(spec, "no photo", "'thing 2'", "8 of 11")
    (place / "classnames.txt").write_text("".join(names[:2]))
    refused(spec, "10: label out of range", "0 to 1")
    shutil.rmtree(photos / "10")
    assert listed(load_classes(spec).test) == [("0/a.jpeg", 0, "thing 0"), ("1/a.jpeg", 1, "thing 1")]


def test_aircraft_lists_that_do_not_fit(tmp_path: Path, write: Callable[..., Any]) -> None:
    write(tmp_path, "fgvc_aircraft")
    place, spec = tmp_path / "fgvc_aircraft", f"coop:{tmp_path},set=fgvc_aircraft"
    variants = (place / "variants.txt").read_text()
    (place / "variants.txt").write_text(variants.replace("DC-10\n", ""))
    refused(spec, "images_variant_train.txt, line 4", "'DC-10'")
    (place / "variants.txt").write_text(variants + "MD-80\n")
    refused(spec, "no photo", "'MD-80'")
    (place / "variants.txt").write_text(variants + "DC-10\n")
    refused(spec, "'DC-10' twice")
