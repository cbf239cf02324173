"""Ranks of the positives: every retrieval metric follows from them, and no ranking of the whole gallery is needed.

Items are ordered by (−score, index). A positive's rank is found by counting the items ahead of it, block by block:
the cost is one comparison per (positive, item), far below a sort as long as a query has a few dozen positives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from vacsr.errors import DataError, ShapeMismatch, UsageError

Ties = Literal["stable", "pessimistic"]  # equal scores: in index order, or every wrong item before the right one
_BLOCK = 1 << 20  # pairs compared at once: small enough for the processor's cache, large enough to hide the overhead


@dataclass(frozen=True, eq=False)
class Positives:
    """The relevant (query, item) pairs, on the CPU, sorted by query and then item. Build one with a ``from_`` function.

    ``query`` and ``item`` are int64 [P]; a query may have any number of positives, also none.
    """

    query: Tensor
    item: Tensor
    num_queries: int
    num_items: int
    absent: Tensor | None = None
    """[Q] int64, relevant items that are not in the gallery: never retrieved, but counted in R. None: no such items."""

    @classmethod
    def from_pairs(cls, query: Tensor, item: Tensor, *, num_queries: int, num_items: int) -> Positives:
        """From pairs in any order, repeats allowed. query [N], item [N] int64

        >>> Positives.from_pairs(torch.tensor([1, 0, 1]), torch.tensor([2, 0, 2]), num_queries=2, num_items=3).item
        tensor([0, 2])
        """
        key = torch.unique(query.cpu().long() * num_items + item.cpu().long())
        return cls(key // max(num_items, 1), key % max(num_items, 1), num_queries, num_items)

    @classmethod
    def from_captions(cls, caption_image: Tensor, num_images: int) -> Positives:
        """Image→text: the captions of each image, from the row of the image each caption belongs to. [M] int64

        ``.transposed()`` is text→image: the one image of each caption.

        >>> Positives.from_captions(torch.tensor([0, 0, 1]), 2).count
        tensor([2, 1])
        """
        captions = torch.arange(len(caption_image))
        return cls.from_pairs(caption_image, captions, num_queries=num_images, num_items=len(captions))

    @cached_property
    def count(self) -> Tensor:
        """Number of positives of each query. [Q] int64"""
        return torch.bincount(self.query, minlength=self.num_queries)

    @property
    def relevant(self) -> Tensor:
        """R of each query: its positives and its absent relevant items. [Q] int64"""
        return self.count if self.absent is None else self.count + self.absent

    @cached_property
    def start(self) -> Tensor:
        """Where each query's positives begin in ``query`` and ``item``, and the end of the last. [Q + 1] int64"""
        return torch.cat([self.count.new_zeros(1), self.count.cumsum(0)])

    @cached_property
    def slot(self) -> Tensor:
        """The number of each positive among those of its query, from 0. [P] int64"""
        return torch.arange(len(self.query)) - self.start[self.query]

    @cached_property
    def order_by_item(self) -> Tensor:
        """Permutation that sorts the pairs by item and then query, as ``transposed()`` holds them. [P] int64"""
        return self.item.argsort(stable=True)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Where the positives of the queries ``first`` to ``last`` (exclusive) begin and end."""
        return int(self.start[first]), int(self.start[last])

    def transposed(self) -> Positives:
        """The same pairs with the roles of query and item exchanged.

        >>> Positives.from_captions(torch.tensor([1, 0]), 2).transposed().item
        tensor([1, 0])
        """
        order = self.order_by_item
        return Positives(self.item[order], self.query[order], self.num_items, self.num_queries)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The 1-based rank of every positive. ``rank`` is int64 [P] on the CPU, aligned with ``positives``."""

    rank: Tensor
    positives: Positives


class BothRanks(NamedTuple):
    """Ranks in both directions of one score matrix."""

    i2t: Ranks
    t2i: Ranks


def positive_ranks(
    blocks: Callable[[], Iterable[Tensor]],
    positives_i2t: Positives,
    positives_t2i: Positives | None = None,
    *,
    ties: Ties = "stable",
    block: int = _BLOCK,
) -> BothRanks:
    """Rank of every positive among all items of its query, in both directions.

    ``blocks()`` yields consecutive row blocks [b, T] of the scores, images as rows. It is called twice and must yield
    the same numbers: the first pass keeps the scores of the positive pairs, the second counts what is ahead of them.
    ``positives_t2i`` are captions' images; without them, the same pairs as ``positives_i2t``.

    ``ties="stable"``: equal scores rank by index. ``"pessimistic"``: items that are no positive of the query come
    before a positive of equal score; positives keep their order among themselves. ``block`` bounds the pairs compared
    at once.
    """
    if ties not in get_args(Ties):
        raise UsageError(f"ties={ties!r}, expected one of {', '.join(get_args(Ties))}")
    t2i_positives = positives_i2t.transposed() if positives_t2i is None else positives_t2i
    for positives in (positives_i2t, t2i_positives):
        if not len(positives.query):
            message = f"none of {positives.num_queries} queries has a positive among {positives.num_items} items"
            raise DataError(f"{message} — check that the ids of both sides match")
    by_image = t2i_positives.transposed()  # in the order in which row blocks contain them
    targets, targets_t2i = [], []
    for first, rows in _consecutive(blocks(), positives_i2t):
        _check_no_nan(rows, first_query=first)
        targets.append(_targets(rows, positives_i2t, first_query=first))
        targets_t2i.append(_targets(rows, by_image, first_query=first))
    i2t = _Tally(positives_i2t, torch.cat(targets), ties, block)
    order = by_image.order_by_item.to(i2t.target.device)
    t2i = _Tally(t2i_positives, torch.cat(targets_t2i)[order], ties, block)
    for first, rows in _consecutive(blocks(), positives_i2t):
        begin, end = positives_i2t.span(first, first + len(rows))
        if not torch.equal(_targets(rows, positives_i2t, first_query=first), i2t.target[begin:end]):
            raise DataError(f"scores of the block at row {first} differ between two passes — make blocks() repeatable")
        i2t.add(rows, first_query=first)
        t2i.add(rows.T, first_item=first)
    return BothRanks(i2t.ranks(), t2i.ranks())


