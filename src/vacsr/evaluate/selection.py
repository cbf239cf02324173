"""Values by their rank among many that come in blocks, exactly, in memory that does not grow with their number.

The bits of a float, read as a whole number, order as floats do. Each pass over the values settles 16 of these bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_DIGIT = 16  # bits settled in a pass
_SIZE = 1 << _DIGIT


class _Wanted(NamedTuple):
    """A rank that is looked for."""

    left: int
    """Its rank, from 0, among the values that begin with the bits found."""
    rest: bool
    """Among those that are not left out."""
    bits: int = 0
    """The leading bits of its value, as far as they are found."""


class Selection:
    """The values of given ranks, from 0: among all (``every``), and among those that are not left out (``rest``).

    Give all values to :meth:`add`, then call :meth:`settle`; again, until :attr:`found` is true.
    """

    def __init__(self, *, every: Sequence[int], rest: Sequence[int] = ()) -> None:
        self._wanted = [_Wanted(rank, rest=False) for rank in every] + [_Wanted(rank, rest=True) for rank in rest]
        self._cut = len(every)
        self._counts: dict[int, Tensor] = {}
        self._width, self._settled = 0, 0

    @property
    def found(self) -> bool:
        """No further pass is needed."""
        return not self._wanted or 0 < self._width == self._settled

    def add(self, values: Tensor) -> None:
        """Count some more, float32 or float64. [...]"""
        if not self.found:
            self._width = 8 * values.element_size()
            for bits, counts in self._count(values).items():
                self._counts[bits] = self._counts.get(bits, 0) + counts

    def settle(self, left_out: Tensor) -> None:
        """After all values: the next bits. ``left_out`` are those of them that ``rest`` does without. [P]"""
        if self.found:
            return
        less = self._count(left_out)
        self._wanted = [self._narrowed(one, self._counts[one.bits], less[one.bits]) for one in self._wanted]
        self._settled += _DIGIT
        self._counts = {}

    def _narrowed(self, one: _Wanted, counts: Tensor, less: Tensor) -> _Wanted:
        upto = (counts - less if one.rest else counts).cumsum(0)
        digit = int(torch.searchsorted(upto, one.left, right=True))
        before = int(upto[digit - 1]) if digit else 0
        # The first digit has the sign: counted from the lowest.
        bits = (one.bits << _DIGIT) + digit if self._settled else digit - _SIZE // 2
        return one._replace(left=one.left - before, bits=bits)

    def _count(self, values: Tensor) -> dict[int, Tensor]:
        """How often each next digit follows the bits found, by these. -> [65536] each"""
        keys = _keys(values.reshape(-1))
        digits = keys >> (self._width - self._settled - _DIGIT)
        if not self._settled:
            return {0: torch.bincount(digits + _SIZE // 2, minlength=_SIZE).cpu()}
        found: dict[int, Tensor] = {}
        for bits in {one.bits for one in self._wanted}:
            following = digits[(digits >> _DIGIT) == bits] & (_SIZE - 1)
            found[bits] = torch.bincount(following, minlength=_SIZE).cpu()
        return found

    def of_all(self) -> Tensor:
        """The values of the ranks among all. [R]"""
        return self._values(self._wanted[: self._cut])

    def of_rest(self) -> Tensor:
        """The values of the ranks among those that are not left out. [S]"""
        return self._values(self._wanted[self._cut :])

    def _values(self, wanted: Sequence[_Wanted]) -> Tensor:
        whole, real = (torch.int32, torch.float32) if self._width == 32 else (torch.int64, torch.float64)
        return _turned(torch.tensor([one.bits for one in wanted], dtype=whole)).view(real)


def middle_ranks(number: int) -> tuple[int, ...]:
    """The ranks, from 0, whose values a median is the mean of.

    >>> middle_ranks(5), middle_ranks(6), middle_ranks(0)
    ((2,), (2, 3), ())
    """
    return tuple(dict.fromkeys(((number - 1) // 2, number // 2))) if number else ()


def _keys(values: Tensor) -> Tensor:
    """Whole numbers that order as the values do. [n] -> [n]"""
    return _turned(values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int64))


def _turned(bits: Tensor) -> Tensor:
    """Bits of negative floats order the other way round: turn all but the sign. Twice gives the bits back."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
