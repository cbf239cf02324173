import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vacsr.data.fewshot import LabelledPhotos, draw_shots, load_classes
from vacsr.data.fewshot.coop import LAYOUTS
from vacsr.errors import UsageError

Refuse = Callable[..., str]
ALL = [
    "imagenet", "caltech101", "oxford_pets", "stanford_cars", "oxford_flowers", "food101", "fgvc_aircraft", "sun397",
    "dtd", "eurosat", "ucf101", "imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r",
]  # fmt: skip


def listed(photos: LabelledPhotos) -> list[tuple[str, int, str]]:
    labels = photos.labels.tolist()
    return [(path, label, photos.classes[label]) for path, label in zip(photos.ids(), labels, strict=True)]


@pytest.mark.parametrize("name", ALL)
def test_layout_loads_as_written(world: Any, name: str) -> None:
    source, truth = load_classes(f"coop:{world.root},set={name}"), world.truth[name]
    assert list(LAYOUTS) == ALL
    assert list(source.test.classes) == truth.classes
    assert (source.name, source.template) == (name, truth.template)
    assert listed(source.test) == truth.test
    assert sorted(listed(source.train)) == sorted(truth.train)
    assert (source.val is None) == (truth.val is None)
    if source.val is not None:
        assert sorted(listed(source.val)) == sorted(truth.val)
    for split in (source.train, source.val, source.test):
        if split is not None and len(split):
            split.check_files()
            photo = split.photos.open(len(split) - 1)
            assert (photo.size, photo.mode) == ((4, 3), "RGB")
    if not truth.train:
        with pytest.raises(UsageError, match="tests only"):
            draw_shots(source, shots=16, seed=1)


def test_template_can_be_replaced(world: Any, refuse: Refuse) -> None:
    spec = f"coop:{world.root},set=dtd,template="
    assert load_classes(f"{spec}a rough, {{}} thing.").template == "a rough, {} thing."
    for wrong in ("no place", "{} {}", "{0}", "{name}", "{} {x}", "{{}}"):
        refuse(f"{spec}{wrong}", "{}", error=UsageError)


@pytest.mark.parametrize("name", ALL)
def test_missing_set_lists_what_is_expected_where(tmp_path: Path, world: Any, refuse: Refuse, name: str) -> None:
    message = refuse(f"coop:{tmp_path},set={name}", f"{name} is incomplete", "DATASETS.md")
    paths = [Path(word.strip(",")) for word in message.split() if word.startswith(str(tmp_path))]
    assert len(paths) >= 2
    assert all((world.root / path.relative_to(tmp_path)).exists() for path in paths), paths


def test_specs_that_name_no_set(refuse: Refuse) -> None:
    refuse("coop:x", "names no data set", "set=NAME", "ucf101", error=UsageError)
    refuse("coop:x,set=oxfordpets", "did you mean 'oxford_pets'", error=UsageError)
    refuse("coco:x", "unknown scheme", "coop:ROOT", error=UsageError)


SPLIT = {
    "train": [["a.jpg", 0, "ant"], ["b.jpg", 1, "bee"]],
    "val": [["c.jpg", 0, "ant"]],
    "test": [["d.jpg", 1, "bee"]],
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": [*SPLIT["train"], ["e.jpg", 1, "wasp"]]}, ["class 1", "'bee'", "'wasp'"]),
        ({"train": [*SPLIT["train"], ["e.jpg", 7, "wasp"]]}, ["label 2 is missing", "7"]),
        ({"train": [["a.jpg", 0, "ant"]]}, ["dtd/train", "no photo", "'bee'"]),
        ({"train": [["a.jpg", 0, "ant"]], "test": [["d.jpg", 0, "ant"]]}, ["1 class"]),
        ({"test": []}, ["no test photos"]),
        ({"train": [["a.jpg", 0, " "], ["b.jpg", 1, "bee"]], "val": []}, ["class 0 has no name"]),
        ({"train": [["a.jpg", 0]]}, ["train, entry 0", "[path, label, class name]"]),
        ({"train": [["a.jpg", 1.5, "ant"]]}, ["entry 0"]),
        ({"train": {"a.jpg": 0}}, ["train and val and test"]),
    ],
)
def test_broken_split_files(tmp_path: Path, refuse: Refuse, change: dict[str, Any], words: list[str]) -> None:
    (tmp_path / "dtd" / "images").mkdir(parents=True)
    file = tmp_path / "dtd" / "split_zhou_DescribableTextures.json"
    file.write_text(json.dumps(SPLIT))
    assert load_classes(f"coop:{tmp_path},set=dtd").test.classes == ("ant", "bee")
    file.write_text(json.dumps({**SPLIT, **change}))
    refuse(f"coop:{tmp_path},set=dtd", *words)


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    """Three classes with a photo each, and names in files that are passed over."""
    place, ids = tmp_path / "imagenet", [f"n{number:08}" for number in range(3)]
    for path in [f"{part}/{wnid}/a.JPEG" for part in ("train", "val") for wnid in ids]:
        (place / "images" / path).parent.mkdir(parents=True)
        (place / "images" / path).touch()
    for path in (".hidden/a.JPEG", "n00000001/.a.JPEG", "n00000001/Thumbs.db"):
        (place / "images" / "train" / path).parent.mkdir(exist_ok=True)
        (place / "images" / "train" / path).touch()
    (place / "classnames.txt").write_text("".join(f"{wnid} thing {wnid}\n" for wnid in ids))
    return place