class _Tally:
    """Counts, for every positive, the items ahead of it, over any division of the score matrix into blocks."""

    def __init__(self, positives: Positives, target: Tensor, ties: Ties, block: int) -> None:
        self.positives, self.target, self.ties, self.block = positives, target, ties, block
        self.ahead = torch.zeros(len(target), dtype=torch.int64, device=target.device)

    def add(self, scores: Tensor, *, first_query: int = 0, first_item: int = 0) -> None:
        """Count the items of one block. scores [q, n], the corner (first_query, first_item) of the whole"""
        step = max(1, self.block // max(1, scores.shape[1]))
        for low in range(0, len(scores), step):
            rows, first = scores[low : low + step], first_query + low
            begin, end = self.positives.span(first, first + len(rows))
            slot, row = self.positives.slot[begin:end], self.positives.query[begin:end] - first
            # One positive of each query at a time, so that the rows are compared in place, not copied per positive.
            for number in range(int(slot.max()) + 1 if end > begin else 0):
                chosen = (slot == number).nonzero()[:, 0]
                chosen_rows = rows if len(chosen) == len(rows) else rows[row[chosen].to(rows.device)]
                self._compare(chosen_rows, begin + chosen, first_item=first_item)

    def _compare(self, rows: Tensor, index: Tensor, *, first_item: int) -> None:
        """rows [p, n] against the positives at ``index`` [p]."""
        item, index = self.positives.item[index].to(rows.device), index.to(rows.device)
        target = self.target[index, None]
        at_least = (rows >= target).sum(1, dtype=torch.int32)  # half the work of int64
        if self.ties == "pessimistic":
            self.ahead[index] += at_least
            return
        ahead = (rows > target).sum(1, dtype=torch.int32)
        end_item = first_item + rows.shape[1]
        itself = (item >= first_item) & (item < end_item)
        tied = (at_least - ahead > itself.long()).nonzero()[:, 0]
        if len(tied):
            earlier = torch.arange(first_item, end_item, device=rows.device) < item[tied, None]
            ahead[tied] += ((rows[tied] == target[tied]) & earlier).sum(1, dtype=torch.int32)
        self.ahead[index] += ahead

    def ranks(self) -> Ranks:
        if self.ties == "stable":
            return Ranks(self.ahead.cpu() + 1, self.positives)
        # ``ahead`` holds all scores at least as high, itself included; later positives of the same score come after.
        return Ranks(self.ahead.cpu() - _later_ties(self.target.cpu(), self.positives.query), self.positives)


def _later_ties(target: Tensor, query: Tensor) -> Tensor:
    """For each positive, those of the same query and score with a higher index. target, query [P] -> [P]"""
    order = target.argsort(stable=True)
    order = order[query[order].argsort(stable=True)]
    starts_run = torch.ones(len(order), dtype=torch.bool)
    starts_run[1:] = (query[order].diff() != 0) | (target[order][1:] != target[order][:-1])
    run = starts_run.cumsum(0) - 1
    later = torch.empty_like(order)
    later[order] = run.bincount().cumsum(0)[run] - 1 - torch.arange(len(order))
    return later


def _targets(rows: Tensor, positives: Positives, *, first_query: int) -> Tensor:
    """Scores of the positives of the queries in one row block. rows [b, T] -> [p]"""
    begin, end = positives.span(first_query, first_query + len(rows))
    row, item = positives.query[begin:end] - first_query, positives.item[begin:end]
    return rows[row.to(rows.device), item.to(rows.device)]


def _consecutive(blocks: Iterable[Tensor], positives: Positives) -> Iterator[tuple[int, Tensor]]:
    """Each row block with the number of its first row; blocks must add up to the whole matrix."""
    first, expected = 0, [positives.num_queries, positives.num_items]
    for rows in blocks:
        if rows.shape[1] != expected[1] or first + len(rows) > expected[0]:
            message = f"the score block at row {first} is {list(rows.shape)}, expected row blocks of {expected}"
            raise ShapeMismatch(f"{message} — use the same ids for scores and labels")
        yield first, rows
        first += len(rows)
    if first != expected[0]:
        raise ShapeMismatch(f"the score blocks hold {first} rows, expected {expected} — score every image")


def _check_no_nan(rows: Tensor, *, first_query: int) -> None:
    missing = rows.isnan()
    if missing.any():
        row, item = missing.nonzero()[0].tolist()
        where = f"query {first_query + row}, item {item} (counted from 0)"
        raise DataError(f"scores hold NaN, first at {where} — check those two embeddings")
