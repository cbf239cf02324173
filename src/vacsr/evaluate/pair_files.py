"""Files about single pairs: tables of grades, preferences and rival scores, and vectors of captions.

A table is a TSV or CSV file in UTF-8 with a header. It names an image by ``image``, and a caption by ``caption_id``, by
``caption`` (the text), or by ``caption_image`` and ``caption_index``. Other columns are ignored.
"""

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vacsr.data.tables import read_rows
from vacsr.errors import DataError, ShapeMismatch
from vacsr.files import read_lines, read_tensors
from vacsr.provenance import UNKNOWN, Provenance

_TEXTS = ("caption", "negative_caption", "better", "worse")
Scored = Mapping[tuple[str, str], float]  # a score by image id and caption id, and by image id and text


@dataclass(frozen=True)
class PairTable:
    """The rows of a table; every row has a value in each column."""

    path: Path
    columns: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def need(self, *choices: str) -> Sequence[str]:
        """The first of these columns that there is."""
        for name in choices:
            if name in self.columns:
                return self.columns[name]
        message = f"{self.path} has no column {' or '.join(choices)}, only {', '.join(self.columns)}"
        raise DataError(f"{message} — rename the columns")

    def caption_ids(self) -> tuple[str, ...]:
        """The id of each row's caption: ``caption_id``, or ``caption_image#caption_index``, or else the text."""
        if "caption_image" not in self.columns:
            return tuple(self.need("caption_id", "caption"))
        indices = self.need("caption_index")
        for row, index in enumerate(indices):
            if not index.isdecimal():
                raise self.broken(row, "a caption index from 0")
        return tuple(f"{image}#{index}" for image, index in zip(self.need("caption_image"), indices, strict=True))

    def numbers(self, columns: Sequence[str]) -> list[list[float]]:
        """Finite numbers, row by row, at least one in each; an empty cell is left out."""
        rows = []
        for row, words in enumerate(zip(*(self.columns[name] for name in columns), strict=True)):
            try:
                values = [float(word) for word in words if word.strip()] or [math.nan]
            except ValueError:
                values = [math.nan]
            if not all(map(math.isfinite, values)):
                raise self.broken(row, f"numbers in {', '.join(columns)}")
            rows.append(values)
        return rows

    def broken(self, row: int, expected: str) -> DataError:
        """For a row without what was expected."""
        return DataError(f"{self.path}, line {row + 2}: expected {expected} — correct or drop the line")


def read_pair_table(path: Path) -> PairTable:
    """Read a table; the separator is a tab where the header has one, else a comma, with quotes as in CSV."""
    lines = read_lines(path) or [""]
    tabs = "\t" in lines[0]
    rows = [line.rstrip("\r").split("\t") for line in lines] if tabs else list(csv.reader(lines))
    header, *body = rows
    table = PairTable(path, dict(zip(header, zip(*body, strict=False), strict=False)))
    if "image" not in header:
        raise DataError(f"{path} has no column image, separated by tabs or commas — rename the columns")
    if not body:
        raise DataError(f"{path} holds no rows below its header, expected one pair per line — write or copy it again")
    named = {"image", "caption_id", "caption_image", *_TEXTS}.intersection(header)
    for row, cells in enumerate(body):
        if len(cells) != len(header) or not all(cells[header.index(name)].strip() for name in named):
            raise table.broken(row, f"{len(header)} columns, and image and caption not blank")
    return table


@dataclass(frozen=True)
class Preferences:
    """N images with a caption that people prefer, and one that fits less."""

    name: str
    image_ids: tuple[str, ...]
    better: tuple[str, ...]  # texts
    worse: tuple[str, ...]
    kinds: tuple[str, ...]  # what the worse caption has wrong; empty where the file does not say


def read_preferences(path: Path, *, name: str = "") -> Preferences:
    """Columns: image, better (or caption), worse (or negative_caption), and perhaps kind."""
    table = read_pair_table(path)
    better, worse = table.need("better", "caption"), table.need("worse", "negative_caption")
    kinds = tuple(table.columns.get("kind", ()))
    return Preferences(name or stem_of(path), tuple(table.need("image")), tuple(better), tuple(worse), kinds)


