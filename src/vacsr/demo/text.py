"""The demo's findings as Markdown that also reads well as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from vacsr.demo.findings import Findings, KnownWorld
from vacsr.demo.gallery import Answer, Query
from vacsr.demo.result import FIGURES, OURS, Demo, best_methods
from vacsr.evaluate.exact import spread

KIND_NAMES = {
    "positives": "positives",
    "false_negatives": "false negatives",
    "hard": "hard negatives",
    "easy": "easy negatives",
}
"""The kinds of pair, in the order they are shown."""
METHODS_SAID = (
    "infonce is CLIP's loss, sigmoid is SigLIP's, vacsr the variational adapter; same data, same steps, and the same "
    "towers to start from, which infonce trained on other scenes."
)
_CHANCE = (48.0, 52.0)  # percent between which no difference is claimed


def describe(demo: Demo) -> str:
    """The facts of the world, the table with its legend, σ by kind of pair, and one caption."""
    parts = ["# vacsr demo", describe_world(demo), figures_table(demo), _legend()]
    ours = demo.findings.get(OURS)
    if ours is not None:
        parts += ["## σ by kind of pair", kinds_table(ours), claim(ours)]
        parts += ["## One caption", describe_query(demo.queries[min(2, len(demo.queries) - 1)], demo.known)]
    return "\n\n".join(parts)


def describe_world(demo: Demo) -> str:
    """What there is to find, and how much of it the labels know."""
    facts = demo.known.facts
    return (
        f"A generated world of pictures (seed {demo.seed}). Its test split has {facts.images:,} images and "
        f"{facts.captions:,} captions.\n"
        f"A caption is true of {facts.images_per_caption:.1f} images on average, but labelled with one: "
        f"{facts.unlabelled_share:.0f}% of the true pairs carry no label.\n"
        f"These {facts.false_negatives:,} false negatives are {facts.false_negative_share:.1f}% of the unlabelled "
        "pairs. All methods trained on labels of this kind."
    )


def figures_table(demo: Demo) -> str:
    """One row a method, the best of each column in bold."""
    rows = [["method", *(figure.title for figure in FIGURES)]]
    for name, found in demo.findings.items():
        shown = [
            _bold(figure.show(found.figures[figure.key]), name in best_methods(demo.findings, figure))
            for figure in FIGURES
        ]
        rows.append([name, *shown])
    return markdown_table(rows)


def _bold(shown: str, best: bool) -> str:
    return f"**{shown}**" if best else shown


def _legend() -> str:
    lines = [METHODS_SAID, "↑ higher is better, ↓ lower is better, – the method has no uncertainty σ.", ""]
    lines += [f"- {figure.name}: {figure.meaning}" for figure in FIGURES]
    return "\n".join([*lines, "", "One world, one seed: repeat with --seed 1 before you trust a small difference."])


def kinds_table(ours: Findings) -> str:
    """σ of each kind of pair, and how often a false negative has more."""
    rows = [["pairs", "number", "σ median", "σ mean", "σ of FN is higher"]]
    above = ours.sigma_above or {}
    for kind, name in KIND_NAMES.items():
        values = ours.kinds[kind]
        assert values.uncertainty is not None, "vacsr has an uncertainty"
        found = spread(values.uncertainty)
        share = f"{above[kind]:.1f}%" if kind in above else "–"
        rows.append([name, f"{values.total:,}", f"{found.median:.3f}", f"{found.mean:.3f}", share])
    return markdown_table(rows)


def claim(ours: Findings) -> str:
    """What the paper expects of σ, and what came out."""
    above = ours.sigma_above or {}
    return (
        "The paper wants σ low on positives and on hard negatives, and high on false negatives. Here a false negative "
        f"has a higher σ than a positive in {_outcome(above['positives'])}, than a hard negative in "
        f"{_outcome(above['hard'])}, and than an easy negative in {_percent(above['easy'])}."
    )


def _outcome(share: float) -> str:
    """In words: as the paper wants it, the other way round, or neither."""
    if share > _CHANCE[1]:
        return f"{_percent(share)} (as wanted)"
    if share < _CHANCE[0]:
        return f"{_percent(share)} (the reverse of what is wanted)"
    return f"{_percent(share)} (no better than chance)"


def _percent(share: float) -> str:
    return "none of 0 comparisons" if share != share else f"{share:.0f}% of comparisons"


def describe_query(query: Query, known: KnownWorld) -> str:
    """One caption and the best images of the method with an uncertainty."""
    pairs = known.world.pairs
    rows = [["image", "grade", "σ", "truly a match?"]]
    for answer in query.answers[OURS]:
        sigma = "–" if answer.uncertainty is None else f"{answer.uncertainty:.3f}"
        rows.append([pairs.image_ids[answer.place], f"{answer.grade:.2f}", sigma, verdict(answer)])
    said = pairs.captions[query.place]
    number = f"{query.true} test image{'' if query.true == 1 else 's'}"
    return f'"{said}" is true of {number} and labelled with one. vacsr\'s best:\n\n{markdown_table(rows)}'


def verdict(answer: Answer) -> str:
    """What an answer is in truth."""
    if answer.verdict == "official":
        return "yes, the official match"
    if answer.verdict == "unlabelled":
        return "yes, though unlabelled"
    return f"no, {100 * answer.share:.0f}% of it is true"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns also line up as plain text; the first row is the head.

    >>> print(markdown_table([["method", "x"], ["a", "1.0"]]))
    | method | x   |
    |--------|-----|
    | a      | 1.0 |
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
