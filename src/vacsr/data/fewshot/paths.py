"""Finding the photos that a file lists by paths of another machine, or by the end of a path."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence


class PathFinder:
    """Rows of photos by their ids, whatever stands before these.

    >>> finder = PathFinder(["train/n01/a.jpg", "train/n02/a.jpg"])
    >>> finder.row("/home/me/imagenet/images/train/n02/a.jpg"), finder.row("n01/a.jpg"), finder.row("a.jpg")
    (1, 0, None)
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self._ids = [_plain(one) for one in ids]
        self._rows: dict[str, int] = {}
        for row, one in enumerate(self._ids):
            self._rows.setdefault(one, row)
        self._by_last: dict[str, list[int]] = {}

    def row(self, path: str) -> int | None:
        """The photo whose id is the longest end of the path; otherwise the only one whose id ends in the path."""
        rest = whole = _plain(path)
        while rest:
            if rest in self._rows:
                return self._rows[rest]
            rest = rest.partition("/")[2]
        longer = [row for row in self._last(whole) if self._ids[row].endswith(f"/{whole.lstrip('/')}")]
        return longer[0] if len(longer) == 1 else None

    def _last(self, path: str) -> Sequence[int]:
        """Photos whose files are called the same; listed when first asked, which few files need."""
        if not self._by_last:
            for row, one in enumerate(self._ids):
                self._by_last.setdefault(one.rpartition("/")[2], []).append(row)
        return self._by_last.get(path.rpartition("/")[2], ())


def _plain(path: str) -> str:
    """With slashes, without ``./``."""
    return posixpath.normpath(path.replace("\\", "/"))
