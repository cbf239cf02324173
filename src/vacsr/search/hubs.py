"""Hubs: items that come first for the queries of many images, and make them fail together.

The bound takes images as independent. A hub breaks that: whether it lies in an index decides over many queries at once.
"""

from __future__ import annotations

import numpy as np

from vacsr.search.candidates import Candidates
from vacsr.search.risk import AnswerRule

TOP = 0.01
"""Share of the items that ever come first which is looked at."""
_EACH = 3  # images that one of these has to mislead on average; by chance alone it is one or two


def hub_share(rule: AnswerRule, found: Candidates) -> float:
    """Of the wrong answers that the rule gives, the share that goes to the 1% of the items with the most.

    Items are counted that come first for some query. Queries of one image with the same wrong answer count once,
    repeats too. 0 where these items have no more than a few each, as chance would give them.
    """
    if rule.threshold is None or found.first is None:
        return 0.0
    wrong = (rule.of(found) >= rule.threshold) & ~found.right[:, 0]
    misled = np.unique(np.stack((found.first[wrong], found.image[wrong])), axis=1)
    _, images = np.unique(misled[0], return_counts=True)
    items = max(1, round(TOP * len(np.unique(found.first))))
    most = np.sort(images)[::-1][:items]
    return float(most.sum() / images.sum()) if most.sum() >= _EACH * items else 0.0
