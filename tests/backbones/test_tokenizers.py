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

from ..conftest import byte_tokenizer

ODD = ["x" * 10_000, "a dog 🐕 runs 🏃‍♀️", "犬が走る", "собака бежит", "!!! ... ---", "", "\ud800 lone", "كلب يجري"]
CONTEXT = 12


@pytest.fixture(params=["bytes", "words", "bert", "clip"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer(99, context=CONTEXT)
    if request.param == "words":
        words = WordTokenizer(context=CONTEXT)
        words.fit(["a dog runs", "a dog"], limit=50)
        return words
    transformers = pytest.importorskip("transformers")
    if request.param == "clip":
        return HubTokenizer(byte_tokenizer(transformers), context=CONTEXT)
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + letter for letter in letters), "dog"]
    vocabulary = {word: number for number, word in enumerate(known)}
    return HubTokenizer(transformers.BertTokenizer(vocab=vocabulary), context=CONTEXT)


def test_any_caption_has_a_start_an_end_and_fits(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.special
    for row in tokenizer.encode(ODD):
        assert 2 <= len(row) <= CONTEXT
        assert (row[0], row[-1]) == (start, end)
    assert len(tokenizer.encode(["x y " * 10_000])[0]) == CONTEXT
    assert tokenizer.encode([""]) == [[start, end]]
    assert tokenizer.ordinary()
    assert not {*tokenizer.ordinary(), tokenizer.mask} & set(tokenizer.special)


def test_a_saved_tokenizer_reads_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    again = read_tokenizer(tokenizer.save(tmp_path), tmp_path)
    captions = [*ODD, "a dog runs to a cat"]
    assert again.encode(captions) == tokenizer.encode(captions)
    for name in ("context", "special", "mask", "pad", "starts_with_class"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.ordinary() == tokenizer.ordinary()


@pytest.mark.parametrize("tokenizer", ["bert", "clip"], indirect=True)
def test_mask_padding_and_class_token_are_the_checkpoints(tokenizer: HubTokenizer) -> None:
    own = tokenizer.tokenizer
    assert tokenizer.pad == own.pad_token_id
    assert tokenizer.starts_with_class == (own.mask_token_id is not None)  # BERT's rows do, CLIP's do not
    assert own.convert_ids_to_tokens(tokenizer.mask) == ("M" if own.mask_token_id is None else "[MASK]")
    assert tokenizer.mask not in tokenizer.encode(["M is the letter M"])[0]


def test_words_are_counted_then_alphabetical_and_capped() -> None:
    tokenizer = WordTokenizer(context=10)
    assert tokenizer.ordinary() == [WordTokenizer.UNKNOWN]
    tokenizer.fit(["b a c", "B! c", "d"], limit=7)
    assert tokenizer.words == ("b", "c", "a")
    assert split_words("A man's dog--a_cat! Café ﬁne") == ["a", "man's", "dog", "a", "cat", "café", "fine"]
    assert tokenizer.encode(["a b c d"]) == [[tokenizer.START, 6, 4, 5, tokenizer.UNKNOWN, tokenizer.END]]


def test_the_context_is_the_towers_own_unless_fewer_are_asked_for() -> None:
    assert (choose_context(0, longest=77), choose_context(30, longest=77)) == (77, 30)
    for wrong in (78, 1, 2):
        with pytest.raises(UsageError, match="3 to 77"):
            choose_context(wrong, longest=77)
