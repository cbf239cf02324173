"""What the demo found, and how it is kept as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from vacsr.config import Recipe
from vacsr.demo.findings import SPLIT, Findings, KnownWorld
from vacsr.demo.folder import KIND
from vacsr.demo.gallery import Query
from vacsr.evaluate.exact import spread

OURS = "vacsr"
"""The method with an uncertainty."""


class Demo(NamedTuple):
    """Everything that came out."""

    recipes: dict[str, Recipe]
    """By method; data, towers and training are the same in all."""
    start: Recipe
    """What trained the towers that all of them started from."""
    known: KnownWorld
    findings: dict[str, Findings]
    """By method."""
    queries: tuple[Query, ...]

    @property
    def recipe(self) -> Recipe:
        """The first: for what all of them share."""
        return next(iter(self.recipes.values()))

    @property
    def seed(self) -> int:
        """Of world and training."""
        return self.recipe.train.seed


class Figure(NamedTuple):
    """A row or column of the table."""

    key: str
    name: str
    best: Literal["high", "low"]
    digits: int
    meaning: str

    @property
    def title(self) -> str:
        """Its name and which end is better."""
        return f"{self.name} {'↑' if self.best == 'high' else '↓'}"

    def show(self, value: float | None) -> str:
        """A dash where there is none.

        >>> Figure("r", "r", "low", 2, "").show(-0.504), Figure("r", "r", "low", 2, "").show(-0.004)
        ('-0.50', '0.00')
        """
        return "–" if value is None or math.isnan(value) else f"{value:z.{self.digits}f}"


FIGURES = (
    Figure("rsum", "RSUM", "high", 1, "R@1 + R@5 + R@10 in both directions on the official labels, at most 600. "
           "A false negative that is found counts as a mistake."),
    Figure("map_at_r", "exact mAP@R", "high", 1, "Retrieval against the truth: every wholly true pair is right. "
           "Both directions averaged, percent."),
    Figure("tau_b", "exact τ-b", "high", 1, "Does the order of the scores follow the true grades between 0 and 1? "
           "Kendall's, times 100."),
    Figure("auroc_false_negative_score", "FN by score", "high", 1, "Does a high score tell a false negative from the "
           "other unlabelled pairs? AUROC in percent, 50 is chance."),
    Figure("auroc_false_negative", "FN by σ", "high", 1, "Does a high uncertainty? Below 50, false negatives have the "
           "lower ones."),
    Figure("corr_r1_i2t", "σ–R@1 i2t", "low", 2, "Image to text: is the best answer right less often where σ is high? "
           "A correlation over ten bins, −1 is best."),
    Figure("corr_r1_t2i", "σ–R@1 t2i", "low", 2, "The same from text to image."),
)  # fmt: skip
"""The table, in its order."""


def best_methods(findings: Mapping[str, Findings], figure: Figure) -> set[str]:
    """Who is best at it, as far as the shown digits tell; nobody where fewer than two have the figure."""
    values = {name: found.figures[figure.key] for name, found in findings.items()}
    known = {
        name: round(value, figure.digits) for name, value in values.items() if value is not None and value == value
    }
    if len(known) < 2:
        return set()
    top = (max if figure.best == "high" else min)(known.values())
    return {name for name, value in known.items() if value == top}


def to_json(demo: Demo) -> dict[str, Any]:
    """Every figure, with the settings it came from."""
    recipe = demo.recipe.model_dump(mode="json")
    return {
        "schema": 2,
        "kind": KIND,
        "seed": demo.seed,
        "pairs": demo.recipe.data.pairs,
        "split": SPLIT,
        "recipe": {part: recipe[part] for part in ("data", "backbone", "train")},
        "start": demo.start.model_dump(mode="json"),
        "world": demo.known.facts._asdict(),
        "methods": {name: found.figures for name, found in demo.findings.items()},
        "kinds": {name: _kinds_json(found) for name, found in demo.findings.items()},
        "queries": [_query_json(query, demo.known) for query in demo.queries],
    }


def _kinds_json(found: Findings) -> dict[str, Any]:
    """Score and σ by kind of pair, and how false negatives compare with the others."""
    sigma_above = found.sigma_above
    whole: dict[str, Any] = {}
    for name, values in found.kinds.items():
        sigma = None if values.uncertainty is None else spread(values.uncertainty)._asdict()
        whole[name] = {"pairs": values.total, "score": spread(values.score)._asdict(), "sigma": sigma}
        if name != "false_negatives":
            whole[name]["false_negatives_above"] = {
                "score": found.score_above[name],
                "sigma": None if sigma_above is None else sigma_above[name],
            }
    return whole


def _query_json(query: Query, known: KnownWorld) -> dict[str, Any]:
    pairs = known.world.pairs
    asked, answers = (
        (pairs.caption_ids, pairs.image_ids) if query.direction == "t2i" else (pairs.image_ids, pairs.caption_ids)
    )
    return {
        "direction": query.direction,
        "query": asked[query.place],
        "true": query.true,
        "official_rank": query.official,
        "answers": {
            name: [{**answer._asdict(), "place": answers[answer.place]} for answer in found]
            for name, found in query.answers.items()
        },
    }
