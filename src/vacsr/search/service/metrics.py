"""Counts and times in the text format that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
            yield f"{self.name}{_written(labels)} {_number(value)}"


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
            yield f"{self.name}_sum{_written(labels)} {_number(self._sums[labels])}"
            yield f"{self.name}_count{_written(labels)} {total}"


class Reading(NamedTuple):
    """A number that somebody else keeps."""

    name: str
    about: str
    value: float
    kind: str = "gauge"


class ServiceMetrics:
    """Everything that is counted. One thread, the event loop's, touches it."""

    def __init__(self) -> None:
        self.requests = Counter("vacsr_requests_total", "Answers by path and status.")
        self.seconds = Histogram("vacsr_request_seconds", "Time to answer, by path.", SECONDS)
        self.batches = Histogram("vacsr_batch_size", "Queries that the model took at once.", SIZES)
        self.work = Histogram("vacsr_batch_seconds", "Time of the model for a batch.", SECONDS)
        self.unanswered = Counter("vacsr_abstained_total", "Searches whose first hit was not vouched for.")

    def text(self, *now: Reading) -> str:
        """All that was counted, then what is ``now``."""
        parts: list[str] = []
        for metric in (self.requests, self.seconds, self.batches, self.work, self.unanswered):
            parts += [*_head(metric.name, metric.about, metric.kind), *metric.lines()]
        for reading in now:
            parts += [*_head(reading.name, reading.about, reading.kind), f"{reading.name} {_number(reading.value)}"]
        return "\n".join(parts) + "\n"


def _head(name: str, about: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {about}", f"# TYPE {name} {kind}"


def _number(value: float) -> str:
    """With all its digits: a rate is the difference of two of them.

    >>> _number(12345678.0), _number(True), _number(0.1)
    ('12345678', '1', '0.1')
    """
    return str(int(value)) if value == int(value) else repr(float(value))


def _written(labels: Labels) -> str:
    """``{a="b"}``. Values are ours: paths, statuses, bounds."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}" if labels else ""
