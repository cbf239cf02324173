"""Made-up data sets in the 15 layouts of CoOp's data instructions: tiny photos, the real files and folders."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.data.fewshot import FewshotSource, LabelledPhotos
from vacsr.data.photos import ArrayPhotos

Listed = tuple[str, int, str]
"""Path inside the photo folder, label, class name."""
WNIDS = [f"n{1_000_003 * number % 99_999_989:08d}" for number in range(1, 1_001)]
SORTED_IDS = sorted(WNIDS)
NAMES = {wnid: f"thing {number}" for number, wnid in enumerate(SORTED_IDS)}


class Truth(NamedTuple):
    """What was written, as a reader should find it."""

    train: list[Listed]
    val: list[Listed] | None
    test: list[Listed]
    classes: list[str]
    template: str


def encoded(format: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), (200, 30, 10)).save(buffer, format=format)
    return buffer.getvalue()


JPEG, PNG = encoded("JPEG"), encoded("PNG")


def put(path: Path) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
    path.write_bytes(PNG if path.suffix == ".png" else JPEG)


def write_zhou(place: Path, photos: str, file: str, *, paths: str, classes: Sequence[str], template: str) -> Truth:
    """A data set with a split file: per class 20 photos to train, 6 to validate, 3 to test, listed out of order."""
    splits: dict[str, list[Listed]] = {}
    for split, count in (("train", 20), ("val", 6), ("test", 3)):
        listed = [
            (paths.format(split=split, name=name.replace(" ", ""), label=label, number=number), label, name)
            for number in range(count)
            for label, name in enumerate(classes)
        ]
        splits[split] = listed[::-1]
        for path, _, _ in listed:
            put(place / photos / path)
    (place / file).write_text(json.dumps(splits))
    return Truth(splits["train"], splits["val"], splits["test"], list(classes), template)


ZHOU: Mapping[str, tuple[str, str, str, str, Sequence[str], str]] = {
    "caltech101": (
        "caltech-101", "101_ObjectCategories", "split_zhou_Caltech101.json", "{name}/{split}_{number:04}.jpg",
        ["face", "leopard", "accordion"], "a photo of a {}.",
    ),
    "oxford_pets": (
        "oxford_pets", "images", "split_zhou_OxfordPets.json", "{name}_{split}{number}.jpg",
        ["abyssinian", "american_bulldog", "beagle", "bengal", "birman"], "a photo of a {}, a type of pet.",
    ),
    "stanford_cars": (
        "stanford_cars", "", "split_zhou_StanfordCars.json", "cars_{split}/{label}{number:05}.jpg",
        ["2000 AM General Hummer SUV", "2012 Acura RL Sedan"], "a photo of a {}.",
    ),
    "oxford_flowers": (
        "oxford_flowers", "jpg", "split_zhou_OxfordFlowers.json", "image_{split}{label}{number}.jpg",
        ["pink primrose", "hard-leaved pocket orchid", "canterbury bells"], "a photo of a {}, a type of flower.",
    ),
    "food101": (
        "food-101", "images", "split_zhou_Food101.json", "{name}/{split}{number}.jpg",
        ["apple_pie", "baby_back_ribs", "baklava", "tacos"], "a photo of {}, a type of food.",
    ),
    "sun397": (
        "sun397", "SUN397", "split_zhou_SUN397.json", "a/{name}/{split}_{number}.jpg",
        ["abbey", "airplane cabin", "indoor athletic field"], "a photo of a {}.",
    ),
    "dtd": (
        "dtd", "images", "split_zhou_DescribableTextures.json", "{name}/{name}_{split}{number}.jpg",
        ["banded", "blotchy", "zigzagged"], "{} texture.",
    ),
    "eurosat": (
        "eurosat", "2750", "split_zhou_EuroSAT.json", "C{label}/{split}_{number}.jpg",
        ["Annual Crop Land", "Forest", "Sea or Lake"], "a centered satellite photo of {}.",
    ),
    "ucf101": (
        "ucf101", "UCF-101-midframes", "split_zhou_UCF101.json", "{name}/v_{split}_g{number}.jpg",
        ["Apply_Eye_Makeup", "Yo_Yo"], "a photo of a person doing {}.",
    ),
}  # fmt: skip


def write_aircraft(root: Path) -> Truth:
    place, classes = root / "fgvc_aircraft", ["707-320", "A340 600", "Boeing 717", "DC-10", "Yak-42"]
    splits: dict[str, list[Listed]] = {}
    for split, count in (("train", 17), ("val", 5), ("test", 2)):
        splits[split] = [
            (f"{len(split)}{label}{number:04}.jpg", label, name)
            for number in range(count)
            for label, name in enumerate(classes)
        ]
        for path, _, _ in splits[split]:
            put(place / "images" / path)
        lines = [f"{path.removesuffix('.jpg')} {name}" for path, _, name in splits[split]]
        (place / f"images_variant_{split}.txt").write_text("\n".join(lines) + "\n")
    (place / "variants.txt").write_text("\n".join(classes) + "\n")
    return Truth(splits["train"], splits["val"], splits["test"], classes, "a photo of a {}, a type of aircraft.")


def write_imagenet(root: Path) -> Truth:
    """All 1000 classes, two photos each to train and one to test; a stray file beside the folders."""
    place = root / "imagenet"
    train = [
        (f"train/{wnid}/{wnid}_{number}.JPEG", label, NAMES[wnid])
        for label, wnid in enumerate(SORTED_IDS)
        for number in (0, 1)
    ]
    test = [(f"val/{wnid}/v{label}.JPEG", label, NAMES[wnid]) for label, wnid in enumerate(SORTED_IDS)]
    for path, _, _ in (*train, *test):
        put(place / "images" / path)
    (place / "images" / "val" / "valprep.sh").write_text("")
    write_classnames(place)
    return Truth(train, None, test, [NAMES[wnid] for wnid in SORTED_IDS], "a photo of a {}.")


def write_classnames(place: Path) -> None:
    (place / "classnames.txt").write_text("".join(f"{wnid} {NAMES[wnid]}\n" for wnid in SORTED_IDS))


def write_shifted(root: Path, folder: str, photos: str, *, every: int) -> Truth:
    """A photo in each class folder, two where there are fewer classes, and a README that is none."""
    ids = SORTED_IDS[::every]
    test = [
        (f"{wnid}/{part}.jpg", label, NAMES[wnid])
        for label, wnid in enumerate(ids)
        for part in ("photo_1", "photo_2")[: min(every, 2)]
    ]
    for path, _, _ in test:
        put(root / folder / photos / path)
    (root / folder / photos / "README.txt").write_text("not a class")
    write_classnames(root / folder)
    return Truth([], None, test, [NAMES[wnid] for wnid in ids], "a photo of a {}.")


def write_v2(root: Path) -> Truth:
    place = root / "imagenetv2"
    test = [(f"{label}/a{label}.jpeg", label, f"thing {label}") for label in range(1_000)]
    for path, _, _ in test:
        put(place / "imagenetv2-matched-frequency-format-val" / path)
    write_classnames(place)
    return Truth([], None, test, [f"thing {label}" for label in range(1_000)], "a photo of a {}.")


def write_set(root: Path, name: str) -> Truth:
    """One data set under ``root``."""
    if name in ZHOU:
        folder, photos, file, paths, classes, template = ZHOU[name]
        return write_zhou(root / folder, photos, file, paths=paths, classes=classes, template=template)
    others: dict[str, Callable[[], Truth]] = {
        "fgvc_aircraft": lambda: write_aircraft(root),
        "imagenet": lambda: write_imagenet(root),
        "imagenetv2": lambda: write_v2(root),
        "imagenet_sketch": lambda: write_shifted(root, "imagenet-sketch", "images", every=1),
        "imagenet_a": lambda: write_shifted(root, "imagenet-adversarial", "imagenet-a", every=5),
        "imagenet_r": lambda: write_shifted(root, "imagenet-rendition", "imagenet-r", every=5),
    }
    return others[name]()


class World(NamedTuple):
    """A root that holds all 15."""

    root: Path
    truth: Mapping[str, Truth]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """All 15 data sets; tests read and do not change them."""
    root = tmp_path_factory.mktemp("coop")
    names = [*ZHOU, "fgvc_aircraft", "imagenet", "imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r"]
    return World(root, {name: write_set(root, name) for name in names})


@pytest.fixture(scope="session")
def write() -> Callable[[Path, str], Truth]:
    """One data set under a root of the test's own, to be broken."""
    return write_set


