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

Ties = Literal["stable", "pessimistic"]
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
    """[Q] int64, relevant items that are not among the T at all: never found, but counted in R. None for no such."""

    @classmethod
    def from_pairs(cls, query: Tensor, item: Tensor, *, num_queries: int, num_items: int) -> Positives:
        """From pairs in any order, repeats allowed. query [N], item [N] int64

        >>> Positives.from_pairs(torch.tensor([1, 0, 1]), torch.tensor([2, 0, 2]), num_queries=2, num_items=3).item
        tensor([0, 2])
        """
        if query.ndim != 1 or query.shape != item.shape:
            raise ShapeMismatch(
                f"query is {list(query.shape)}, item is {list(item.shape)} — pass two lists, one length"
            )
        _check_index("query", query, num_queries)
        _check_index("item", item, num_items)
        key = torch.unique(query.cpu().long() * num_items + item.cpu().long())
        return cls(key // max(num_items, 1), key % max(num_items, 1), num_queries, num_items)

    @classmethod
    def from_matrix(cls, relevance: Tensor) -> Positives:
        """From a bool matrix [Q, T].

        >>> Positives.from_matrix(torch.tensor([[True, False, True]])).item
        tensor([0, 2])
        """
        if relevance.ndim != 2 or relevance.dtype != torch.bool:
            given = f"{relevance.dtype} {list(relevance.shape)}"
            raise ShapeMismatch(f"relevance is {given}, expected torch.bool [Q, T] — pass e.g. relevance > 0")
        query, item = relevance.nonzero().cpu().unbind(1)
        return cls(query, item, relevance.shape[0], relevance.shape[1])

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
        """R of each query: its positives, and what is relevant but absent. [Q] int64"""
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

    @property
    def evaluated(self) -> int:
        """Queries with at least one relevant item: those an average is over."""
        return int((self.positives.relevant > 0).sum())

    @property
    def left_out(self) -> int:
        """Queries without a relevant item."""
        return self.positives.num_queries - self.evaluated


class BothRanks(NamedTuple):
    """Ranks in both directions of one score matrix."""

    i2t: Ranks
    t2i: Ranks


def positive_ranks(scores: Tensor, positives: Positives, *, ties: Ties = "stable", block: int = _BLOCK) -> Ranks:
    """Rank of every positive among all items of its query. scores [Q, T] -> rank [P]

    ``stable``: equal scores rank by index. ``pessimistic``: items that are no positive of the query come before a
    positive of equal score; positives keep their order among themselves. ``block`` bounds the pairs compared at once.

    >>> scores = torch.tensor([[0.9, 0.1, 0.9]])
    >>> first = Positives.from_pairs(torch.tensor([0]), torch.tensor([0]), num_queries=1, num_items=3)
    >>> positive_ranks(scores, first).rank, positive_ranks(scores, first, ties="pessimistic").rank
    (tensor([1]), tensor([2]))
    """
    _check_request(positives, ties)
    if tuple(scores.shape) != (positives.num_queries, positives.num_items):
        expected = f"[{positives.num_queries}, {positives.num_items}]"
        raise ShapeMismatch(f"scores are {list(scores.shape)}, positives expect {expected} — use one id list for both")
    _check_no_nan(scores, first_query=0, block=block)
    tally = _Tally(positives, _targets(scores, positives, first_query=0), ties, block)
    tally.add(scores)
    return tally.ranks()


def stream_positive_ranks(
    blocks: Callable[[], Iterable[Tensor]],
    positives_i2t: Positives,
    positives_t2i: Positives | None = None,
    *,
    ties: Ties = "stable",
    block: int = _BLOCK,
) -> BothRanks:
    """Ranks in both directions, equal to :func:`positive_ranks` of the matrix and of its transpose, without the matrix.

    ``blocks()`` yields consecutive row blocks [b, T] of the scores, images as rows. It is called twice and must yield
    the same numbers: the first pass keeps the scores of the positive pairs, the second counts what is ahead of them.
    ``positives_t2i`` are captions' images; without them, the same pairs as ``positives_i2t``.

    >>> scores = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
    >>> both = stream_positive_ranks(lambda: scores.split(1), Positives.from_captions(torch.tensor([0, 1]), 2))
    >>> both.i2t.rank, both.t2i.rank
    (tensor([1, 2]), tensor([1, 1]))
    """
    wanted_t2i = positives_i2t.transposed() if positives_t2i is None else positives_t2i
    by_image = wanted_t2i.transposed()  # as they are met in row blocks
    _check_request(positives_i2t, ties)
    _check_request(wanted_t2i, ties)
    targets, targets_t2i = [], []
    for first, rows in _consecutive(blocks(), positives_i2t):
        _check_no_nan(rows, first_query=first, block=block)
        targets.append(_targets(rows, positives_i2t, first_query=first))
        targets_t2i.append(_targets(rows, by_image, first_query=first))
    i2t = _Tally(positives_i2t, torch.cat(targets), ties, block)
    order = by_image.order_by_item.to(i2t.target.device)
    t2i = _Tally(wanted_t2i, torch.cat(targets_t2i)[order], ties, block)
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
                own_rows = rows if len(chosen) == len(rows) else rows[row[chosen].to(rows.device)]
                self._compare(own_rows, begin + chosen, first_item=first_item)

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
    """Each row block with the number of its first row; refuses blocks that do not add up to the whole matrix."""
    first, expected = 0, f"[{positives.num_queries}, {positives.num_items}]"
    for rows in blocks:
        if rows.ndim != 2 or rows.shape[1] != positives.num_items or first + len(rows) > positives.num_queries:
            given = f"the score block at row {first} is {list(rows.shape)}"
            raise ShapeMismatch(f"{given}, expected consecutive row blocks of {expected} — check blocks()")
        yield first, rows
        first += len(rows)
    if first != positives.num_queries:
        raise ShapeMismatch(f"the score blocks hold {first} rows in all, expected {expected} — check blocks()")


def _check_request(positives: Positives, ties: Ties) -> None:
    if ties not in get_args(Ties):
        raise UsageError(f"ties={ties!r}, expected one of {', '.join(get_args(Ties))}")
    if not len(positives.query):
        given = f"none of {positives.num_queries} queries has a positive among {positives.num_items} items"
        raise DataError(f"{given}, so there is nothing to rank — check that the ids of both sides match")


def _check_index(name: str, index: Tensor, size: int) -> None:
    outside = ((index < 0) | (index >= size)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise DataError(f"{name}[{at}] is {int(index[at])}, expected 0 to {size - 1} — check that ids and sizes match")


def _check_no_nan(scores: Tensor, *, first_query: int, block: int) -> None:
    step = max(1, block // max(1, scores.shape[1]))
    for low in range(0, len(scores), step):
        bad = scores[low : low + step].isnan()
        if bad.any():
            row, item = bad.nonzero()[0].tolist()
            where = f"query {first_query + low + row}, item {item} (counted from 0)"
            raise DataError(f"scores hold NaN, first at {where}; a ranking needs numbers — check those two embeddings")
