"""The 15 data sets of the few-shot papers, in the files and folders of CoOp's data instructions.

Most have ``split_zhou_*.json``: ``{"train": [[path, label, class name], …], "val": …, "test": …}``, with class names
ready for prompts.

ImageNet and the four sets that shift it are folders named by WordNet ids, which ``classnames.txt`` translates. Labels
are positions in the sorted list of folders; the folders of ImageNet-V2 are the labels themselves. The public code uses
ImageNet's ``val`` both to validate and to test; here it is the test alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vacsr.config.base import did_you_mean
from vacsr.data.archives import missing
from vacsr.data.decode import PHOTO_SUFFIXES
from vacsr.data.fewshot.labelled import Entry, FewshotSource, Splits, as_entries, build_source
from vacsr.data.formats import CLASS_FORMATS, Spec, register
from vacsr.data.tables import walk_files
from vacsr.errors import DataError, UsageError
from vacsr.files import read_json, read_lines

CLASSNAMES, VARIANTS = "classnames.txt", "variants.txt"
IMAGE_LISTS = tuple(f"images_variant_{part}.txt" for part in ("train", "val", "test"))
PLAIN = "a photo of a {}."
_TEMPLATES = {
    "oxford_pets": "a photo of a {}, a type of pet.",
    "oxford_flowers": "a photo of a {}, a type of flower.",
    "food101": "a photo of {}, a type of food.",
    "fgvc_aircraft": "a photo of a {}, a type of aircraft.",
    "dtd": "{} texture.",
    "eurosat": "a centered satellite photo of {}.",
    "ucf101": "a photo of a person doing {}.",
}


class Layout(NamedTuple):
    """Where a data set is under the root."""

    folder: str
    photos: str  # the folder in it that paths of photos start from, "" for itself
    needs: tuple[str, ...]  # what must be in the folder; names of folders end in a slash
    read: Callable[[Path], Splits]


def read_split(folder: Path, *, file: str) -> Splits:
    """One of the ``split_zhou_*.json`` files."""
    value = read_json(folder / file, lists=("train", "val", "test"))
    train, val, test = (as_entries(value[part], source=f"{folder / file}, {part}") for part in ("train", "val", "test"))
    return Splits(train, val, test)


def read_imagenet(folder: Path, *, photos: str, parts: tuple[str, ...] = ("",)) -> Splits:
    """Photos in ``photos/part/nXXXXXXXX``: the last part is the test, the first of two to train on."""
    root, names = folder / photos, read_classnames(folder / CLASSNAMES)
    ids = {part: subfolders(root / part) for part in parts}
    for part, listed in ids.items():
        if not listed:
            raise missing(root / part, expected="one folder per class (n01440764, …)")
    differ = sorted(set(ids[parts[0]]) ^ set(ids[parts[-1]]))
    if differ:
        where = next(part for part in parts if differ[0] in ids[part])
        message = f"{root}: the parts have different classes ({len(differ):,} differ), {differ[0]} is in {where} only"
        raise DataError(f"{message} — labels are positions in the list of folders: make both lists the same")
    unnamed = [name for name in ids[parts[0]] if name not in names]
    if unnamed:
        message = f"{folder / CLASSNAMES} does not name {len(unnamed):,} of the folders, first {unnamed[0]}"
        raise DataError(f"{message} — use the file of CoOp's data instructions, or move other folders away")
    classes = tuple(names[name] for name in ids[parts[0]])
    entries = [_entries(root, [f"{part}/{name}".lstrip("/") for name in ids[part]], classes) for part in parts]
    return Splits(entries[0] if len(parts) == 2 else (), (), entries[-1], classes)


def read_numbered(folder: Path, *, photos: str) -> Splits:
    """Test photos in ``photos/0``, ``photos/1``, …: the number is the position of the class among the sorted ids."""
    names = read_classnames(folder / CLASSNAMES)
    classes = tuple(names[wnid] for wnid in sorted(names))
    numbers = [str(number) for number in range(len(classes))]
    wrong = sorted(set(subfolders(folder / photos)) - set(numbers))
    if wrong:
        message = f"{folder / photos / wrong[0]}: label out of range, expected folders 0 to {len(classes) - 1}"
        raise DataError(f"{message} — extract the matched-frequency set again, or fix {folder / CLASSNAMES}")
    return Splits((), (), _entries(folder / photos, numbers, classes), classes)


def read_aircraft(folder: Path) -> Splits:
    """FGVC-Aircraft: labels are lines of ``variants.txt``; its lists have lines ``image variant``, without ``.jpg``."""
    classes = tuple(line.strip() for line in read_lines(folder / VARIANTS))
    labels = {name: label for label, name in enumerate(classes)}

    def entry(file: str, line: str) -> Entry:
        image, _, name = line.strip().partition(" ")
        if name not in labels:
            raise DataError(f"{folder / file}: variant {name!r} of {image} is not in {VARIANTS} — copy both again")
        return Entry(f"{image}.jpg", labels[name], name)

    train, val, test = ([entry(file, line) for line in read_lines(folder / file)] for file in IMAGE_LISTS)
    return Splits(train, val, test, classes)


def _zhou(folder: str, photos: str, name: str, *, needs: tuple[str, ...] = ()) -> Layout:
    file = f"split_zhou_{name}.json"
    return Layout(folder, photos, (*(needs or (f"{photos}/",)), file), partial(read_split, file=file))


def _shifted(folder: str, photos: str, *, read: Callable[..., Splits] = read_imagenet) -> Layout:
    return Layout(folder, photos, (f"{photos}/", CLASSNAMES), partial(read, photos=photos))


LAYOUTS: Mapping[str, Layout] = {
    "imagenet": Layout(
        "imagenet",
        "images",
        ("images/train/", "images/val/", CLASSNAMES),
        partial(read_imagenet, photos="images", parts=("train", "val")),
    ),
    "caltech101": _zhou("caltech-101", "101_ObjectCategories", "Caltech101"),
    "oxford_pets": _zhou("oxford_pets", "images", "OxfordPets"),
    "stanford_cars": _zhou("stanford_cars", "", "StanfordCars", needs=("cars_train/", "cars_test/")),
    "oxford_flowers": _zhou("oxford_flowers", "jpg", "OxfordFlowers"),
    "food101": _zhou("food-101", "images", "Food101"),
    "fgvc_aircraft": Layout("fgvc_aircraft", "images", ("images/", VARIANTS, *IMAGE_LISTS), read_aircraft),
    "sun397": _zhou("sun397", "SUN397", "SUN397"),
    "dtd": _zhou("dtd", "images", "DescribableTextures"),
    "eurosat": _zhou("eurosat", "2750", "EuroSAT"),
    "ucf101": _zhou("ucf101", "UCF-101-midframes", "UCF101"),
    "imagenetv2": _shifted("imagenetv2", "imagenetv2-matched-frequency-format-val", read=read_numbered),
    "imagenet_sketch": _shifted("imagenet-sketch", "images"),
    "imagenet_a": _shifted("imagenet-adversarial", "imagenet-a"),
    "imagenet_r": _shifted("imagenet-rendition", "imagenet-r"),
}


@register("coop", path="ROOT", options=("set", "template"), formats=CLASS_FORMATS)
def load_coop(spec: Spec, _whole: bool = False) -> FewshotSource:
    """``coop:ROOT,set=NAME[,template=…]``: a data set under the folder that holds them all."""
    name = spec.option("set")
    if name is None or name not in LAYOUTS:
        problem = "names no data set" if name is None else f"has no data set {name!r}{did_you_mean(name, LAYOUTS)}"
        raise UsageError(f"{spec} {problem} — write coop:{spec.path},set=NAME with one of: {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    folder = spec.location / layout.folder
    absent = [need for need in layout.needs if not (folder / need).exists()]
    if absent:
        message = f"{name} is incomplete: {', '.join(f'{folder}/{need}' for need in absent)} not found"
        action = (
            "put it there (CoOp's DATASETS.md says where it comes from), or correct ROOT, the folder above all sets"
        )
        raise DataError(f"{message} — {action}")
    template = spec.option("template") or _TEMPLATES.get(name, PLAIN)
    return build_source(folder / layout.photos, layout.read(folder), name=name, template=template)


def read_classnames(file: Path) -> dict[str, str]:
    """Lines of ``nXXXXXXXX class name``: id to name."""
    lines = [line.strip().partition(" ") for line in read_lines(file)]
    names = {wnid: name.strip() for wnid, _, name in lines}
    if len(names) < len(lines) or not all(names.values()):
        raise DataError(f"{file} has a duplicate id or no class name — write one line per class: n01440764 tench")
    return names


def _entries(root: Path, folders: list[str], classes: tuple[str, ...]) -> list[Entry]:
    return [Entry(path, label, classes[label]) for label, name in enumerate(folders) for path in photos_in(root, name)]


def subfolders(root: Path) -> list[str]:
    """Names of the folders in ``root``, sorted; hidden ones and files (a README) are passed over."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def photos_in(root: Path, folder: str) -> list[str]:
    """Photos in ``root/folder`` and below as paths inside ``root``, sorted; links to folders are followed."""
    names = walk_files(root / folder, follow_links=True)
    return sorted(f"{folder}/{name}" for name in names if name.lower().endswith(PHOTO_SUFFIXES))
