"""A list whose items are read when they are asked for.

A search finds hundreds of candidates and shows ten of them: to read the rest would take longer than to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class OnDemand(Sequence[T], Generic[T]):
    """The items at some places, each read anew whenever it is asked for. It equals any sequence of equal items.

    ``read`` must give the same item for a place at any time and in any thread.

    >>> words = OnDemand("abc".__getitem__, [2, 0])
    >>> words[0], list(words), words == ["c", "a"]
    ('c', ['c', 'a'], True)
    """

    __slots__ = ("_places", "_read")

    def __init__(self, read: Callable[[int], T], places: Sequence[int]) -> None:
        self._read, self._places = read, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, which: int) -> T: ...
    @overload
    def __getitem__(self, which: slice) -> OnDemand[T]: ...
    def __getitem__(self, which: int | slice) -> T | OnDemand[T]:
        if isinstance(which, slice):
            return OnDemand(self._read, self._places[which])
        return self._read(self._places[which])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"OnDemand({list(self)!r})"
