"""The demo's page: one file with the table, the figures and a grid of queries."""

from __future__ import annotations

from collections.abc import Mapping

from vacsr.data.scenes import EASY_BELOW, HARD_FROM
from vacsr.demo.cards import BADGES, Cards
from vacsr.demo.charts import accuracy_by_sigma, risk_by_coverage, score_by_kind, sigma_by_kind
from vacsr.demo.findings import DIRECTIONS, Findings
from vacsr.demo.gallery import IMAGES, TRUE_OF
from vacsr.demo.result import FIGURES, OURS, Demo, best_methods
from vacsr.demo.text import KIND_NAMES, METHODS_SAID, claim
from vacsr.evaluate.exact import spread
from vacsr.report.html import (
    Cell,
    Html,
    Row,
    badge,
    command,
    figure,
    join,
    page,
    paragraph,
    section,
    table,
    tag,
    text,
)

_TITLE = "Image–text similarity with a grade and an uncertainty"
_LEAD = (
    "vacsr learns how well a sentence fits a picture, as a grade between 0 and 1, and how sure it is, as an "
    "uncertainty σ. Here it was trained beside two common losses in a small generated world of pictures, where it is "
    "known of every sentence and every picture whether they truly match."
)
_PARTS = {"world": "The world", "table": "The table", "sigma": "Uncertainty", "scores": "Scores",
          "answers": "Answers", "next": "Go on"}  # fmt: skip


def demo_page(demo: Demo, *, commands: Mapping[str, str]) -> str:
    """The whole page. ``commands`` are what to type next, by what they do."""
    cards = Cards(demo.known, demo.queries)
    parts = [_header(), _world(demo, cards), _table(demo)]
    ours = demo.findings.get(OURS)
    if ours is not None:
        parts.append(_sigma(demo, ours))
    parts += [_scores(demo), _answers(demo, cards), _next(commands)]
    body = join(parts[0], tag("main", join(*parts[1:])), _footer(demo))
    return page(f"vacsr demo · {_TITLE}", body, description=_LEAD)


def _header() -> Html:
    links = [tag("a", text(name), {"href": f"#{anchor}"}) for anchor, name in _PARTS.items()]
    nav = tag("nav", join(*links), {"aria-label": "Parts of this page"})
    brand = paragraph("vacsr demo", style="brand")
    return tag("header", join(brand, tag("h1", text(_TITLE)), paragraph(_LEAD, style="lead"), nav))


def _world(demo: Demo, cards: Cards) -> Html:
    facts = demo.known.facts
    tiles = {
        "images a caption is true of, on average; it is labelled with one": f"{facts.images_per_caption:.1f}",
        "of the true pairs carry no label": f"{facts.unlabelled_share:.0f}%",
        "false negatives: true pairs that the labels call wrong": f"{facts.false_negatives:,}",
        "images and captions to test on, none seen in training": f"{facts.images:,} · {facts.captions:,}",
    }
    shown = [tag("div", join(tag("dd", text(value)), tag("dt", text(name)))) for name, value in tiles.items()]
    words = (
        "Scenes are drawn at random: a background and a few things, each with a shape, a colour, a size and a place. "
        "Every scene gets five captions that are true of it. As in collections of photos, a caption is labelled as its "
        "own scene's only, though it is often true of others too. Methods learn from these labels and never see the "
        "truth; this page measures them against both."
    )
    strip = join(tag("h3", text("The first scenes of the test split, with three of their captions")), cards.strip())
    return section(_PARTS["world"], join(paragraph(words), tag("dl", join(*shown), {"class": "facts"}), strip),
                   name="world")  # fmt: skip


def _table(demo: Demo) -> Html:
    rows = []
    for row in FIGURES:
        best = best_methods(demo.findings, row)
        cells = [Cell(row.show(found.figures[row.key]), best=name in best) for name, found in demo.findings.items()]
        rows.append(Row(_unbroken(row.title), cells, row.meaning))
    caption = f"Test split, seed {demo.seed}, one run a method. ↑ higher is better, ↓ lower is better, – has no σ. "
    drawn = table(["figure", *demo.findings], rows, caption=f"{caption}The best is bold.")
    words = (
        "One world and one seed: before you trust a small difference, repeat with another. The numbers are shown as "
        "they came out."
    )
    return section(_PARTS["table"], join(paragraph(METHODS_SAID), drawn, paragraph(words, style="note")), name="table")


def _unbroken(title: str) -> str:
    """An arrow stays with its name, and a hyphen with its word, where lines are short."""
    return title.replace(" ↑", "\u00a0↑").replace(" ↓", "\u00a0↓").replace("-", "\u2011")