def test_imagenet_classes_must_agree(imagenet: Path, refuse: Refuse) -> None:
    spec, train, val = f"coop:{imagenet.parent},set=imagenet", imagenet / "images/train", imagenet / "images/val"
    assert len(load_classes(spec).train) == 3
    shutil.rmtree(val / "n00000001")
    refuse(spec, "n00000001", "train only")
    shutil.rmtree(train / "n00000001")
    assert load_classes(spec).test.classes == ("thing n00000000", "thing n00000002")
    (train / "n00000002" / "a.JPEG").unlink()
    refuse(spec, "imagenet/train", "no photo", "thing n00000002")
    shutil.rmtree(val)
    val.mkdir()
    (val / "ILSVRC2012_val_00000001.JPEG").touch()
    refuse(spec, "ILSVRC2012_val_00000001.JPEG", "one folder per class")


def test_classnames_that_do_not_fit(imagenet: Path, refuse: Refuse) -> None:
    for text, words in (
        ("n00000000 a\nn00000001 b\n", "n00000002"),
        ("n00000000 a\nn00000000 b\n", "duplicate id"),
        ("n00000000\n", "no class name"),
    ):
        (imagenet / "classnames.txt").write_text(text)
        refuse(f"coop:{imagenet.parent},set=imagenet", "classnames.txt", words)


def test_numbered_folders_out_of_range_or_empty(tmp_path: Path, refuse: Refuse) -> None:
    place = tmp_path / "imagenetv2"
    photos = place / "imagenetv2-matched-frequency-format-val"
    for name in ("0", "1", "10"):
        (photos / name).mkdir(parents=True)
        (photos / name / "a.jpeg").touch()
    names = [f"n{number:08} thing {number}\n" for number in range(11)]
    spec = f"coop:{tmp_path},set=imagenetv2"
    (place / "classnames.txt").write_text("".join(names[::-1]))
    refuse(spec, "no photo", "'thing 2'", "8 of 11")
    (place / "classnames.txt").write_text("".join(names[:2]))
    refuse(spec, "10: label out of range", "0 to 1")
    shutil.rmtree(photos / "10")
    assert listed(load_classes(spec).test) == [("0/a.jpeg", 0, "thing 0"), ("1/a.jpeg", 1, "thing 1")]


def test_aircraft_lists_that_do_not_fit(tmp_path: Path, world: Any, refuse: Refuse) -> None:
    shutil.copytree(world.root / "fgvc_aircraft", tmp_path / "fgvc_aircraft")
    file, spec = tmp_path / "fgvc_aircraft" / "variants.txt", f"coop:{tmp_path},set=fgvc_aircraft"
    variants = file.read_text()
    for text, words in (
        (variants.replace("DC-10\n", ""), ("images_variant_train.txt", "'DC-10'")),
        (variants + "MD-80\n", ("no photo", "'MD-80'")),
        (variants + "DC-10\n", ("no photo", "'DC-10'")),
    ):
        file.write_text(text)
        refuse(spec, *words)
