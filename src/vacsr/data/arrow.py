"""Data sets in columns: Parquet files (``parquet:``), and what the library datasets loads (``hf:``).

A row has an image, as bytes or as a path, and one caption or a list of them. Rows with one image id are one image.
Photos stay encoded in memory, or in the files that datasets maps, until they are needed.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from vacsr.config.base import Config, did_you_mean
from vacsr.data.archives import FilePhoto, StoredPhoto, StoredPhotos
from vacsr.data.captions import photo_set
from vacsr.data.decode import PHOTO_BYTES
from vacsr.data.formats import OnError, Spec, register
from vacsr.data.photos import PhotoSet, content_fingerprint
from vacsr.data.shards import encoded_photo
from vacsr.data.tables import Rows, table_of_rows
from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, UsageError
from vacsr.files import atomic_paths, memory_bytes, reading

_DEV = ("validation", "valid", "val")  # what others call dev
_READERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}
_GROUP = 100  # rows that are written at a time, and that a reader decompresses at a time
_REPEATED = 16  # times that a value of a file may be in its rows, on average
_AT_ONCE = 1 << 28  # bytes of rows, as far as a file tells the truth about its sizes
_SCANNED = 1 << 28  # bytes of a Parquet file that is looked through before datasets unpacks it onto the disk


class Columns(Config):
    image: str = "image"
    caption: str = "caption"
    id: str = "image_id"


class HubOptions(Columns):
    config: str | None = None
    revision: str | None = None
    rows: int | None = Field(default=None, ge=1)
    streaming: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CellPhoto(StoredPhoto):
    """Encoded bytes in a row of a column."""

    cells: Any  # a pyarrow.ChunkedArray, mapped or in memory
    id: str
    row: int
    size: int  # -1 if the row has none
    source: str

    def name(self) -> str:
        return f"{self.source}, row {self.row}"

    def read(self) -> bytes:
        if not 0 <= self.size <= PHOTO_BYTES:
            raise DataError(f"{self.name()} has {self.size:,} bytes, the limit is {PHOTO_BYTES:,} — make it smaller")
        return self.cells[self.row].as_py()  # type: ignore[no-any-return]

    def version(self) -> int:
        return self.size

    def fingerprint(self) -> str:
        return content_fingerprint(self.read()) if self.exists() else ""


@register(
    "parquet", path="FILE", options=("image", "caption", "id", "split"), path_options=("root",), suffix=".parquet"
)
def load_parquet(spec: Spec, on_error: OnError) -> PhotoSet:
    """``parquet:FILE``: columns ``image`` (bytes, bytes and path, or a path in ``root``) and ``caption``.

    Optional columns: ``image_id``, ``caption_id`` and ``split``.
    """
    file, arrow = spec.location, _pyarrow()
    batches = list(_batches(file))
    table = arrow.Table.from_batches(batches[1:], schema=batches[0].schema)
    root = spec.path_option("root") or file.parent
    return _pairs(spec, {"": table}, spec.fill(Columns), root=root, on_error=on_error)


@register(
    "hf",
    path="DATASET",
    options=("config", "revision", "image", "caption", "id", "rows", "streaming", "split"),
    hub=True,
)
def load_hub(spec: Spec, on_error: OnError) -> PhotoSet:
    """``hf:DATASET``: an id of the Hub, or a file or folder; the columns are those of ``parquet:``.

    ``rows=N`` takes the first N rows of each split. ``streaming=true`` downloads no more than these.
    """
    options, wanted = spec.fill(HubOptions), spec.option("split")
    if options.streaming and options.rows is None:
        message = "streaming=true gives rows once, one after the other, and pairs are read in any order and repeatedly"
        raise UsageError(f"{spec}: {message} — add rows=N to hold the first N rows, or leave streaming out")
    splits = _load(spec, options)
    alias = _aliases(splits)
    chosen = {name: data for name, data in splits.items() if wanted in (name, alias[name])} or splits
    tables = {name: _as_table(data, options) for name, data in chosen.items()}
    root = spec.location if spec.location.is_dir() else spec.location.parent
    return _pairs(spec, tables, options, root=root, on_error=on_error)


def write_parquet(pairs: PhotoSet, path: Path) -> None:
    """One row per image, with its encoded photo and all its captions; datasets shows the photos too."""
    arrow = _pyarrow()
    text, texts = arrow.string(), arrow.list_(arrow.string())
    image = arrow.struct({"bytes": arrow.binary(), "path": text})
    fields = {"image": image, "image_id": text, "caption": texts, "caption_id": texts}
    fields |= {"split": text} if pairs.split != "all" else {}
    shown = json.dumps({"info": {"features": {"image": {"_type": "Image"}}}})
    schema = arrow.schema(fields.items(), metadata={"huggingface": shown})
    captions: list[list[int]] = [[] for _ in pairs.image_ids]
    for col, row in enumerate(pairs.caption_image.tolist()):
        captions[row].append(col)

    def written(row: int) -> dict[str, Any]:
        kind, data = encoded_photo(pairs, row, format="same")
        words = {"caption": pairs.captions, "caption_id": pairs.caption_ids}
        named = {name: [_utf8(values[col]) for col in captions[row]] for name, values in words.items()}
        own = {"bytes": data, "path": f"{row:09d}.{kind}"}
        return {"image": own, "image_id": _utf8(pairs.image_ids[row]), **named, "split": pairs.split}

    with atomic_paths(path) as (temporary,), arrow.parquet.ParquetWriter(temporary, schema) as writer:
        for start in range(0, len(captions), _GROUP):
            rows = [written(row) for row in range(start, min(start + _GROUP, len(captions)))]
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))


def _batches(file: Path) -> Iterator[Any]:
    """The rows of a Parquet file after an empty batch, which has the schema.

    A value that is stored once may be in every row, so that a small file unpacks to terabytes: what rows take is
    counted as they come, a few at a time.
    """
    arrow, limit = _pyarrow(), memory_bytes()
    with reading(file, limit=limit):
        try:
            parquet = arrow.parquet.ParquetFile(file, pre_buffer=False)  # a buffer would hold the file twice
            size = [parquet.metadata.row_group(number).total_byte_size for number in range(parquet.num_row_groups)]
            limit, taken = min(limit, _REPEATED * sum(size) + (1 << 30)), max(0, sum(size))
            if taken <= limit:
                yield arrow.RecordBatch.from_pylist([], schema=parquet.schema_arrow)
                rows, taken = min(1024, max(1, _AT_ONCE // max(1, *size, 1))), 0
                for batch in parquet.iter_batches(batch_size=rows):
                    held = (cells.indices if arrow.types.is_dictionary(cells.type) else cells for cells in batch)
                    if (taken := taken + sum(cells.nbytes for cells in held)) > limit:
                        break
                    yield batch
        except arrow.ArrowException as error:
            raise DataError(f"{file} is not a whole Parquet file ({error}) — write or copy it again") from error
    if taken > limit:
        raise DataError(f"{file} unpacks to more than {limit:,} bytes, which are the limit — split it")


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Columns of texts and numbers; None is null."""
    arrow = _pyarrow()
    cells = {k: [_utf8(cell) if isinstance(cell, str) else cell for cell in column] for k, column in columns.items()}
    with atomic_paths(path) as (temporary,):
        arrow.parquet.write_table(arrow.table(cells), temporary)


