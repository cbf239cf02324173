"""Similar images of an image, or similar texts of a text: by the cosine of the towers' vectors and nothing else.

A method scores pairs of an image and a text. Of two images it knows no score, no grade and no uncertainty, and nothing
was fitted for them, so nothing is promised.
"""

from __future__ import annotations

from vacsr.errors import UsageError
from vacsr.search.index import Hits
from vacsr.search.rerank import ByScore, Policy
from vacsr.search.results import Hit, Results, Way


def check_policy(policy: str | Policy, way: Way) -> None:
    """Raise for all but ``score``: the others read a score, a grade or an uncertainty."""
    name = policy if isinstance(policy, str) else policy.name
    if name != ByScore.name:
        kind, other = ("images", "a text") if way == "i2i" else ("texts", "an image")
        message = f"policy {name!r} needs scores, and similar {kind} are found by cosine alone"
        raise UsageError(f"{message} — leave the policy out, or ask with {other}")


def similar(hits: Hits, way: Way, *, size: int) -> list[Results]:
    """The index's own order, as results. ``size``: of the index."""
    kind = "images" if way == "i2i" else "texts"
    note = f"similar {kind}, by cosine alone: no grade, no uncertainty, no promise"
    return [
        Results(
            direction=way, policy=ByScore.name, hits=_hits(hits, row), answered=True, reason="", confidence=None,
            promised=False, note=note, calibrated=False, index_size=size,
        )
        for row in range(len(hits.ids))
    ]  # fmt: skip


def _hits(hits: Hits, row: int) -> tuple[Hit, ...]:
    found = zip(hits.ids[row], hits.scores[row].tolist(), hits.metadata[row], strict=True)
    return tuple(
        Hit(
            rank=rank, id=name, cosine=cosine, score=None, grade=None, uncertainty=None, probably_also=False,
            metadata=metadata,
        )
        for rank, (name, cosine, metadata) in enumerate(found, 1)
    )  # fmt: skip
