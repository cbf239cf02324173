"""An audit on disk: two CSV files, and a page with each suspect, its picture and caption, and what would fit better."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vacsr.data import PairSet, PhotoSet, load_images
from vacsr.data.archives import file_photos
from vacsr.data.formats import OnError
from vacsr.data.photos import Photos
from vacsr.errors import DataError, UsageError
from vacsr.files import csv_cell, write_text
from vacsr.pages.examples import Picture, photo_uri
from vacsr.pages.render import render
from vacsr.search.audit import AuditReport, Known

WRONG, MISSING, PAGE = "wrong.csv", "missing.csv", "index.html"
Pictures = dict[str, tuple[Photos, int]]
"""A photo by image id: row of some photos."""
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


def load_pictures(source: str, image_ids: Sequence[str], *, on_error: OnError = "fail") -> Pictures:
    """Photos of a folder of files, or of the data set of a SPEC; a source without any of these images is refused."""
    if Path(source).is_dir():
        pictures = pictures_in(Path(source), image_ids)
    else:
        pairs = load_images(source, on_error=on_error)
        if not isinstance(pairs, PhotoSet):
            raise UsageError(f"--photos {source} holds embeddings, expected photos — give the folder they are in")
        pictures = pairs.by_id()
    if image_ids and not any(name in pictures for name in image_ids):
        message = f"--photos {source} has none of the data's images, such as {image_ids[0]!r}"
        raise DataError(f"{message} — give the folder in which files have these names, or leave --photos out")
    return pictures


def pictures_in(folder: Path, image_ids: Sequence[str]) -> Pictures:
    """Files whose path inside the folder, or else whose name, is an image id."""
    candidates = ((name, path) for name in image_ids for path in (Path(name).name, name))
    paths = {name: path for name, path in candidates if _is_inside(folder, path)}
    photos = file_photos(folder, paths.values())
    return {name: (photos, row) for row, name in enumerate(paths)}


def _is_inside(folder: Path, path: str) -> bool:
    """An id may be anything: also a way out of the folder, or longer than a name may be."""
    try:
        return ".." not in Path(path).parts and not Path(path).is_absolute() and (folder / path).is_file()
    except OSError:
        return False


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
) -> None:
    """Write all three, each atomically. ``title`` names the data; ``photos`` are pictures for data that hold none.

    ``lines``: where each caption is in the file of the data, by its id, see :func:`vacsr.data.tables.caption_lines`.
    """
    lines = lines or {}
    if photos is None and isinstance(pairs, PhotoSet):
        photos = pairs.by_id()
    files = {
        WRONG: _csv(_WRONG_HEAD, _wrong_lines(report, pairs, lines)),
        MISSING: _csv(_MISSING_HEAD, _missing_lines(report, pairs)),
        PAGE: _page(report, _View(pairs, photos or {}, lines), title=title),
    }
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


def _page(report: AuditReport, view: _View, *, title: str) -> str:
    wrong = [
        view.suspect("wrong", pair.row, pair.col, pair.known)
        | view.other_image(pair.better_row, pair.better_image, col=pair.col)
        | {"better_caption": "" if pair.better_col is None else view.pairs.words(pair.better_col)}
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
        images=len(view.pairs.image_ids),
        captions=len(view.pairs),
        lists={"wrong": wrong, "missing": missing},
        totals={"wrong": len(report.wrong), "missing": len(report.missing)},
        estimate=report.estimated_wrong,
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
        return {**shown, "cells": cells, "line": line, "other": None, "better_caption": ""}

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