def _sigma(demo: Demo, ours: Findings) -> Html:
    kinds = (
        f"Every pair of the test split is of a known kind. Positives are labelled; false negatives are wholly true but "
        f"unlabelled; hard negatives are at least {HARD_FROM:.0%} true but not wholly; easy negatives are less than "
        f"{EASY_BELOW:.0%} true."
    )
    by_kind = figure(
        sigma_by_kind(ours),
        "All curves have the same height; the stroke is the median. Of very many pairs a sample is drawn.",
        title="σ by kind of pair",
    )
    bins = [
        figure(
            accuracy_by_sigma(ours.top[direction], direction=direction),
            f"{len(ours.top[direction].true):,} queries. If σ is worth something, the line falls.",
            title=f"σ and the best answer, {name}",
        )
        for direction, name in DIRECTIONS.items()
    ]
    risk = figure(
        risk_by_coverage(demo.findings, direction="t2i"),
        f"{demo.known.facts.captions:,} captions; mistakes by the truth. On the far right all answers are kept; a good "
        "measure of doubt makes the line fall to the left.",
        title="Keep only the surest answers, text to image",
    )
    body = join(
        paragraph(kinds),
        paragraph(claim(ours), style="verdict"),
        _kinds_table(ours),
        tag("div", join(by_kind, risk, *bins), {"class": "figures two"}),
    )
    return section("Does the uncertainty know the false negatives?", body, name="sigma")


def _kinds_table(ours: Findings) -> Html:
    above = ours.sigma_above or {}
    rows = []
    for kind, name in KIND_NAMES.items():
        values = ours.kinds[kind]
        assert values.uncertainty is not None, "vacsr has an uncertainty"
        found = spread(values.uncertainty)
        above_it = f"{above[kind]:.1f}%" if kind in above else "–"
        cells = [f"{values.total:,}", f"{found.median:.3f}", above_it]
        rows.append(Row(name, [Cell(cell) for cell in cells]))
    caption = "vacsr's σ. FN higher: how often a false negative (FN) has a higher σ than a pair of this kind."
    return table(["pairs", "number", "σ median", "FN higher"], rows, caption=caption)


def _scores(demo: Demo) -> Html:
    words = (
        "Labels say 1 for positives and 0 for all others. A good score still puts false negatives beside the "
        "positives, and hard negatives between them and the easy ones."
    )
    drawn = [
        figure(score_by_kind(name, found), _above(found), title=f"Score of {name}")
        for name, found in demo.findings.items()
    ]
    return section("Scores by kind of pair", join(paragraph(words), tag("div", join(*drawn), {"class": "figures"})),
                   name="scores")  # fmt: skip


def _above(found: Findings) -> str:
    above = found.score_above
    return (
        f"A false negative scores above a positive {above['positives']:.0f}% of the time (50% would be alike), above a "
        f"hard negative {above['hard']:.0f}% and above an easy one {above['easy']:.0f}%."
    )


def _answers(demo: Demo, cards: Cards) -> Html:
    numbers = ", ".join(map(str, TRUE_OF[:-1])) + f" and {TRUE_OF[-1]}"
    rule = (
        f"The queries were fixed before any score was seen: the first test captions that are true of {numbers} images "
        f"(or of the nearest number there is), and the first {IMAGES} test images."
    )
    meaning = {
        "official": "the labelled pair",
        "unlabelled": "wholly true, a false negative",
        "partly": f"the share of the caption that is true, {EASY_BELOW:.0%} or more",
        "wrong": f"less than {EASY_BELOW:.0%} is true; the share follows",
    }
    key = [tag("li", Html(f"{badge(BADGES[kind], kind=kind)} {text(said)}")) for kind, said in meaning.items()]
    bars = (
        "Grades run from 0 to 1: for sigmoid and vacsr the chance of a label, for infonce the cosine moved to 0–1. "
        "The dot places σ between the lowest (left) and the highest (right) among these answers."
    )
    captions = [cards.caption_query(query) for query in demo.queries if query.direction == "t2i"]
    images = [cards.image_query(query) for query in demo.queries if query.direction == "i2t" and OURS in query.answers]
    body = join(
        paragraph(rule),
        tag("ul", join(*key), {"class": "key"}),
        paragraph(bars, style="note"),
        *captions,
        tag("h3", text("And from image to text"), {"class": "part"}),
        *images,
    )
    return section("Queries and their five best answers", body, name="answers")


def _next(commands: Mapping[str, str]) -> Html:
    parts = [join(paragraph(what), command(line)) for what, line in commands.items()]
    return section("Go on", join(*parts), name="next")


def _footer(demo: Demo) -> Html:
    recipe, train, start = demo.recipe, demo.recipe.train, demo.start
    words = (
        f"Data {recipe.data.pairs}; shared space of {recipe.backbone.head.dim} dimensions; {train.epochs} epochs in "
        f"batches of {train.batch_size}, learning rate {train.lr:g}; dev RSUM on the official labels chose the epoch. "
        f"All methods started from the same towers, {start.backbone.spec} trained from nothing by {start.method.name} "
        f"for {start.train.epochs} epochs at {start.train.lr:g} on other scenes ({start.data.pairs}). The "
        "settings were chosen among a dozen with the test figures of seed 0 in view; in plans that began with nothing "
        "infonce was ahead. The same seed gives the same page on the same machine."
    )
    return tag("footer", paragraph(words, style="note"))
