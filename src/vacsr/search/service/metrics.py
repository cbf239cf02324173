"""Counts and times in the text format that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

Labels = tuple[tuple[str, str], ...]


class Counter:
    """A number for each set of labels that only grows."""

    kind = "counter"

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self._values: dict[Labels, float] = defaultdict(float)

    def add(self, labels: Labels = (), value: float = 1.0) -> None:
        """Count."""
        self._values[labels] += value

    def lines(self) -> Iterator[str]:
        """One for each set of labels."""
        for labels, value in sorted(self._values.items()):
            yield f"{self.name}{_written(labels)} {value:g}"


class Histogram:
    """How many values lie at or below each bound, for each set of labels."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Iterable[float]) -> None:
        self.name, self.about, self.bounds = name, about, tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = defaultdict(float)

    def add(self, value: float, labels: Labels = ()) -> None:
        """Count a value."""
        counts = self._counts.setdefault(labels, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self._sums[labels] += value

    def lines(self) -> Iterator[str]:
        """Cumulative buckets, then sum and count."""
        for labels, counts in sorted(self._counts.items()):
            total = 0
            for bound, count in zip((*(f"{bound:g}" for bound in self.bounds), "+Inf"), counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_written((*labels, ('le', bound)))} {total}"
            yield f"{self.name}_sum{_written(labels)} {self._sums[labels]:.9g}"
            yield f"{self.name}_count{_written(labels)} {total}"


class ServiceMetrics:
    """Everything that is counted. One thread, the event loop's, touches it."""

    def __init__(self) -> None:
        self.requests = Counter("vacsr_requests_total", "Answers by path and status.")
        self.seconds = Histogram("vacsr_request_seconds", "Time to answer, by path.", SECONDS)
        self.batches = Histogram("vacsr_batch_size", "Queries that the model took at once.", SIZES)
        self.work = Histogram("vacsr_batch_seconds", "Time of the model for a batch.", SECONDS)
        self.unanswered = Counter("vacsr_abstained_total", "Searches whose first hit was not vouched for.")

    def text(self, now: Mapping[str, tuple[str, float]]) -> str:
        """``now``: gauges, as name → (what it is, value)."""
        parts: list[str] = []
        for metric in (self.requests, self.seconds, self.batches, self.work, self.unanswered):
            parts += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
        for name, (about, value) in now.items():
            parts += [f"# HELP {name} {about}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        return "\n".join(parts) + "\n"


def _written(labels: Labels) -> str:
    """``{a="b"}``. Values are ours: paths, statuses, bounds."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""
