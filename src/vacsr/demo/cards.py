"""Queries and their answers as framed pictures and lists."""

from __future__ import annotations

from collections.abc import Sequence

from vacsr.data.scenes import SceneRenderer
from vacsr.demo.findings import KnownWorld
from vacsr.demo.gallery import Answer, Query
from vacsr.demo.result import OURS
from vacsr.report.html import Html, badge, card, gauge, image, join, paragraph, tag, text
from vacsr.report.images import data_uri

PIXELS = 192
"""Side of a picture in the file; it is shown a little smaller."""
STRIP = 8
_SAID = 3  # captions below a scene of the strip
BADGES = {
    "official": "official match",
    "unlabelled": "true, unlabelled",
    "partly": "partly true",
    "wrong": "wrong",
}


class Cards:
    """Draws scenes of one world; every scene once."""

    def __init__(self, known: KnownWorld, queries: Sequence[Query]) -> None:
        self.known, self.queries = known, queries
        self._renderer = SceneRenderer(PIXELS)
        self._uris: dict[int, str] = {}
        every = [answer for query in queries for found in query.answers.values() for answer in found]
        sigmas = [answer.uncertainty for answer in every if answer.uncertainty is not None] or [0.0]
        self._ends = min(sigmas), max(sigmas)

    def scene(self, row: int) -> Html:
        """The picture of an image."""
        if row not in self._uris:
            self._uris[row] = data_uri(self._renderer.render(self.known.world.scenes[row]))
        return image(self._uris[row], self._alt(row), size=PIXELS)

    def _alt(self, row: int) -> str:
        """What a scene shows, in words."""
        scene = self.known.world.scenes[row]
        things = ", ".join(f"{thing.size} {thing.colour} {thing.shape}" for thing in scene.things)
        return f"Background {scene.background}, with {things or 'nothing'}"

    def strip(self) -> Html:
        """The first scenes with some of their captions."""
        pairs = self.known.world.pairs
        items = []
        for row in range(min(STRIP, len(pairs.image_ids))):
            own = (pairs.caption_image == row).nonzero().flatten().tolist()[:_SAID]
            said = tag("ul", join(*(tag("li", text(pairs.captions[column])) for column in own)))
            items.append(tag("li", join(self.scene(row), said)))
        return tag("ul", join(*items), {"class": "strip"})

    def caption_query(self, query: Query) -> Html:
        """A caption with the best images of every method; those without σ fold away."""
        said = self.known.world.pairs.captions[query.place]
        head = join(tag("h3", text(f"“{said}”")), paragraph(_true_of(query.true), style="small"))
        others = [name for name in query.answers if name != OURS]
        shown = [self._images(query, name) for name in query.answers if name == OURS]
        if others:
            summary = tag("summary", text(f"The answers of {' and '.join(others)}"))
            shown.append(tag("details", join(summary, *(self._images(query, name) for name in others))))
        return tag("article", join(head, *shown), {"class": "query"})

    def _images(self, query: Query, method: str) -> Html:
        cards = [
            card(self.scene(answer.place), kind=answer.verdict, lines=self._lines(answer))
            for answer in query.answers[method]
        ]
        return join(_method(query, method), tag("ol", join(*cards), {"class": "answers", "tabindex": "0"}))

    def image_query(self, query: Query) -> Html:
        """An image with the best captions of the method with an uncertainty."""
        captions, own = (
            self.known.world.pairs.captions,
            int((self.known.world.pairs.caption_image == query.place).sum()),
        )
        items = []
        for answer in query.answers[OURS]:
            words = Html(text(captions[answer.place]) + " " + _badge(answer))
            inner = join(tag("span", words), tag("span", join(*self._gauges(answer))))
            items.append(tag("li", inner, {"class": answer.verdict}))
        number = f"{query.true:,} of the {len(captions):,} captions are true of this scene; {own} are its own."
        body = join(paragraph(number, style="small"), tag("ol", join(*items), {"class": "found"}))
        return tag("article", join(self.scene(query.place), tag("div", body)), {"class": "query picture"})

    def _lines(self, answer: Answer) -> list[Html]:
        return [_badge(answer), *self._gauges(answer)]

    def _gauges(self, answer: Answer) -> list[Html]:
        drawn = [gauge("grade", answer.grade, ends=(0.0, 1.0), shown=f"{answer.grade:.2f}")]
        if answer.uncertainty is not None:
            sigma = answer.uncertainty
            drawn.append(gauge("σ", sigma, ends=self._ends, shown=f"{sigma:.3f}", kind="dot"))
        return drawn


def _method(query: Query, method: str) -> Html:
    rank = query.official[method]
    words = Html(f"{tag('b', text(method))} · official match at rank {rank}")
    return tag("p", words, {"class": "method"})


def _badge(answer: Answer) -> Html:
    true = f"{100 * answer.share:.0f}% true"
    words = {"partly": true, "wrong": f"wrong ({100 * answer.share:.0f}%)"}.get(answer.verdict, BADGES[answer.verdict])
    return badge(words, kind=answer.verdict)


def _true_of(number: int) -> str:
    return "True of one test image, its own." if number == 1 else f"True of {number} test images; one is labelled."
