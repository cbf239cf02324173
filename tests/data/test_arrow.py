"""``parquet:`` and ``hf:`` on small files that pyarrow and the real library datasets wrote."""

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vacsr.data import PhotoSet, load_pairs, write_shards
from vacsr.data.arrow import write_parquet
from vacsr.data.decode import PHOTO_BYTES
from vacsr.data.formats import parse_spec
from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, NoSuchSplit, UsageError

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet: pip install 'vacsr[parquet]'")
parquet = pytest.importorskip("pyarrow.parquet")
COLOURS = ("red", "lime", "blue", "white")

PhotosOf = Callable[..., PhotoSet]
Refused = Callable[..., str]
Encode = Callable[..., bytes]
Draw = Callable[..., Path]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, with a cache of its own and no network."""
    datasets = pytest.importorskip("datasets", reason="needs the extra datasets: pip install 'vacsr[datasets]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture
def table(encode: Encode) -> dict[str, list[Any]]:
    """Four photos of one colour, with two captions, one, two and one."""
    captions = [[f"a {colour} square", "a square"][: 1 + (row % 2 == 0)] for row, colour in enumerate(COLOURS)]
    return {"image": [encode(colour) for colour in COLOURS], "caption": captions}


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def colours(pairs: PhotoSet) -> list[Any]:
    """The first pixel of each photo."""
    return [pairs.photos.open(row).getpixel((0, 0)) for row in range(len(pairs.photos))]


RGB = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]


# --------------------------------------------------------------------------------------------------------- parquet


@pytest.mark.parametrize("stored", ["bytes", "large bytes", "struct", "path"])
def test_photos_in_every_kind_of_column(
    stored: str, table: dict[str, list[Any]], photos_of: PhotosOf, draw: Draw, tmp_path: Path
) -> None:
    if stored == "large bytes":
        table["image"] = pyarrow.array(table["image"], pyarrow.large_binary())
    elif stored == "struct":
        table["image"] = [{"bytes": data, "path": f"{row}.png"} for row, data in enumerate(table["image"])]
    elif stored == "path":
        table["image"] = [draw(tmp_path / "p" / f"{one}.png", one).relative_to(tmp_path).as_posix() for one in COLOURS]
    pairs = photos_of(f"parquet:{write(tmp_path / 't.parquet', table)}")
    assert colours(pairs) == RGB
    assert pairs.caption_image.tolist() == [0, 0, 1, 2, 2, 3]
    assert pairs.captions[:3] == ("a red square", "a square", "a lime square")
    first = {"struct": "0.png", "path": "p/red.png"}.get(stored, "0")
    assert (pairs.image_ids[0], pairs.caption_ids[:2]) == (first, (f"{first}#0", f"{first}#1"))


def test_rows_with_one_caption_are_joined_by_the_image(encode: Encode, photos_of: PhotosOf, tmp_path: Path) -> None:
    red, blue = encode("red"), encode("blue", size=(9, 9))
    columns = {
        "photo": [red, blue, red], "text": ["one", "two", "three"], "name": ["r", "b", "r"],
        "caption_id": [7, 8, 9], "split": ["train", "val", "train"],
    }  # fmt: skip
    spec = f"parquet:{write(tmp_path / 't.parquet', columns)},image=photo,caption=text,id=name"
    pairs = photos_of(spec)
    assert pairs.image_ids == ("r", "b")
    assert dict(zip(pairs.caption_ids, pairs.captions, strict=True)) == {"7": "one", "8": "two", "9": "three"}
    assert pairs.caption_image.tolist() == [0, 1, 0]
    for name in ("dev", "val"):  # what recipes call it, and what the file calls it
        assert load_pairs(spec, split=name).image_ids == ("b",)


def test_written_pairs_are_read_again(photos_of: PhotosOf, hub: Any, tmp_path: Path) -> None:
    """The same data set, digest and fingerprints included, from both readers; datasets knows the photos."""
    drawn = photos_of("scenes:images=5,held_out=2,per_image=2,size=16", split="train")
    write_shards(drawn, tmp_path / "shards")
    pairs = photos_of(f"shards:{tmp_path}/shards/*.tar")
    file = tmp_path / "out.parquet"
    write_parquet(drawn, file)
    for spec in (f"parquet:{file}", f"hf:{file}"):
        again = photos_of(spec, split="train")
        assert again.labels().keys() == pairs.labels().keys()
        assert (again.image_ids, again.caption_ids, again.captions) == (
            pairs.image_ids,
            pairs.caption_ids,
            pairs.captions,
        )
        assert again.caption_image.equal(pairs.caption_image)
        assert [again.photos.items[row].read() for row in range(5)] == [
            pairs.photos.items[row].read() for row in range(5)
        ]  # type: ignore[attr-defined]
        fingerprints = [again.photos.fingerprint(row) for row in range(5)]
        assert len(set(fingerprints)) == 5
        assert fingerprints == [photos_of(spec).photos.fingerprint(row) for row in range(5)]
        assert pickle.loads(pickle.dumps(again.photos)).open(4).tobytes() == drawn.photos.open(4).tobytes()
    shown = hub.load_dataset("parquet", data_files=str(file))["train"]
    assert isinstance(shown.features["image"], hub.Image)
    assert shown[3]["image"].convert("RGB").tobytes() == drawn.photos.open(3).tobytes()


def test_other_bytes_are_another_fingerprint(encode: Encode, photos_of: PhotosOf, tmp_path: Path) -> None:
    """Also where the size stays."""
    one, other = (encode(colour, format="BMP") for colour in ("red", "blue"))
    assert len(one) == len(other)
    marks = []
    for data in (one, other):
        pairs = photos_of(f"parquet:{write(tmp_path / 't.parquet', {'image': [data], 'caption': ['a']})}")
        marks.append(pairs.photos.fingerprint(0))
    assert marks[0] != marks[1]


def test_unusable_rows_are_left_out_or_refused(
    table: dict[str, list[Any]], photos_of: PhotosOf, refused: Refused, tmp_path: Path
) -> None:
    table["image"][1], table["caption"][2], table["caption"][3] = None, [], [" "]
    table["caption_id"] = [["a", "b"], ["c"], [], ["d"]]
    spec = f"parquet:{write(tmp_path / 't.parquet', table)}"
    refused(spec, "t.parquet", "row 1", "no text", "row 2: no caption")
    with pytest.warns(UserWarning, match="left out"):
        assert photos_of(spec, on_error="skip").captions == ("a red square", "a square")


def test_faults_of_a_file_are_named(encode: Encode, refused: Refused, tmp_path: Path) -> None:
    file, red = tmp_path / "t.parquet", encode("red")

    def spec(**columns: Any) -> str:
        return f"parquet:{write(file, columns)}"

    refused(spec(image=[red], text=["a"]), "no column 'caption'", "image, text", "caption=COLUMN")
    refused(spec(img=[red], caption=["a"]), "no column 'image'", "image=COLUMN")
    refused(spec(image=[1], caption=["a"]), "int64", "image=COLUMN")
    refused(
        spec(image=[red, encode("red", size=(50, 50))], caption=["a", "b"], image_id=["x", "x"]), "'x'", "id=COLUMN"
    )
    refused(spec(image=[red], caption=["a"], image_id=[None]), "no image_id", "id=COLUMN")
    refused(spec(image=[red], caption=[["a", "b"]], caption_id=[["1"]]), "2 captions and 1 caption ids")
    refused(spec(image=[red] * 2, caption=["a", "b"], split=["train", None]), "split")
    refused(spec(image=[red], caption=["a"]), "split", error=NoSuchSplit, split="test")
    twice = pyarrow.Table.from_arrays([pyarrow.array([red]), *[pyarrow.array(["a"])] * 2], ["image", *["caption"] * 2])
    parquet.write_table(twice, file)
    refused(f"parquet:{file}", "two columns", "rename one")
    refused(f"{spec(image=[red], caption=['a'])},colum=x", "no option 'colum'", error=UsageError)
    file.write_bytes(b"PAR1 and no more")
    refused(f"parquet:{file}", "not a whole Parquet file")
    refused(f"parquet:{tmp_path}/none.parquet", "no such file")


def test_limits(encode: Encode, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small file that unpacks to more than fits, and a photo that is too large, are refused before they are read."""
    file = write(tmp_path / "t.parquet", {"image": [bytes(PHOTO_BYTES // 100)] * 3, "caption": ["a", "b", "c"]})
    monkeypatch.setattr("vacsr.data.arrow.memory_bytes", lambda: file.stat().st_size + 100_000)
    refused(f"parquet:{file}", "unpacks to")
    held = sum(column.nbytes for batch in parquet.ParquetFile(file).iter_batches() for column in batch)
    monkeypatch.setattr("vacsr.data.arrow.memory_bytes", lambda: held - 1)
    refused(f"parquet:{file}", "unpacks to")
    monkeypatch.setattr("vacsr.data.arrow.memory_bytes", lambda: held)
    pairs = load_pairs(f"parquet:{file}")
    monkeypatch.setattr("vacsr.data.arrow.PHOTO_BYTES", PHOTO_BYTES // 100)
    assert len(pairs.photos.items[0].read()) == PHOTO_BYTES // 100  # type: ignore[union-attr]
    monkeypatch.setattr("vacsr.data.arrow.PHOTO_BYTES", 1000)
    with pytest.raises(DataError, match="make it smaller"):
        pairs.photos.open(0)  # type: ignore[union-attr]


@pytest.mark.parametrize("column", ["image", "caption"])
def test_a_value_that_is_stored_once_and_repeated_in_every_row(
    column: str, encode: Encode, hub: Any, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A few kilobytes that stand for 400 MB: refused on the way, and before datasets unpacks them onto the disk."""
    rows = 4000
    columns: dict[str, Any] = {"image": [encode("red")] * rows, "caption": ["a"] * rows}
    value = bytes(100_000) if column == "image" else "a" * 100_000
    columns[column] = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows), pyarrow.array([value]))
    file = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table(columns), file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 100_000
    monkeypatch.setattr("vacsr.data.arrow.memory_bytes", lambda: 10_000_000)
    monkeypatch.setattr("vacsr.data.arrow._AT_ONCE", 4_000_000)
    before = pyarrow.default_memory_pool().max_memory()
    for spec in (f"parquet:{file}", f"hf:{file},rows=1"):
        refused(spec, "unpacks to")
    assert pyarrow.default_memory_pool().max_memory() < max(before + 1, 100_000_000), "only the first rows are unpacked"


def test_columns_with_categories(encode: Encode, photos_of: PhotosOf, tmp_path: Path) -> None:
    """As pandas writes them; their values are held once, however many rows there are."""
    captions, rows = ["a red square", "a square"], 3000
    columns = {
        "image": [encode("red")] * rows,
        "caption": pyarrow.array([captions[row % 2] for row in range(rows)]).dictionary_encode(),
        "split": pyarrow.array(["train"] * rows).dictionary_encode(),
    }
    pairs = photos_of(f"parquet:{write(tmp_path / 't.parquet', columns)}", split="train")
    assert (len(pairs), pairs.captions[:3]) == (rows, ("a red square", "a square", "a red square"))


def test_ids_of_files_and_bytes(draw: Draw, encode: Encode, photos_of: PhotosOf, tmp_path: Path) -> None:
    """Absolute paths inside the table's folder start there; a row that has its bytes needs no file."""
    inside = [str(draw(tmp_path / "a" / f"{one}.png", one)) for one in COLOURS]
    pairs = photos_of(f"parquet:{write(tmp_path / 't.parquet', {'image': inside, 'caption': list(COLOURS)})}")
    assert (colours(pairs), pairs.image_ids[0]) == (RGB, "a/red.png")
    image = [{"bytes": encode(one), "path": f"/nowhere/{one}.png"} for one in COLOURS]
    held = photos_of(f"parquet:{write(tmp_path / 'u.parquet', {'image': image, 'caption': list(COLOURS)})}")
    assert (colours(held), held.image_ids[0]) == (RGB, "red.png")


def test_validation_keeps_its_name_beside_a_split_dev(encode: Encode, photos_of: PhotosOf, tmp_path: Path) -> None:
    columns = {"image": [encode(one) for one in COLOURS[:2]], "caption": ["a", "b"], "split": ["dev", "validation"]}
    spec = f"parquet:{write(tmp_path / 't.parquet', columns)}"
    assert [photos_of(spec, split=name).captions for name in ("dev", "validation")] == [("a",), ("b",)]


def test_what_is_written_is_utf8_and_without_a_split_of_everything(photos_of: PhotosOf, tmp_path: Path) -> None:
    """JSON allows lone surrogates, and Parquet does not."""
    pairs = photos_of("scenes:images=1,held_out=1,per_image=1,size=16", split="all")
    odd = replace(pairs, captions=("half \udc80", *pairs.captions[1:]))
    write_parquet(odd, tmp_path / "t.parquet")
    stored = parquet.read_table(tmp_path / "t.parquet")
    assert "split" not in stored.column_names
    assert stored["caption"][0].as_py() == ["half \\udc80"]


# -------------------------------------------------------------------------------------------------------------- hf


def test_a_folder_of_images(hub: Any, draw: Draw, photos_of: PhotosOf, tmp_path: Path) -> None:
    """Ids are paths in the folder, as those of folder:; validation is dev."""
    for split, some in (("train", COLOURS[:3]), ("validation", COLOURS[3:])):
        lines = [{"file_name": draw(tmp_path / "d" / split / f"{one}.png", one).name, "text": one} for one in some]
        text = "\n".join(json.dumps(line) for line in lines)
        (tmp_path / "d" / split / "metadata.jsonl").write_text(text, encoding="utf-8")
    spec = f"hf:{tmp_path}/d,caption=text"
    every = photos_of(spec)
    assert every.image_ids == ("train/red.png", "train/lime.png", "train/blue.png", "validation/white.png")
    assert (colours(every), every.captions) == (RGB, COLOURS)
    for name in ("dev", "validation"):
        assert photos_of(spec, split=name).captions == ("white",)
    assert photos_of(f"{spec},split=train").photos.name(0) == f"{tmp_path}/d/train/red.png"


def test_files_elsewhere_have_ids_by_their_folders(
    draw: Draw, photos_of: PhotosOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a library downloads them; a path with .. starts at the table."""
    files = [draw(tmp_path / "cache" / f"{one}/1.png", one) for one in COLOURS]
    columns = {"image": [str(file) for file in files], "caption": list(COLOURS)}
    (tmp_path / "t").mkdir()
    pairs = photos_of(f"parquet:{write(tmp_path / 't/t.parquet', columns)}")
    assert (colours(pairs), pairs.image_ids[0]) == (RGB, "red/1.png")
    columns["image"] = [f"../cache/{one}/1.png" for one in COLOURS]
    monkeypatch.chdir(tmp_path)
    assert colours(photos_of(f"parquet:{write(tmp_path / 't/t.parquet', columns)}")) == RGB
    assert colours(photos_of(f"parquet:{tmp_path}/t/t.parquet,root={tmp_path}/t")) == RGB


def test_saved_data_keep_the_chosen_rows(
    hub: Any, table: dict[str, list[Any]], photos_of: PhotosOf, tmp_path: Path
) -> None:
    whole = hub.Dataset.from_dict(table).cast_column("image", hub.Image())
    hub.DatasetDict(train=whole.select([3, 1]), test=whole.select([0])).save_to_disk(tmp_path / "saved")
    pairs = photos_of(f"hf:{tmp_path}/saved", split="train")
    assert (colours(pairs), pairs.captions) == ([RGB[3], RGB[1]], ("a white square", "a lime square"))
    assert pairs.image_ids == ("train/0", "train/1")
    whole.save_to_disk(tmp_path / "one")
    assert photos_of(f"hf:{tmp_path}/one").describe() == "all: 4 photos, 6 captions, 1–2 per photo"


def test_a_split_column_wins(hub: Any, table: dict[str, list[Any]], photos_of: PhotosOf, tmp_path: Path) -> None:
    """As in Flickr30k on the Hub, which has all its images in one split."""
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "test.parquet", {**table, "split": ["train", "train", "val", "test"]})
    spec = f"hf:{tmp_path}/d"
    sizes = {name: len(photos_of(spec, split=name).image_ids) for name in ("train", "dev", "test", "all")}
    assert sizes == {"train": 2, "dev": 1, "test": 1, "all": 4}


@pytest.mark.parametrize("how", ["", ",streaming=true"])
def test_the_first_rows(how: str, hub: Any, table: dict[str, list[Any]], photos_of: PhotosOf, tmp_path: Path) -> None:
    table["other"] = [1.5, None, 2.5, 3.5]
    pairs = photos_of(f"hf:{write(tmp_path / 't.parquet', table)},rows=2{how}")
    assert (colours(pairs), pairs.captions) == (RGB[:2], ("a red square", "a square", "a lime square"))


def test_streaming_alone_is_refused(refused: Refused) -> None:
    refused("hf:user/data,streaming=true", "any order", "rows=N", error=UsageError)
    refused("hf:user/data,rows=0", "rows", error=UsageError)


def test_faults_of_the_hub_are_named(
    hub: Any, table: dict[str, list[Any]], refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "t.parquet", table)
    refused(f"hf:{file}", "train", error=NoSuchSplit, split="test")
    refused(f"hf:{file},caption=text", "train has no column 'text'", "caption=COLUMN")
    refused("hf:nobody/nothing", "Hub", "network", error=EnvironmentProblem)
    refused(f"hf:{tmp_path}/none", "cannot be loaded")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    refused(f"hf:{tmp_path}/broken.parquet", "not a whole Parquet file")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[datasets\]"):
        load_pairs(f"hf:{file}")


def test_parquet_names_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[parquet\]"):
        load_pairs(f"parquet:{tmp_path}/t.parquet")


def test_an_id_of_the_hub_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an index, which stores absolute paths."""
    monkeypatch.chdir(tmp_path)
    assert str(parse_spec("hf:user/data,caption=text").absolute()) == "hf:user/data,caption=text"
    (tmp_path / "user").mkdir()
    assert str(parse_spec("hf:user").absolute()) == f"hf:{tmp_path}/user"
