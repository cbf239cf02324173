"""A list that is read on demand is a list for who only looks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vacsr.search.ondemand import OnDemand

WORDS = [f"word {n}" for n in range(9)]


@given(places=st.lists(st.integers(0, 8)), cut=st.slices(9), other=st.lists(st.sampled_from(WORDS)))
def test_it_is_like_the_list_of_its_items(places: list[int], cut: slice, other: list[str]) -> None:
    plain, mine = [WORDS[place] for place in places], OnDemand(WORDS.__getitem__, places)
    assert (len(mine), list(mine), list(reversed(mine))) == (len(plain), plain, plain[::-1])
    assert list(mine[cut]) == plain[cut]
    assert [mine[n] for n in range(-len(plain), len(plain))] == plain * 2
    assert mine == plain
    assert plain == mine
    assert mine == OnDemand(plain.__getitem__, range(len(plain)))
    assert (mine == other) == (plain == other)
    assert (mine != other) == (plain != other)
    assert all(mine.index(word) == plain.index(word) for word in plain)


def test_only_what_is_asked_for_is_read() -> None:
    read: list[int] = []
    mine = OnDemand(lambda place: read.append(place) or place, [5, 6, 7, 8])
    assert (len(mine), len(mine[1:]), read) == (4, 3, [])
    assert (mine[2], mine[1:][0], read) == (7, 6, [7, 6])
    assert mine != [5]  # of another length
    assert read == [7, 6]


def test_what_a_list_refuses() -> None:
    mine = OnDemand(WORDS.__getitem__, [1, 2])
    with pytest.raises(IndexError):
        mine[2]
    with pytest.raises(TypeError):
        hash(mine)
    assert mine != 5
    assert repr(mine) == "OnDemand(['word 1', 'word 2'])"
