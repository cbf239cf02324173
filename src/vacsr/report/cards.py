"""Answers to a query as framed pictures or as a list of captions. The frame says what is known of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vacsr.report.html import Html, badge, card, gauge, join, tag, text

Ends = tuple[float, float]


class Shown(NamedTuple):
    """One answer as it is shown."""

    item: Html
    """A picture, or a caption."""
    kind: str
    """A frame of page.css: official, unlabelled, partly, wrong or unknown."""
    badge: str
    grade: float
    """The method's own, from 0 to 1."""
    uncertainty: float | None = None


def sigma_ends(answers: Iterable[Shown]) -> Ends:
    """The lowest and the highest σ among answers, between which every σ is placed; (0, 0) where there is none."""
    found = [answer.uncertainty for answer in answers if answer.uncertainty is not None] or [0.0]
    return min(found), max(found)


def picture_answers(answers: Sequence[Shown], *, ends: Ends) -> Html:
    """Framed pictures in a row, best first."""
    drawn = [
        card(answer.item, kind=answer.kind, lines=[badge(answer.badge, kind=answer.kind), *_gauges(answer, ends)])
        for answer in answers
    ]
    return tag("ol", join(*drawn), {"class": "answers", "tabindex": "0"})


def caption_answers(answers: Sequence[Shown], *, ends: Ends) -> Html:
    """Captions one below the other, best first."""
    items = []
    for answer in answers:
        words = Html(f"{answer.item} {badge(answer.badge, kind=answer.kind)}")
        inner = join(tag("span", words), tag("span", join(*_gauges(answer, ends))))
        items.append(tag("li", inner, {"class": answer.kind}))
    return tag("ol", join(*items), {"class": "found"})


def _gauges(answer: Shown, ends: Ends) -> list[Html]:
    drawn = [gauge("grade", answer.grade, ends=(0.0, 1.0), shown=f"{answer.grade:.2f}")]
    if answer.uncertainty is not None:
        drawn.append(gauge("σ", answer.uncertainty, ends=ends, shown=f"{answer.uncertainty:.3f}", kind="dot"))
    return drawn


def method_line(method: str, *, rank: int) -> Html:
    """Whose answers follow, and where the official match came."""
    words = Html(f"{tag('b', text(method))} · official match at rank {rank:,}")
    return tag("p", words, {"class": "method"})
