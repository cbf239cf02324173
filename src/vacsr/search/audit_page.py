"""The audit as a page that is one file: each suspect with its picture, its words, and what would fit better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from vacsr.data import PairSet, PhotoSet
from vacsr.data.photos import Photos
from vacsr.data.sources import FilePhotos
from vacsr.errors import DataError
from vacsr.report.html import Html, gauge, image, join, page, paragraph, section, tag, text
from vacsr.report.images import photo_uri
from vacsr.search.audit import AuditReport, Known, MissingMatch, WrongPair

SIDE = 144
"""Of a picture in the file, in pixels."""
SHOWN = 100
"""Suspects of each kind on the page; the CSV files hold all."""
_SIBLINGS = 5  # captions of an image that are told


class Pictures(NamedTuple):
    """Photos by image id."""

    row: Mapping[str, int]
    photos: Photos

    @classmethod
    def of(cls, pairs: PhotoSet) -> Pictures:
        """Those of a data set."""
        return cls({name: row for row, name in enumerate(pairs.image_ids)}, pairs.photos)

    @classmethod
    def lying_in(cls, folder: Path, image_ids: Sequence[str]) -> Pictures:
        """Files whose path inside the folder, or else whose name, is an image id; they need no captions."""
        places = ((name, path) for name in image_ids for path in (Path(name).name, name))
        known = {name: path for name, path in places if _lies_in(folder, path)}
        return cls({name: row for row, name in enumerate(known)}, FilePhotos(folder, tuple(known.values())))

    def check(self, image_ids: Sequence[str], *, source: str) -> None:
        """Raise where no image has a photo: ids of another data set."""
        if image_ids and not any(name in self.row for name in image_ids):
            message = f"--photos {source} has none of the data's images, such as {image_ids[0]!r}"
            raise DataError(f"{message} — give the folder in which files have these names, or leave --photos out")


def _lies_in(folder: Path, path: str) -> bool:
    """An id may be anything: also a way out of the folder, or longer than a name may be."""
    try:
        return ".." not in Path(path).parts and not Path(path).is_absolute() and (folder / path).is_file()
    except OSError:
        return False


def audit_page(
    report: AuditReport, pairs: PairSet | PhotoSet, *, title: str, photos: Pictures | None = None, shown: int = SHOWN
) -> str:
    """The whole page. ``title`` names the data; ``photos`` are pictures for data that hold none."""
    style = files("vacsr.search").joinpath("audit.css").read_text(encoding="utf-8")
    if photos is None and isinstance(pairs, PhotoSet):
        photos = Pictures.of(pairs)
    drawn = _Suspects(report, pairs, photos, shown=shown)
    facts = f"{title}: {len(pairs.image_ids):,} images, {len(pairs):,} captions with a label each."
    lead = "Pairs to look at first: labels that the model doubts, and matches that nobody noted. A person decides."
    links = [("wrong", "Suspected wrong pairs"), ("missing", "Suspected missing matches")]
    nav = tag("nav", join(*(tag("a", text(said), {"href": f"#{name}"}) for name, said in links)))
    meaning = (
        "Grade: the model's own, from 0 to 1. Agreement: cosine of the caption with the image and its other captions, "
        "which the lists are ranked by. σ, where the model has one: its uncertainty, which they are not ranked by."
    )
    head = join(
        paragraph("vacsr audit", style="brand"),
        tag("h1", text("Wrong pairs, missing matches")),
        paragraph(lead, style="lead"),
    )
    body = join(
        Html(f"<style>\n{style}</style>"),
        tag("header", join(head, paragraph(facts, style="note"), paragraph(meaning, style="note"), nav)),
        tag("main", join(drawn.wrong_section(), drawn.missing_section())),
    )
    return page(f"vacsr audit · {title}", body, description=lead)


class _Suspects:
    """Draws suspects of one data set; every photo is drawn once, and shown by reference to its row."""

    def __init__(self, report: AuditReport, pairs: PairSet | PhotoSet, photos: Pictures | None, *, shown: int) -> None:
        self.report, self.pairs, self.photos, self.shown = report, pairs, photos, shown
        self._uris: dict[int, str] = {}
        self._captions: dict[int, list[int]] = {}
        for col, row in enumerate(pairs.caption_image.tolist()):
            self._captions.setdefault(row, []).append(col)
        known = [pair.known for pair in report.wrong[:shown]]
        known += [pair.known for pair in report.missing[:shown]]
        sigmas = [one.uncertainty for one in known if one.uncertainty is not None] or [0.0]
        self._ends = (min(sigmas), max(sigmas))

    def wrong_section(self) -> Html:
        """Labelled, but doubted."""
        said = "These captions are labelled with the image beside them, and fit neither it nor its other captions well."
        cards = (self._wrong(rank, pair) for rank, pair in enumerate(self.report.wrong[: self.shown], start=1))
        return self._section("Suspected wrong pairs", said, cards, name="wrong", total=len(self.report.wrong))

    def missing_section(self) -> Html:
        """Not labelled, but taken for a match."""
        said = "These captions belong to another image, and fit this one and its captions too."
        if self.report.min_grade > 0:
            said += f" Only pairs that the model grades {self.report.min_grade:.2g} or more."
        cards = (self._missing(rank, pair) for rank, pair in enumerate(self.report.missing[: self.shown], start=1))
        return self._section("Suspected missing matches", said, cards, name="missing", total=len(self.report.missing))

    def _section(self, title: str, said: str, cards: Iterator[Html], *, name: str, total: int) -> Html:
        listed = f"The first {min(self.shown, total):,} of {total:,}; {name}.csv holds all." if total else "None found."
        body = [paragraph(said), paragraph(listed, style="note")]
        if total:
            body.append(tag("ol", join(*cards), {"class": "suspects"}))
        return section(title, join(*body), name=name)

    def _wrong(self, rank: int, pair: WrongPair) -> Html:
        others = [col for col in self._captions.get(pair.row, []) if col != pair.col]
        parts = [self._head(rank, pair.col), self._sides(pair.row, pair.known, others, other=True)]
        if pair.better_row is not None and pair.better_image is not None:
            parts.append(self._other("Fits better here", pair.better_row, pair.better_image, col=pair.col))
        if pair.better_col is not None:
            parts.append(_told("Another caption that fits this image:", self._words(pair.better_col)))
        return self._card("wrong", parts)

    def _missing(self, rank: int, pair: MissingMatch) -> Html:
        parts = [
            self._head(rank, pair.col),
            self._sides(pair.row, pair.known, self._captions.get(pair.row, []), other=False),
        ]
        parts.append(self._other("Labelled with this image", pair.own_row, pair.own, col=pair.col))
        return self._card("missing", parts)

    def _card(self, kind: str, parts: Sequence[Html]) -> Html:
        return tag("li", join(*parts), {"class": f"suspect {kind}" + ("" if self.photos is not None else " words")})

    def _head(self, rank: int, col: int) -> Html:
        number = tag("span", text(f"{rank}."), {"class": "no"})
        return tag("h3", Html(f"{number}{text(f'“{self._words(col)}”')}"))

    def _sides(self, row: int, known: Known, captions: Sequence[int], *, other: bool) -> Html:
        """The picture beside what the model knows and what else is said of the image."""
        lines = [gauge("grade", known.grade, ends=(0.0, 1.0), shown=_grade(known.grade))]
        lines.append(gauge("agreement", known.agreement, ends=(0.0, 1.0), shown=f"{known.agreement:.2f}"))
        if known.uncertainty is not None:
            lines.append(gauge("σ", known.uncertainty, ends=self._ends, shown=f"{known.uncertainty:.3f}", kind="dot"))
        said = [tag("li", text(self._words(col))) for col in captions[:_SIBLINGS]]
        if said:
            label = paragraph("Other captions of this image:" if other else "Captions of this image:", style="also")
            lines += [label, tag("ul", join(*said))]
        return tag("div", join(self._photo(row), tag("div", join(*lines))), {"class": "sides"})

    def _other(self, label: str, row: int, known: Known, *, col: int) -> Html:
        """Another image, told by a caption of it that is not ``col`` itself."""
        said = next((f"captioned “{self._words(own)}”" for own in self._captions.get(row, []) if own != col), "")
        lines = join(
            paragraph(f"{label}, {said or self.pairs.image_ids[row]}"),
            gauge("agreement", known.agreement, ends=(0.0, 1.0), shown=f"{known.agreement:.2f}"),
        )
        return tag("div", join(self._photo(row), tag("div", lines)), {"class": "other"})

    def _photo(self, row: int) -> Html:
        """The picture, or the image's id where there is none or it cannot be read."""
        name = self.pairs.image_ids[row]
        if self.photos is None or name not in self.photos.row:
            return paragraph(name, style="small")
        if row not in self._uris:
            self._uris[row] = self._uri(self.photos, self.photos.row[name])
        return image(self._uris[row], name, size=SIDE) if self._uris[row] else paragraph(name, style="small")

    @staticmethod
    def _uri(photos: Pictures, row: int) -> str:
        """Empty for a photo that cannot be read: one file must not cost the page."""
        try:
            return photo_uri(photos.photos.open(row, side=SIDE), side=SIDE)
        except DataError:
            return ""

    def _words(self, col: int) -> str:
        return self.pairs.caption_ids[col] if self.pairs.captions is None else self.pairs.captions[col]


def _grade(grade: float) -> str:
    """A wrong pair's is small, not nothing."""
    return f"{grade:.2f}" if grade >= 0.005 else "<0.01"


def _told(label: str, words: str) -> Html:
    return tag("p", Html(f"{text(label)} {tag('b', text(f'“{words}”'))}"), {"class": "told"})
