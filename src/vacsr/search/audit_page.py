"""An audit on disk: four tables, and a page to send to the owner of the data.

The page has the counts, each suspect with its picture and caption, what would fit better, and near-duplicate photos.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vacsr.data import PairSet, PhotoSet, load_images
from vacsr.data.archives import StoredPhotos
from vacsr.data.arrow import write_table
from vacsr.data.formats import OnError
from vacsr.data.photos import Photos
from vacsr.errors import DataError, UsageError
from vacsr.files import csv_cell, write_text
from vacsr.pages.examples import Picture, photo_uri
from vacsr.pages.render import render
from vacsr.search.audit import DUPLICATE, AuditReport, Known

WRONG, MISSING, DUPLICATES, PAGE = "wrong.csv", "missing.csv", "duplicates.csv", "index.html"
ROWS = "rows.parquet"
TableFormat = Literal["csv", "parquet"]
Pictures = dict[str, tuple[Photos, int]]  # a photo by image id: row of some photos
_SIDE = 144  # of a picture in the page, in pixels
_SHOWN = 100  # suspects of each kind on the page; the CSV files hold all
_SIBLINGS = 5  # captions shown of an image
_KNOWN = ("score", "grade", "uncertainty", "agreement")
_WRONG_HEAD = (
    "rank", "suspicion", "image", "caption_id", "caption", *_KNOWN,
    "better_image", "better_image_grade", "better_image_agreement",
    "better_caption_id", "better_caption", "better_caption_grade", "better_caption_agreement", "line",
)  # fmt: skip
_MISSING_HEAD = (
    "rank", "image", "caption_id", "caption", *_KNOWN, "labelled_image", "labelled_grade", "labelled_agreement",
)  # fmt: skip
_DUPLICATES_HEAD = ("image", "other_image", "cosine", "same_file")
_ROWS_HEAD = (
    "image", "caption_id", "caption", "score", "suspicion", "wrong_probability", "is_wrong", "suggested_match",
    "suggested_caption_id",
)  # fmt: skip


def load_pictures(source: str, image_ids: Sequence[str], *, on_error: OnError = "fail") -> Pictures:
    """Photos of a folder or SPEC whose id, or else file name, an image has; a source of none of them is refused."""
    pairs = load_images(source, on_error=on_error)
    if not isinstance(pairs, PhotoSet):
        raise UsageError(f"--photos {source} holds embeddings, expected photos — give the folder they are in")
    photos = pairs.by_id()
    found = {name: photos[key] for name in image_ids for key in (Path(name).name, name) if key in photos}
    if image_ids and not found:
        message = f"--photos {source} has none of the data's images, such as {image_ids[0]!r}"
        raise DataError(f"{message} — give the folder in which files have these names, or leave --photos out")
    return found


def short_spec(spec: str) -> str:
    """File names without their folders, for a page that others may see.

    >>> short_spec("features:data/mine/vectors.safetensors,captions=/data/captions.json")
    'features:vectors.safetensors,captions=captions.json'
    """
    return re.sub(r"[^:,=]*/(?=[^/,])", "", spec)


def write_audit(
    folder: Path,
    report: AuditReport,
    pairs: PairSet | PhotoSet,
    *,
    title: str,
    photos: Pictures | None = None,
    lines: Mapping[str, int] | None = None,
    model: str = "",
    table: TableFormat = "csv",
) -> None:
    """Write all, each atomically. ``title`` names the data; ``photos`` are pictures for data that hold none.

    ``lines``: where each caption is in the file of the data, by its id, see :func:`vacsr.data.tables.caption_lines`.
    ``model``: what the page names as such. ``table``: the format of the rows of all captions.
    """
    lines = lines or {}
    if photos is None and isinstance(pairs, PhotoSet):
        photos = pairs.by_id()
    files = {
        WRONG: _csv(_WRONG_HEAD, _wrong_lines(report, pairs, lines)),
        MISSING: _csv(_MISSING_HEAD, _missing_lines(report, pairs)),
        DUPLICATES: _csv(_DUPLICATES_HEAD, _duplicate_lines(report, pairs)),
        PAGE: _page(report, _View(pairs, photos or {}, lines), title=title, model=model),
    }
    if table == "csv":
        files["rows.csv"] = _csv(_ROWS_HEAD, ([_as_cell(cell) for cell in row] for row in _rows(report, pairs)))
    else:
        write_table(folder / ROWS, dict(zip(_ROWS_HEAD, zip(*_rows(report, pairs), strict=True), strict=True)))
    for name, text in files.items():
        write_text(folder / name, text.encode(errors="backslashreplace").decode())  # UTF-8 has no lone surrogates


def _wrong_lines(report: AuditReport, pairs: PairSet | PhotoSet, lines: Mapping[str, int]) -> Iterable[list[str]]:
    for rank, pair in enumerate(report.wrong, start=1):
        line = [str(rank), f"{pair.suspicion:.4f}", _image(pairs, pair.row), *_caption(pairs, pair.col)]
        line += [*_values(pair.known), _image(pairs, pair.better_row), *_short(pair.better_image)]
        line += [*_caption(pairs, pair.better_col), *_short(pair.better_caption)]
        yield [*line, str(lines.get(pairs.caption_ids[pair.col], ""))]


def _missing_lines(report: AuditReport, pairs: PairSet | PhotoSet) -> Iterable[list[str]]:
    for rank, pair in enumerate(report.missing, start=1):
        line = [str(rank), _image(pairs, pair.row), *_caption(pairs, pair.col), *_values(pair.known)]
        yield [*line, _image(pairs, pair.own_row), *_short(pair.own)]


def _duplicate_lines(report: AuditReport, pairs: PairSet | PhotoSet) -> Iterable[list[str]]:
    for row, other, cosine in report.duplicates:
        same = ""
        if isinstance(pairs, PhotoSet) and isinstance(pairs.photos, StoredPhotos):
            same = str(int(pairs.photos.items[row].read() == pairs.photos.items[other].read()))
        yield [_image(pairs, row), _image(pairs, other), f"{cosine:.4f}", same]


def _rows(report: AuditReport, pairs: PairSet | PhotoSet) -> Iterable[list[Any]]:
    """Of every caption, as :data:`_ROWS_HEAD` names the cells."""
    ids, names, captions = pairs.caption_ids, pairs.image_ids, pairs.captions
    for col, one in enumerate(zip(*(part.tolist() for part in report.rows), strict=True)):
        image, score, suspicion, chance, wrong, better, other = one
        suggested = [names[better] if better >= 0 else None, ids[other] if other >= 0 else None]
        yield [names[image], ids[col], captions[col] if captions else None, score, suspicion, chance, wrong, *suggested]


def _as_cell(value: Any) -> str:
    """Of a CSV file: four digits, 0 or 1, nothing for what is unknown."""
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.4f}" if isinstance(value, float) else csv_cell(value)


def _image(pairs: PairSet | PhotoSet, row: int | None) -> str:
    return "" if row is None else csv_cell(pairs.image_ids[row])


def _caption(pairs: PairSet | PhotoSet, col: int | None) -> list[str]:
    if col is None:
        return ["", ""]
    return [csv_cell(pairs.caption_ids[col]), "" if pairs.captions is None else csv_cell(pairs.captions[col])]


def _values(known: Known) -> list[str]:
    return ["" if value is None else f"{value:.4f}" for value in known]


def _short(known: Known | None) -> list[str]:
    return ["", ""] if known is None else [_values(known)[1], _values(known)[3]]


def _csv(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows([head, *lines])
    return file.getvalue()


def _page(report: AuditReport, view: _View, *, title: str, model: str) -> str:
    wrong = [
        view.suspect("wrong", pair.row, pair.col, pair.known)
        | view.other_image(pair.better_row, pair.better_image, col=pair.col)
        | {"better_caption": "" if pair.better_col is None else view.pairs.words(pair.better_col)}
        | {"suspicion": pair.suspicion}
        for pair in report.wrong[:_SHOWN]
    ]
    missing = [
        view.suspect("missing", pair.row, pair.col, pair.known) | view.other_image(pair.own_row, pair.own, col=pair.col)
        for pair in report.missing[:_SHOWN]
    ]
    sigmas = [one["known"].uncertainty for one in (*wrong, *missing) if one["known"].uncertainty is not None]
    return render(
        "audit.html",
        title=title,
        model=model,
        duplicates=[
            (view.picture(one.row), view.picture(one.other_row), one.cosine) for one in report.duplicates[:_SHOWN]
        ],
        duplicate_total=len(report.duplicates),
        limit=DUPLICATE,
        images=len(view.pairs.image_ids),
        captions=len(view.pairs),
        lists={"wrong": wrong, "missing": missing},
        totals={"wrong": len(report.wrong), "missing": len(report.missing)},
        estimate=report.wrong_count,
        graded=report.usual_grade is not None,
        min_grade=report.min_grade,
        sigma=(min(sigmas, default=0.0), max(sigmas, default=0.0)),
        side=_SIDE,
    )


class _View:
    """Captions and pictures of one data set as the template reads them; every photo is read once."""

    def __init__(self, pairs: PairSet | PhotoSet, photos: Pictures, lines: Mapping[str, int]) -> None:
        self.pairs, self.photos, self.lines = pairs, photos, lines
        self._pictures: dict[int, Picture] = {}
        self._captions: dict[int, list[int]] = {}
        for col, row in enumerate(pairs.caption_image.tolist()):
            self._captions.setdefault(row, []).append(col)

    def siblings(self, row: int, *, without: int) -> list[str]:
        return [self.pairs.words(col) for col in self._captions.get(row, []) if col != without]

    def suspect(self, kind: str, row: int, col: int, known: Known) -> dict[str, Any]:
        """``cells``: what the page exports of it, beside the mark that a person gives it."""
        captions = self.siblings(row, without=col)[:_SIBLINGS]
        line = self.lines.get(self.pairs.caption_ids[col]) if kind == "wrong" else None
        cells = [kind, _image(self.pairs, row), *_caption(self.pairs, col), str(line or "")]
        shown = {"caption": self.pairs.words(col), "picture": self.picture(row), "known": known, "captions": captions}
        return {**shown, "cells": cells, "line": line, "suspicion": None, "other": None, "better_caption": ""}

    def other_image(self, row: int | None, known: Known | None, *, col: int) -> dict[str, Any]:
        """An image that fits better or is labelled, and a caption of it that is not ``col`` itself."""
        if row is None or known is None:
            return {}
        caption = next(iter(self.siblings(row, without=col)), "")
        return {"other": self.picture(row), "other_caption": caption, "other_agreement": known.agreement}

    def picture(self, row: int) -> Picture:
        """Without a photo where there is none, or where it cannot be read: one file must not cost the page."""
        if row not in self._pictures:
            name, uri = self.pairs.image_ids[row], ""
            if name in self.photos:
                photos, position = self.photos[name]
                try:
                    uri = photo_uri(photos.open(position, side=_SIDE), side=_SIDE)
                except DataError:
                    uri = ""
            self._pictures[row] = Picture(name, name, uri)
        return self._pictures[row]