def _pyarrow() -> Any:
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet") from error
    return pyarrow


def _utf8(text: str) -> str:
    """Parquet holds no lone surrogates, which JSON allows."""
    return text.encode(errors="backslashreplace").decode()


def _load(spec: Spec, options: HubOptions) -> dict[str, Any]:
    """The splits of a data set, by their names there."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "datasets") from error
    place = spec.location
    try:
        if any((place / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(place))
        else:
            reader = _READERS.get(place.suffix.lower()) if place.is_file() else None
            if reader == "parquet" and place.stat().st_size <= _SCANNED:
                for _ in _batches(place):
                    pass
            loaded = datasets.load_dataset(
                reader or (str(place) if place.exists() else spec.path), options.config, revision=options.revision,
                data_files=str(place) if reader else None, streaming=options.streaming,
            )  # fmt: skip
    except (MemoryError, DataError):
        raise
    except ConnectionError as error:
        message = f"{spec}: no such file or folder, and the Hub does not answer ({error})"
        raise EnvironmentProblem(f"{message} — check the path or the network") from error
    except Exception as error:  # of many kinds, from builders and readers
        reason = " ".join(str(error).split())[:400]
        raise DataError(f"{spec} cannot be loaded ({reason}) — check the name, config= and revision=") from error
    return dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}


def _as_table(data: Any, options: HubOptions) -> Any:
    """One split as a pyarrow.Table with encoded photos."""
    if options.streaming:
        return _pyarrow().Table.from_pylist(list(data.decode(False).take(options.rows)))
    if options.rows is not None:
        data = data.select(range(min(options.rows, len(data))))
    return data.with_format("arrow")[:]


def _aliases(names: Collection[str]) -> dict[str, str]:
    """Splits as recipes call them.

    >>> _aliases(["train", "validation"])
    {'train': 'train', 'validation': 'dev'}
    """
    return {name: "dev" if name in _DEV and "dev" not in names else name for name in names}


def _pairs(spec: Spec, tables: Mapping[str, Any], columns: Columns, *, root: Path, on_error: OnError) -> PhotoSet:
    """Of tables by the name of their split, "" where only a column names it."""
    rows, photos = Rows(Path(spec.path), [], []), dict[str, StoredPhoto]()
    for split, table in tables.items():
        source = ", ".join(filter(None, (spec.path, split)))
        cells = _cells(table, columns, source=source, split=split)
        for row, (image, photo) in enumerate(_photos(table, columns, source=source, split=split, root=root)):
            where = f"{source}, row {row}"
            if _mark(photos.setdefault(image, photo)) != _mark(photo):
                message = f"{where}: {image!r} is another photo in an earlier row"
                raise DataError(f"{message} — name a column that gives each image its own: id=COLUMN")
            captions = _captions({name: values[row] for name, values in cells.items()}, where)
            rows.rows.extend({"image": image, **one} for one in captions)
            rows.locations.extend([where] * len(captions))
    alias, wanted = _aliases({row["split"] for row in rows.rows}), spec.option("split")
    rows.rows[:] = [{**row, "split": alias[row["split"]]} for row in rows.rows]
    named = table_of_rows(rows, photos=True)
    stored = StoredPhotos(tuple(photos[image] for image in named.image_ids))
    return photo_set(named, stored, split=wanted and alias.get(wanted, wanted), on_error=on_error)


def _cells(table: Any, columns: Columns, *, source: str, split: str) -> dict[str, list[Any]]:
    """The columns that hold no photos."""
    held = table.column_names
    if len(set(held)) < len(held):
        raise DataError(f"{source} has two columns of one name among {', '.join(held)} — rename one")
    for option, name in (("image", columns.image), ("caption", columns.caption)):
        if name not in held:
            message = f"{source} has no column {name!r}{did_you_mean(name, held)}, but {', '.join(held)}"
            raise DataError(f"{message} — name the one with {option}s: {option}=COLUMN")
    names = {"caption": columns.caption, "caption_id": "caption_id", "split": "split"}
    cells = {"split": [split or None] * len(table)}
    return cells | {key: table[name].to_pylist() for key, name in names.items() if name in held}


def _captions(cells: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One row per caption; a blank one where there is none."""
    texts = _listed(cells["caption"]) or [""]
    ids = _listed(cells["caption_id"]) or [where] if "caption_id" in cells else [None] * len(texts)
    if len(ids) != len(texts):
        raise DataError(f"{where} has {len(texts)} captions and {len(ids)} caption ids — give one each")
    return [{"caption": t, "caption_id": i, "split": cells["split"]} for t, i in zip(texts, ids, strict=True)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _mark(photo: StoredPhoto) -> object:
    """Equal for rows that hold one photo: comparing the bytes would read all of them."""
    return photo.size if isinstance(photo, CellPhoto) else photo.name()


def _photos(table: Any, columns: Columns, *, source: str, split: str, root: Path) -> Iterator[tuple[str, StoredPhoto]]:
    """Each row's image id and photo. Without a column of ids it is the path, or the name of the file, or the row."""
    data, paths = _bytes_and_paths(table[columns.image], columns.image, source=source)
    sizes = [None] * len(table) if data is None else _pyarrow().compute.binary_length(data).to_pylist()
    ids = table[columns.id].to_pylist() if columns.id in table.column_names else None
    folders = [os.path.dirname(path) for size, path in zip(sizes, paths, strict=True) if path and _is_file(size, path)]
    root = Path(os.path.abspath(root))
    base = Path(os.path.commonpath(folders)) if folders else root  # of what a library downloaded
    base, before = (root, "") if base.is_relative_to(root) else (base, split)
    photo: StoredPhoto
    for row, (size, path) in enumerate(zip(sizes, paths, strict=True)):
        if path is not None and _is_file(size, path):
            inside = os.path.relpath(path, base)
            name, photo = os.path.join(before, inside), FilePhoto(base, inside)
        elif path and size is None:
            name, photo = path, FilePhoto(root, path)
        else:
            name = os.path.join(split, os.path.basename(path) if path else str(row))
            photo = CellPhoto(data, name, row, -1 if size is None else size, source)
        if ids is not None and ids[row] is None:
            raise DataError(f"{source}, row {row} has no {columns.id} — give every row one, or name another: id=COLUMN")
        yield (name if ids is None else str(ids[row])), photo


def _is_file(size: int | None, path: str) -> bool:
    """Not bytes, but a path that needs no root."""
    return size is None and os.path.isabs(path)


def _bytes_and_paths(cells: Any, name: str, *, source: str) -> tuple[Any, list[str | None]]:
    """Columns of encoded photos, if there is one, and of paths."""
    data = paths = cells
    if str(cells.type).startswith("struct") and {"bytes", "path"} <= {part.name for part in cells.type}:
        data, paths = (_pyarrow().compute.struct_field(cells, part) for part in ("bytes", "path"))
    is_bytes, is_text = str(data.type) in ("binary", "large_binary"), str(paths.type) in ("string", "large_string")
    if not is_bytes and not is_text:
        message = f"{source}: column {name!r} holds {cells.type}, expected photos as bytes or paths"
        raise DataError(f"{message} — name another: image=COLUMN")
    return data if is_bytes else None, paths.to_pylist() if is_text else [None] * len(cells)
