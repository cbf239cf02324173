"""A random order that depends on nothing but a seed and names: no file system, no generator state, no version.

Each name gets a hash of (seed, purpose, class, name), and the hashes are sorted. A draw of four is then the start of
the draw of sixteen, and a photo that is added to a class changes at most one that was drawn from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor


def seeded_rows(ids: Sequence[str], rows: Sequence[int], *, seed: int, purpose: str, class_name: str) -> list[int]:
    """``rows`` of one class, in the order of their ids' hashes.

    >>> seeded_rows(["a", "b", "c"], [0, 1, 2], seed=1, purpose="train", class_name="cat")
    [2, 0, 1]
    """
    head = hashlib.sha256(f"{seed}\0{purpose}\0{class_name}\0".encode(errors="surrogatepass"))

    def key(row: int) -> tuple[bytes, str, int]:
        mark = head.copy()
        mark.update(ids[row].encode(errors="surrogatepass"))
        return mark.digest(), ids[row], row

    return sorted(rows, key=key)


def rows_by_label(labels: Tensor | Sequence[int]) -> Mapping[int, list[int]]:
    """Which rows carry each label, labels in order."""
    rows: dict[int, list[int]] = {}
    for row, label in enumerate(labels.tolist() if isinstance(labels, Tensor) else labels):
        rows.setdefault(label, []).append(row)
    return dict(sorted(rows.items()))