def read_rival(path: Path) -> Scored:
    """Another system's scores: a table with a column ``score``."""
    table = read_pair_table(path)
    table.need("score")
    scores = [values[0] for values in table.numbers(["score"])]
    scored: dict[tuple[str, str], float] = {}
    for names in (table.caption_ids(), table.columns.get("caption", ())):
        scored |= {(image, name): score for image, name, score in zip(table.need("image"), names, scores, strict=False)}
    return scored


@dataclass(frozen=True, eq=False)
class CaptionVectors:
    """Text features of captions that need not be in the data, by id and by exact text."""

    vectors: Tensor  # [C, D] float32
    rows: Mapping[str, int]
    provenance: Provenance = UNKNOWN


def read_caption_vectors(path: Path) -> CaptionVectors:
    """A safetensors file with ``text`` [C, D], and names: a tensor ``caption_id`` [C], or a file beside it.

    That file is ``NAME-captions.jsonl``, as ``vacsr embed --captions`` writes it: one object per row of ``text``.
    """
    tensors, metadata = read_tensors(path)
    if "text" not in tensors or tensors["text"].ndim != 2:
        raise DataError(f"{path} has no tensor text [captions, dims] — write it with: vacsr embed --captions FILE")
    vectors, lines = tensors["text"].float(), path.with_name(f"{path.stem}-captions.jsonl")
    columns: list[Sequence[str]] = []
    if "caption_id" in tensors:
        columns.append([str(name) for name in tensors["caption_id"].tolist()])
    if lines.is_file():
        table = read_rows(lines)
        columns += [names for column in ("caption_id", "caption") if (names := table.column(column)) is not None]
    if not columns:
        raise DataError(f"{path} does not name its captions — add a tensor caption_id, or {lines.name} beside it")
    if any(len(names) != len(vectors) for names in columns):
        counts = ", ".join(f"{len(names):,}" for names in columns)
        raise ShapeMismatch(f"{path} has {len(vectors):,} vectors and {counts} names — write both again")
    named = {name: row for names in columns for row, name in enumerate(names)}
    return CaptionVectors(vectors, named, Provenance.from_metadata(metadata))


def join_vectors(parts: Sequence[CaptionVectors]) -> CaptionVectors | None:
    """Those of several files; None of none."""
    if not parts:
        return None
    provenance = next((part.provenance for part in parts if part.provenance.backbone), UNKNOWN)
    rows: dict[str, int] = {}
    start = 0
    for part in parts:
        provenance.check(part.provenance)
        if part.vectors.shape[1] != parts[0].vectors.shape[1]:
            widths = f"{parts[0].vectors.shape[1]} and {part.vectors.shape[1]}"
            raise ShapeMismatch(f"vectors of captions have {widths} dims — embed them all with the same encoder")
        rows |= {name: start + row for name, row in part.rows.items()}
        start += len(part.vectors)
    return CaptionVectors(torch.cat([part.vectors for part in parts]), rows, provenance)


def read_caption_list(path: Path) -> list[str]:
    """Every text once: the lines of a .txt file, or the texts of a table of grades or preferences."""
    if path.suffix.lower() == ".txt":
        return list(dict.fromkeys(line.rstrip("\r") for line in read_lines(path)))
    table = read_pair_table(path)
    texts = [text for name in _TEXTS for text in table.columns.get(name, ())]
    return list(dict.fromkeys(texts or table.need("caption")))


def named_file(text: str) -> tuple[str, Path]:
    """``NAME=FILE`` or ``FILE``, whose name is that of the file without its suffix.

    >>> named_file("cxc=data/cxc-grades.tsv")[0], named_file("data/cxc-grades.tsv")[0]
    ('cxc', 'cxc-grades')
    """
    match = re.fullmatch(r"([\w-]+)=(.+)", text)
    path = Path(match[2] if match else text).expanduser()
    return (match[1] if match else stem_of(path)), path


def stem_of(path: Path) -> str:
    """A file's name as a key of the JSON, which has no dots.

    >>> stem_of(Path("data/grades.v2.tsv"))
    'grades-v2'
    """
    return path.stem.replace(".", "-")
