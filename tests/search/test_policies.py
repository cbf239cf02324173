"""Policies on lists made by hand."""

import subprocess
import sys

import numpy as np
import pytest

from vacsr.errors import UsageError
from vacsr.search.policies import POLICIES, RETIRED, Scored, choose_policy, offered


def scored(confident: int | None = None) -> Scored:
    score = np.array([3.0, 2.9, 1.0, 0.0])
    return Scored(list("abcd"), [{}] * 4, score / 10, score, score / 4, None, confident=confident)


@pytest.mark.parametrize(("confident", "shown"), [(2, [0, 1]), (4, [0, 1, 2, 3]), (0, []), (None, [])])
def test_only_confident_hits(confident: int | None, shown: list[int]) -> None:
    ranked = POLICIES["confident"].apply(scored(confident))
    assert list(ranked.order) == shown
    assert ranked.answered is bool(shown)
    assert bool(ranked.reason) is not bool(shown)


def test_policies_by_name() -> None:
    assert offered(calibrated=False) == ["score"]
    assert offered(calibrated=True) == ["score", "confident"]
    assert list(choose_policy("score", calibrated=False).apply(scored()).order) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="use one of score, confident"):
        choose_policy("best", calibrated=False)
    with pytest.raises(UsageError, match="vacsr calibrate"):
        choose_policy("confident", calibrated=False)
    for retired in RETIRED:
        with pytest.raises(UsageError, match=r"was removed.* — use one of score, confident"):
            choose_policy(retired, calibrated=True)


def test_the_names_are_read_without_torch() -> None:
    script = "import sys, vacsr.search.policies; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
