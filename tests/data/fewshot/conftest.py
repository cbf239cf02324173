"""Made-up data sets in the 15 layouts of CoOp's data instructions: tiny photos, the real files and folders."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from vacsr.data.fewshot import FewshotSource, LabelledPhotos, load_classes
from vacsr.data.photos import ArrayPhotos

Listed = tuple[str, int, str]
"""Path inside the photo folder, label, class name."""
SORTED_IDS = sorted(f"n{1_000_003 * number % 99_999_989:08d}" for number in range(1, 41))
NAMES = {wnid: f"thing {number}" for number, wnid in enumerate(SORTED_IDS)}
PLAIN = "a photo of a {}."


class Truth(NamedTuple):
    """What was written, as a reader should find it."""

    train: list[Listed]
    val: list[Listed] | None
    test: list[Listed]
    classes: list[str]
    template: str


def put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3), (200, 30, 10)).save(path, "JPEG")


CLASSES = ["annual crop", "Baklava_pie", "cat"]
ZHOU: Mapping[str, tuple[str, str, str, str]] = {  # folder, folder of photos, split file, template
    "caltech101": ("caltech-101", "101_ObjectCategories", "Caltech101", PLAIN),
    "oxford_pets": ("oxford_pets", "images", "OxfordPets", "a photo of a {}, a type of pet."),
    "stanford_cars": ("stanford_cars", "", "StanfordCars", PLAIN),
    "oxford_flowers": ("oxford_flowers", "jpg", "OxfordFlowers", "a photo of a {}, a type of flower."),
    "food101": ("food-101", "images", "Food101", "a photo of {}, a type of food."),
    "sun397": ("sun397", "SUN397", "SUN397", PLAIN),
    "dtd": ("dtd", "images", "DescribableTextures", "{} texture."),
    "eurosat": ("eurosat", "2750", "EuroSAT", "a centered satellite photo of {}."),
    "ucf101": ("ucf101", "UCF-101-midframes", "UCF101", "a photo of a person doing {}."),
}


def write_zhou(root: Path, folder: str, photos: str, file: str, template: str) -> Truth:
    """A data set with a split file: per class 20 photos to train, 6 to validate, 3 to test, listed out of order."""
    place, splits = root / folder, dict[str, list[Listed]]()
    for split, count in (("train", 20), ("val", 6), ("test", 3)):
        inside = f"{split}_" if photos else f"cars_{split}/"
        listed = [
            (f"{inside}{label}{number:03}.jpg", label, name)
            for number in range(count)
            for label, name in enumerate(CLASSES)
        ]
        splits[split] = listed[::-1]
        for path, _, _ in listed:
            put(place / photos / path)
    (place / f"split_zhou_{file}.json").write_text(json.dumps(splits))
    return Truth(splits["train"], splits["val"], splits["test"], CLASSES, template)


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
    """Two photos of each class to train and one to test; a stray file beside the folders."""
    place = root / "imagenet"
    rows = list(enumerate(SORTED_IDS))
    train = [(f"train/{wnid}/{wnid}_{part}.JPEG", label, NAMES[wnid]) for label, wnid in rows for part in (0, 1)]
    test = [(f"val/{wnid}/v{label}.JPEG", label, NAMES[wnid]) for label, wnid in rows]
    for path, _, _ in (*train, *test):
        put(place / "images" / path)
    (place / "images" / "val" / "valprep.sh").write_text("")
    write_classnames(place)
    return Truth(train, None, test, list(NAMES.values()), PLAIN)


def write_classnames(place: Path) -> None:
    (place / "classnames.txt").write_text("".join(f"{wnid} {NAMES[wnid]}\n" for wnid in SORTED_IDS))


def write_shifted(root: Path, folder: str, photos: str, *, every: int = 1, numbered: bool = False) -> Truth:
    """A photo of each class, two where there are fewer classes, and a README that is none."""
    ids = SORTED_IDS[::every]
    test = [
        (f"{label if numbered else wnid}/{part}.jpg", label, NAMES[wnid])
        for label, wnid in enumerate(ids)
        for part in ("photo_1", "photo_2")[: min(every, 2)]
    ]
    for path, _, _ in test:
        put(root / folder / photos / path)
    (root / folder / photos / "README.txt").write_text("not a class")
    write_classnames(root / folder)
    return Truth([], None, test, [NAMES[wnid] for wnid in ids], PLAIN)


OTHERS: Mapping[str, Callable[[Path], Truth]] = {
    "fgvc_aircraft": write_aircraft,
    "imagenet": write_imagenet,
    "imagenetv2": partial(
        write_shifted, folder="imagenetv2", photos="imagenetv2-matched-frequency-format-val", numbered=True
    ),
    "imagenet_sketch": partial(write_shifted, folder="imagenet-sketch", photos="images"),
    "imagenet_a": partial(write_shifted, folder="imagenet-adversarial", photos="imagenet-a", every=5),
    "imagenet_r": partial(write_shifted, folder="imagenet-rendition", photos="imagenet-r", every=5),
}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """``root`` holds all 15 data sets, which tests read and do not change; ``truth`` is what was written."""
    root = tmp_path_factory.mktemp("coop")
    truth = {name: write_zhou(root, *layout) for name, layout in ZHOU.items()}
    return SimpleNamespace(root=root, truth=truth | {name: write(root) for name, write in OTHERS.items()})


@pytest.fixture
def refuse(refused: Callable[..., str]) -> Callable[..., str]:
    """As `refused`, of :func:`load_classes`."""
    return partial(refused, load=load_classes)


@pytest.fixture(scope="session")
def made() -> Callable[..., FewshotSource]:
    """A source without files, from counts of photos per class; ``order`` shuffles the files."""

    def split(name: str, counts: Sequence[int], order: int | None) -> LabelledPhotos:
        rows = [(f"{name}/{label}/{number}.jpg", label) for label, size in enumerate(counts) for number in range(size)]
        if order is not None:
            rows = [rows[at] for at in np.random.default_rng(order).permutation(len(rows))]
        photos = ArrayPhotos(np.zeros((len(rows), 1, 1, 3), dtype=np.uint8), tuple(path for path, _ in rows))
        labels = torch.tensor([label for _, label in rows], dtype=torch.int64)
        return LabelledPhotos(photos, labels, tuple(f"class {label}" for label in range(len(counts))), f"made/{name}")

    def source(train: Sequence[int], *, val: Sequence[int] | None = None, order: int | None = None) -> FewshotSource:
        parts = split("train", train, order), None if val is None else split("val", val, order)
        return FewshotSource(*parts, split("test", [1] * len(train), order), "made", PLAIN)

    return source
