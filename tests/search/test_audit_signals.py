"""What benchmarks/audit.py measures with, against slow loops."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ..conftest import load_script

SIGNALS = load_script("benchmarks/_audit_signals.py")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=30))
def test_precision_along_the_recall(drawn: list[tuple[int, bool]]) -> None:
    hits = [hit for _, hit in drawn]
    assume(any(hits) and not all(hits))
    found = SIGNALS.measured(torch.tensor([float(v) for v, _ in drawn]), torch.tensor(hits), recalls=(1, 50, 100))
    ranked = [hit for _, hit in sorted(drawn, key=lambda one: -one[0])]
    total = sum(hits)
    precision = [sum(ranked[: k + 1]) / (k + 1) for k in range(len(ranked))]
    assert (found["n"], found["of"]) == (total, len(drawn))
    assert found["precision_at_n"] == pytest.approx(100 * precision[total - 1])
    assert found["ap"] == pytest.approx(100 * sum(p for p, hit in zip(precision, ranked, strict=True) if hit) / total)
    for recall in (1, 50, 100):
        k = next(k for k in range(len(ranked)) if 100 * sum(ranked[: k + 1]) >= recall * total)
        assert found["precision_at_recall"][str(recall)] == pytest.approx(100 * precision[k])
