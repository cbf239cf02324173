import csv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from vacsr.data.fewshot import LabelledPhotos, load_classes
from vacsr.errors import DataError, UsageError

Draw, Refuse = Callable[..., Path], Callable[..., str]
"""The fixtures `draw` and `refuse` of the conftest files."""


def listed(photos: LabelledPhotos | None) -> list[tuple[str, str]]:
    assert photos is not None
    return [(path, photos.classes[label]) for path, label in zip(photos.ids(), photos.labels.tolist(), strict=True)]


def fill(root: Path, draw: Draw, names: Sequence[str], count: int = 1) -> Path:
    for name in names:
        for number in range(count):
            draw(root / name / f"{number}.png")
    return root


def table(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return f"csv:{path}"


def test_folders_are_classes(tmp_path: Path, draw: Draw) -> None:
    root = fill(tmp_path / "pets", draw, ["dog", "cat/deep", "big_bird"], count=10)
    (root / "README.md").write_text("")
    (root / "dog" / "notes.txt").write_text("")
    fill(root, draw, [".hidden"])
    source = load_classes(f"folder:{root}")
    assert source.test.classes == ("big_bird", "cat", "dog")
    assert (source.name, source.template) == ("pets", "a photo of a {}.")
    parts = [dict(listed(split)) for split in (source.train, source.val, source.test)]
    for part, count in zip(parts, (5, 2, 3), strict=True):
        assert Counter(part.values()) == Counter(dict.fromkeys(source.test.classes, count))
    assert sum(len(part) for part in parts) == len({**parts[0], **parts[1], **parts[2]}) == 30
    assert all(path.startswith(name) for part in parts for path, name in part.items())
    assert source.train.photos.open(0).size == (8, 6)


def test_shares_depend_on_the_seed_and_the_names(tmp_path: Path, draw: Draw) -> None:
    for name in ("one", "two"):
        fill(tmp_path / name, draw, ["a", "b"], count=20)
    spec = "folder:{},test=0.5,val=0,seed={}"
    one, two = (load_classes(spec.format(tmp_path / name, 1)) for name in ("one", "two"))
    other = load_classes(spec.format(tmp_path / "one", 2))
    assert one.val is None
    assert len(one.test) == len(one.train) == 20
    assert listed(one.test) == listed(two.test) != listed(other.test)


@pytest.mark.parametrize("parts", [("train", "dev", "test"), ("Train", "Validation", "TEST")])
def test_split_folders(tmp_path: Path, draw: Draw, refuse: Refuse, parts: tuple[str, str, str]) -> None:
    for part in parts:
        fill(tmp_path / part, draw, ["cat", "dog"][: 1 if part.lower() == "test" else 2])
    source = load_classes(f"folder:{tmp_path},template=the {{}}")
    for split, part in ((source.train, parts[0]), (source.val, parts[1])):
        assert listed(split) == [(f"{part}/{name}/0.png", name) for name in ("cat", "dog")]
    assert listed(source.test) == [(f"{parts[2]}/cat/0.png", "cat")]
    assert source.template == "the {}"
    refuse(f"folder:{tmp_path},seed=3", "splits of its own", error=UsageError)
    fill(tmp_path / "valid", draw, ["cat"])
    refuse(f"folder:{tmp_path}", "two names for the same split")
    fill(tmp_path, draw, ["car"])
    refuse(f"folder:{tmp_path}", parts[0], "car/", "not a split")


def test_fewer_split_folders(tmp_path: Path, draw: Draw) -> None:
    names = ["cat", "dog"]
    fill(tmp_path / "a" / "train", draw, names)
    fill(tmp_path / "a" / "val", draw, names)
    source = load_classes(f"folder:{tmp_path / 'a'}")
    assert source.val is None
    assert listed(source.test)[0] == ("val/cat/0.png", "cat")
    fill(tmp_path / "b" / "test", draw, names)
    assert len(load_classes(f"folder:{tmp_path / 'b'}").train) == 0
    fill(tmp_path / "c" / "train", draw, ["train", *names], count=10)
    source = load_classes(f"folder:{tmp_path / 'c'}")
    assert (len(source.train), len(source.test), source.train.classes) == (15, 9, ("cat", "dog", "train"))
    fill(tmp_path / "d", draw, ["val", "car"], count=4)  # neither train nor test: classes, however they are called
    assert load_classes(f"folder:{tmp_path / 'd'}").test.classes == ("car", "val")


@pytest.mark.parametrize(
    ("count", "shares", "parts"),
    [
        (1, "test=0.3", (1, 0, 0)),
        (2, "test=0.1", (1, 0, 1)),
        (7, "seed=0", (4, 1, 2)),
        (2, "test=0.75,val=0.1", (1, 0, 1)),
        (3, "test=0.4,val=0.5", (1, 1, 1)),
    ],
)
def test_a_small_class_keeps_a_photo_to_train_on_then_one_to_test(
    tmp_path: Path, draw: Draw, count: int, shares: str, parts: tuple[int, int, int]
) -> None:
    fill(tmp_path, draw, ["small"], count=count)
    fill(tmp_path, draw, ["large"], count=10)
    source = load_classes(f"folder:{tmp_path},{shares}")
    splits = (source.train, source.val, source.test)
    assert tuple([name for _, name in listed(part)].count("small") for part in splits) == parts


def test_whole_tests_all_photos_that_would_be_shared_out(tmp_path: Path, draw: Draw) -> None:
    root = fill(tmp_path / "plain", draw, ["cat", "dog"], count=5)
    source = load_classes(f"folder:{root}", whole=True)
    assert listed(source.test) == [(f"{name}/{number}.png", name) for name in ("cat", "dog") for number in range(5)]
    assert (len(source.train), source.val) == (0, None)
    assert len(load_classes(f"folder:{root},test=0.4", whole=True).test) == 4  # shares that are asked for
    single = fill(tmp_path / "single", draw, ["cat", "dog"])
    assert len(load_classes(f"folder:{single}", whole=True).test) == 2
    rows = [{"image": f"{number}.png", "label": "ab"[number % 2]} for number in range(20)]
    assert len(load_classes(table(tmp_path / "t.csv", rows), whole=True).test) == 20
    parts = [{**row, "split": "Validation" if number < 4 else "train"} for number, row in enumerate(rows)]
    split = load_classes(table(tmp_path / "t.csv", parts), whole=True)
    assert (len(split.train), len(split.test)) == (16, 4)


def test_folders_that_do_not_do(tmp_path: Path, draw: Draw, refuse: Refuse) -> None:
    refuse(f"folder:{tmp_path / 'none'}", "is not a folder", "a folder per class")
    refuse(f"folder:{tmp_path}", "holds nothing")
    refuse(f"folder:{fill(tmp_path / 'one', draw, ['a', 'b'])}", "no test photos")
    fill(tmp_path / "a", draw, ["cat"], count=4)
    refuse(f"folder:{tmp_path / 'a'}", "1 class")
    (tmp_path / "a" / "dog").mkdir()
    refuse(f"folder:{tmp_path / 'a'}", "no photo", "'dog'")
    for option in ("test=0", "test=1", "val=-1", "test=0.6,val=0.4", "seed=x", "val=nan"):
        refuse(f"folder:{tmp_path / 'a'},{option}", option.partition("=")[0], error=UsageError)
    fill(tmp_path / "b" / "train", draw, ["cat", "dog"])
    fill(tmp_path / "b" / "test", draw, ["cat", "emu"])
    refuse(f"folder:{tmp_path / 'b'}", "train", "no photo", "'emu'")


def test_table_with_splits_and_names(tmp_path: Path, draw: Draw, refuse: Refuse) -> None:
    rows = [
        {"image": f"{split}{label}.png", "label": label, "classname": f"number {label}", "split": split}
        for split in ("train", "Dev", "test")
        for label in (10, 9)
    ]
    for row in rows:
        draw(tmp_path / "photos" / str(row["image"]))
    spec = table(tmp_path / "list.csv", rows)
    source = load_classes(f"{spec},root={tmp_path / 'photos'}")
    assert source.name == "list"
    assert source.test.classes == ("number 9", "number 10")
    assert listed(source.train) == [("train10.png", "number 10"), ("train9.png", "number 9")]
    assert listed(source.val)[0] == ("Dev10.png", "number 10")
    source.test.check_files()
    refuse(f"{spec},test=0.2", "splits of its own", error=UsageError)
    with pytest.raises(DataError, match=r"2 of 2 photos are missing, first .*train10\.png"):
        load_classes(spec).train.check_files()


def test_table_with_columns_of_other_names(tmp_path: Path) -> None:
    rows = [{"file": f"{number}.png", "kind": "cat" if number % 2 else "ant"} for number in range(20)]
    one, other = (
        load_classes(f"{table(tmp_path / 'mine.csv', some)},image=file,label=kind") for some in (rows, rows[::-1])
    )
    assert (one.test.classes, len(one.train), len(one.test)) == (("ant", "cat"), 10, 6)
    assert sorted(listed(one.test)) == sorted(listed(other.test))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image": "a.png"}, ["'a.png'", "2 times"]),
        ({"label": ""}, ["line 3", "no usable label"]),
        ({"split": "later"}, ["b.png", "'later'", "train"]),
        ({"label": "ant", "classname": "bug"}, ["class 0", "'ant'", "'bug'"]),
    ],
)
def test_tables_that_do_not_do(tmp_path: Path, refuse: Refuse, change: dict[str, str], words: list[str]) -> None:
    first = {"image": "a.png", "label": "ant", "split": "train", "classname": "ant"}
    second = {"image": "b.png", "label": "bee", "split": "test", "classname": "bee", **change}
    third = {"image": "c.png", "label": "bee", "split": "train", "classname": "bee"}
    refuse(table(tmp_path / "t.csv", [first, second, third]), *words)


def test_tables_without_what_is_needed(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "t.jsonl").write_text('{"image": "a.png", "label": "x"}\n{"image": "b.png"}\n')
    refuse(f"csv:{tmp_path / 't.jsonl'}", "line 2", "no usable label")
    spec = table(tmp_path / "t.csv", [{"path": "a.png", "label": "x"}])
    refuse(spec, "no column 'image'", "path, label", f"{spec},image=COLUMN")
    refuse(f"{spec},image=path,split=part", "no column 'part'")
    refuse(f"csv:{tmp_path / 'none.csv'}", "no such file")
    (tmp_path / "t.csv").write_text("image,label\n")
    refuse(spec, "no rows")
