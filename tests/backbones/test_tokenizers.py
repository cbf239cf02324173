from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vacsr.backbones.tokenizers import (
    ByteTokenizer,
    HubTokenizer,
    Tokenizer,
    WordTokenizer,
    choose_context,
    read_tokenizer,
    split_words,
)
from vacsr.errors import UsageError

ODD = ["x" * 10_000, "a dog 🐕 runs 🏃‍♀️", "犬が走る", "собака бежит", "!!! ... ---", "", "\ud800 lone", "كلب يجري"]
CONTEXT = 12


def bytes_() -> Tokenizer:
    return ByteTokenizer(99, context=CONTEXT)


def words() -> Tokenizer:
    made = WordTokenizer(context=CONTEXT)
    made.fit(["a dog runs", "a dog"], limit=50)
    return made


def bert() -> Tokenizer:
    transformers = pytest.importorskip("transformers")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters), "dog"]
    vocabulary = {word: number for number, word in enumerate(known)}
    return HubTokenizer(transformers.BertTokenizer(vocab=vocabulary), context=CONTEXT)


def clip() -> Tokenizer:
    transformers = pytest.importorskip("transformers")
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    known = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(vocab={word: number for number, word in enumerate(known)}, merges=[])
    return HubTokenizer(tokenizer, context=CONTEXT)


ALL = pytest.mark.parametrize("make", [bytes_, words, bert, clip])


@ALL
def test_any_caption_has_a_start_an_end_and_fits(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    start, end = tokenizer.special
    for row in tokenizer.encode(ODD):
        assert 2 <= len(row) <= CONTEXT
        assert (row[0], row[-1]) == (start, end)
    assert len(tokenizer.encode(ODD[:1])[0]) == (3 if make is words or make is bert else CONTEXT)
    assert tokenizer.encode([""]) == [[start, end]]


@ALL
def test_random_words_and_the_mask_are_neither_start_nor_end(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    assert tokenizer.ordinary()
    assert not {*tokenizer.ordinary(), tokenizer.mask} & set(tokenizer.special)


@ALL
def test_a_saved_tokenizer_reads_the_same(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    tokenizer = make()
    again = read_tokenizer(tokenizer.save(tmp_path), tmp_path)
    captions = [*ODD, "a dog runs to a cat"]
    assert again.encode(captions) == tokenizer.encode(captions)
    assert (again.special, again.mask, again.ordinary()) == (tokenizer.special, tokenizer.mask, tokenizer.ordinary())


def test_the_mask_of_each_kind() -> None:
    made = bert()
    assert isinstance(made, HubTokenizer)
    assert made.mask == made.tokenizer.mask_token_id
    assert made.starts_with_class
    other = clip()
    assert isinstance(other, HubTokenizer)
    assert other.tokenizer.convert_ids_to_tokens(other.mask) == "M"
    assert other.mask not in other.encode(["M is the letter M"])[0]
    assert not other.starts_with_class


def test_words_are_counted_then_alphabetical_and_capped() -> None:
    made = WordTokenizer(context=10)
    made.fit(["b a c", "B! c", "d"], limit=7)
    assert made.words == ("b", "c", "a")
    assert made.encode(["a b c d"]) == [[made.START, 6, 4, 5, made.UNKNOWN, made.END]]
    assert len(made) == 7
    assert WordTokenizer(context=10).ordinary() == [WordTokenizer.UNKNOWN]


@pytest.mark.parametrize(
    ("caption", "expected"),
    [("A man's dog--a_cat!", ["a", "man's", "dog", "a", "cat"]), ("Café ﬁne", ["café", "fine"]), ("🐕!?", [])],
)
def test_words_of_a_caption(caption: str, expected: list[str]) -> None:
    assert split_words(caption) == expected


def test_the_context_is_the_towers_own_unless_fewer_are_asked_for() -> None:
    assert (choose_context(0, longest=77), choose_context(30, longest=77)) == (77, 30)
    for wrong in (78, 1, 2):
        with pytest.raises(UsageError, match="3 to 77"):
            choose_context(wrong, longest=77)
