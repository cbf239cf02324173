"""Queries and their answers as framed pictures and lists."""

from __future__ import annotations

from collections.abc import Sequence

from vacsr.data.scenes import SceneRenderer
from vacsr.demo.findings import KnownWorld
from vacsr.demo.gallery import Answer, Query
from vacsr.demo.result import OURS
from vacsr.report.cards import Shown, caption_answers, method_line, picture_answers, sigma_ends
from vacsr.report.html import Html, image, join, paragraph, tag, text
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
        self._ends = sigma_ends(_shown(answer, Html("")) for answer in every)

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
        found = [_shown(answer, self.scene(answer.place)) for answer in query.answers[method]]
        return join(method_line(method, rank=query.official[method]), picture_answers(found, ends=self._ends))

    def image_query(self, query: Query) -> Html:
        """An image with the best captions of the method with an uncertainty."""
        pairs = self.known.world.pairs
        own = int((pairs.caption_image == query.place).sum())
        found = [_shown(answer, text(pairs.captions[answer.place])) for answer in query.answers[OURS]]
        number = f"{query.true:,} of the {len(pairs.captions):,} captions are true of this scene; {own} are its own."
        body = join(paragraph(number, style="small"), caption_answers(found, ends=self._ends))
        return tag("article", join(self.scene(query.place), tag("div", body)), {"class": "query picture"})


def _shown(answer: Answer, item: Html) -> Shown:
    true = f"{100 * answer.share:.0f}% true"
    words = {"partly": true, "wrong": f"wrong ({100 * answer.share:.0f}%)"}.get(answer.verdict, BADGES[answer.verdict])
    return Shown(item, answer.verdict, words, answer.grade, answer.uncertainty)


def _true_of(number: int) -> str:
    return "True of one test image, its own." if number == 1 else f"True of {number} test images; one is labelled."
