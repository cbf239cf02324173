"""The gallery as HTML: queries with the answers of several rows, and pairs by interval of their grade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vacsr.report.cards import Ends, Shown, caption_answers, method_line, picture_answers, sigma_ends
from vacsr.report.gallery import Material, Query
from vacsr.report.html import Html, badge, card, gauge, image, join, paragraph, tag, text
from vacsr.report.images import photo_uri
from vacsr.report.intervals import Chosen, Interval, Words

SIDE = 176
"""Of a picture in the file, in pixels; it is shown a little smaller."""


class Pictures:
    """Draws photos of one data set, each once, and what stands around them."""

    def __init__(self, material: Material) -> None:
        self.material = material
        photos = material.photos
        self._rows = {} if photos is None else {name: row for row, name in enumerate(photos.image_ids)}
        self._drawn: dict[int, Html] = {}

    def photo(self, row: int) -> Html:
        """The photo of an image, or its own caption and its id where there is none."""
        if row not in self._drawn:
            self._drawn[row] = self._draw(row)
        return self._drawn[row]

    def _draw(self, row: int) -> Html:
        name = self.material.pairs.image_ids[row]
        photos = self.material.photos
        if photos is None or name not in self._rows:
            said = Html(f"{text(self._alt(row))} {tag('small', text(name))}")
            return tag("div", said, {"class": "nophoto"})
        opened = photos.photos.open(self._rows[name], side=SIDE)
        return image(photo_uri(opened, side=SIDE), self._alt(row), size=SIDE)

    def _alt(self, row: int) -> str:
        """What its first caption says."""
        pairs = self.material.pairs
        own = (pairs.caption_image == row).nonzero().flatten().tolist()
        return self.caption(own[0]) if own else pairs.image_ids[row]

    def caption(self, col: int) -> str:
        """Its words, or its id where these are unknown."""
        pairs = self.material.pairs
        return pairs.caption_ids[col] if pairs.captions is None else pairs.captions[col]

    def queries(self, queries: Sequence[Query]) -> Html:
        """Captions with their best images, then images with their best captions."""
        ends = self._ends(queries)
        return join(*(self._captioned(q, ends) if q.direction == "t2i" else self._pictured(q, ends) for q in queries))

    def _captioned(self, query: Query, ends: Mapping[str, Ends]) -> Html:
        parts = [tag("h3", text(f"“{self.caption(query.place)}”")), _known(query, "images")]
        for row in query.answers:
            found = picture_answers(self._shown(query, row), ends=ends[row])
            parts += [method_line(row, rank=query.official[row]), found]
        return tag("article", join(*parts), {"class": "query"})

    def _pictured(self, query: Query, ends: Mapping[str, Ends]) -> Html:
        sides = [
            tag("div", join(method_line(row, rank=query.official[row]),
                            caption_answers(self._shown(query, row), ends=ends[row])))
            for row in query.answers
        ]  # fmt: skip
        beside = tag("div", join(*sides), {"class": "beside"})
        body = tag("div", join(_known(query, "captions"), beside))
        return tag("article", join(self.photo(query.place), body), {"class": "query picture"})

    def _shown(self, query: Query, row: str) -> list[Shown]:
        return [
            Shown(
                self.photo(answer.place) if query.direction == "t2i" else text(self.caption(answer.place)),
                answer.verdict.kind,
                answer.verdict.words,
                answer.grade,
                answer.uncertainty,
            )
            for answer in query.answers[row]
        ]

    def _ends(self, queries: Sequence[Query]) -> dict[str, Ends]:
        """Of each row its own, over all its answers: rows measure σ in different ways."""
        rows = dict.fromkeys(row for query in queries for row in query.answers)
        return {row: sigma_ends(shown for query in queries for shown in self._shown(query, row)) for row in rows}

    def legend(self) -> Html:
        """What the frames mean."""
        items = [
            tag("li", Html(f"{badge(meaning.badge, kind=meaning.kind)} {text(meaning.said)}"))
            for meaning in self.material.verdicts.meanings
        ]
        return tag("ul", join(*items), {"class": "key"})

    def intervals(self, found: Sequence[Interval]) -> Html:
        """One card an interval, from low grades to high; of those without a pair only their ends are told."""
        words = Words.of(found)
        cards = [_interval(self, interval, interval.chosen, words) for interval in found if interval.chosen is not None]
        empty = [words.ends(interval) for interval in found if interval.chosen is None]
        drawn = tag("ol", join(*cards), {"class": "answers eight", "tabindex": "0"})
        if not empty:
            return drawn
        return join(drawn, paragraph(f"No pair has a grade of {', '.join(empty)}.", style="note"))


def _interval(pictures: Pictures, interval: Interval, pair: Chosen, words: Words) -> Html:
    count = f"{interval.pairs:,} pair{'' if interval.pairs == 1 else 's'}"
    lines = [
        tag("b", text(f"Grade {words.ends(interval)}")),
        tag("span", text(count), {"class": "small count"}),
        paragraph(pictures.caption(pair.col), style="said"),
        badge(pair.verdict.words, kind=pair.verdict.kind),
        gauge("grade", pair.grade, ends=(0.0, 1.0), shown=words.grade(pair.grade)),
    ]
    if pair.uncertainty is not None:
        lines.append(tag("span", text(f"σ {pair.uncertainty:.3f}"), {"class": "small count"}))
    return card(pictures.photo(pair.row), kind=pair.verdict.kind, lines=lines)


def _known(query: Query, what: str) -> Html:
    number = query.unlabelled
    if not number:
        return paragraph(f"No other match among the {what} is known.", style="small")
    noun = what.removesuffix("s") if number == 1 else what
    return paragraph(f"{number} more {noun} without a label {'is' if number == 1 else 'are'} known to match.",
                     style="small")  # fmt: skip