@pytest.fixture(scope="session")
def made() -> Callable[..., FewshotSource]:
    """A source without files, from counts of photos per class."""
    return source


def labelled(counts: Sequence[int], classes: Sequence[str], *, split: str, order: Any = None) -> LabelledPhotos:
    rows = [(f"{split}/{label}/{number}.jpg", label) for label, count in enumerate(counts) for number in range(count)]
    rows = rows if order is None else [rows[at] for at in order.permutation(len(rows))]
    pixels = np.zeros((len(rows), 1, 1, 3), dtype=np.uint8)
    labels = torch.tensor([label for _, label in rows], dtype=torch.int64)
    return LabelledPhotos(ArrayPhotos(pixels, tuple(path for path, _ in rows)), labels, tuple(classes), f"made/{split}")


def source(train: Sequence[int], *, val: Sequence[int] | None = None, order: int | None = None) -> FewshotSource:
    classes = [f"class {label}" for label in range(len(train))]
    shuffle = None if order is None else np.random.default_rng(order)
    return FewshotSource(
        train=labelled(train, classes, split="train", order=shuffle),
        val=None if val is None else labelled(val, classes, split="val", order=shuffle),
        test=labelled([1] * len(train), classes, split="test", order=shuffle),
        name="made",
        template="a photo of a {}.",
    )
