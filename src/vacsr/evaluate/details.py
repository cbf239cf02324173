"""What a report says in words below its table: uncertainties, graded pairs and preferences, as rows of cells."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vacsr.scoring.topk import DIRECTIONS

_HEADS = (
    ("uncertainty", "split", "AURC i2t/t2i", "FN AUROC"),
    ("grades", "split", "pairs", "τ published, 95%", "τ of mean grades, 95%", "Spearman", "human τ", "rivals"),
    ("preferences", "split", "kind", "pairs", "accuracy, 95%", "rivals"),
)


def detail_tables(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
    """Head and rows of each table that has rows; ``results`` are of the evaluation JSON, one for each split."""
    for head, rows_of in zip(_HEADS, (_signal_rows, _grade_rows, _preference_rows), strict=True):
        rows = [row for result in results for row in rows_of(result)]
        if rows:
            yield head, rows


def _grade_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row per file of grades."""
    for name, one in result.get("grades", {}).items():
        taus = [_with_interval(one[key], one[f"{key}_low"], one[f"{key}_high"]) for key in ("tau_published", "tau")]
        human, spearman = _shown(one["human_tau"]), _shown(one["spearman"])
        rivals = _rivals(one.get("rivals", {}), "tau_published")
        yield [f"{name} (τ-{one['variant']})", result["split"], f"{one['pairs']:,}", *taus, spearman, human, rivals]


def _preference_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row per kind, and one for all."""
    for name, one in result.get("preferences", {}).items():
        for kind, part in (("all", one), *one.get("kinds", {}).items()):
            share = _with_interval(part["accuracy"], part["low"], part["high"])
            rivals = _rivals(part.get("rivals", {}), "accuracy")
            yield [name, result["split"], kind, f"{part['pairs']:,}", share, rivals]


def _signal_rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """One row per uncertainty."""
    for name, one in result.get("signals", {}).items():
        both = " / ".join(_shown(one[f"aurc_{direction}"]) for direction in DIRECTIONS)
        yield [name, result["split"], both, _shown(one.get("auroc_false_negative"))]


def _rivals(rivals: Mapping[str, Any], key: str) -> str:
    """Each rival's number, and ours less it on the same pairs."""
    return "; ".join(
        f"{name} {_shown(one[key])}, ours {one['difference']:+.1f} [{one['low']:+.1f}, {one['high']:+.1f}]"
        for name, one in rivals.items()
    )


def _with_interval(value: float, low: float, high: float) -> str:
    return "–" if value != value else f"{value:.1f} [{_shown(low)}, {_shown(high)}]"


def _shown(value: float | None) -> str:
    return "–" if value is None or value != value else f"{value:.1f}"
