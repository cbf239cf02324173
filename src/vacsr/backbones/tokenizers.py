"""Captions to rows of token ids: a checkpoint's own tokenizer, words counted from the captions, or bytes."""

import re
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vacsr.errors import UsageError
from vacsr.files import disk_errors

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


class Tokenizer(ABC):
    """Captions to the ids that a text tower knows."""

    context: int  # longest row, start and end included
    special: tuple[int, ...]  # start and end: augmentation leaves them alone
    mask: int  # stands for a hidden word
    pad: int | None = None  # fills the end of a row, if the vocabulary has such an id
    starts_with_class: bool = False  # rows start with a class token, as BERT's; others end with the token to read

    @abstractmethod
    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Ids with start and end, cut at ``context`` but not the end; never an empty row."""

    @abstractmethod
    def ordinary(self) -> list[int]:
        """Ids a random word may be drawn from; at least one."""

    @abstractmethod
    def save(self, folder: Path) -> dict[str, Any]:
        """Write the files it needs; return what else :func:`read_tokenizer` needs, as JSON."""


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, start and end at the top of the vocabulary.

    It stands in where a random-weight tower has no tokenizer at hand: right ids and shapes for timing and tests, and
    nothing a pretrained tower would understand.
    """

    def __init__(self, vocabulary: int, *, context: int) -> None:
        self.vocabulary, self.context = vocabulary, context
        self.special, self.mask = (vocabulary - 2, vocabulary - 1), 0

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        start, end = self.special
        room = self.context - 2
        return [[start, *(b % start for b in caption.encode(errors="replace")[:room]), end] for caption in captions]

    def ordinary(self) -> list[int]:
        return list(range(self.special[0]))

    def save(self, folder: Path) -> dict[str, Any]:
        return {"kind": "bytes", "vocabulary": self.vocabulary, "context": self.context}


class WordTokenizer(Tokenizer):
    """Lower-case words without punctuation; the vocabulary is counted from the captions it is fitted on."""

    START, END, UNKNOWN, MASK = range(4)

    def __init__(self, words: Sequence[str] = (), *, context: int) -> None:
        self.words, self.context = tuple(words), context
        self.special, self.mask = (self.START, self.END), self.MASK

    def __len__(self) -> int:
        return 4 + len(self.words)

    def fit(self, captions: Sequence[str], *, limit: int) -> None:
        """Most frequent words first, equal ones in alphabetical order, ``limit`` ids with the four special ones."""
        counts = Counter(word for caption in captions for word in split_words(caption))
        self.words = tuple(sorted(counts, key=lambda word: (-counts[word], word))[: limit - 4])

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        ids = {word: number for number, word in enumerate(self.words, start=4)}
        rows = (split_words(caption)[: self.context - 2] for caption in captions)
        return [[self.START, *(ids.get(word, self.UNKNOWN) for word in row), self.END] for row in rows]

    def ordinary(self) -> list[int]:
        return list(range(4, len(self))) or [self.UNKNOWN]

    def save(self, folder: Path) -> dict[str, Any]:
        return {"kind": "words", "words": list(self.words), "context": self.context}


def split_words(caption: str) -> list[str]:
    """Words of any script, lower case; what is neither letter nor digit separates them.

    >>> split_words("Two dogs’ ball, isn't it? 🐕")
    ['two', 'dogs', 'ball', "isn't", 'it']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", caption).lower().replace("’", "'"))


class HubTokenizer(Tokenizer):
    """A checkpoint's own tokenizer, from transformers.

    The mask is its mask token. CLIP has none: there the byte "M" serves, as in PCME++; captions are lower-cased first,
    so it never occurs otherwise. A vocabulary without either gives its last ordinary id, a rare word.
    """

    def __init__(self, tokenizer: Any, *, context: int) -> None:
        self.tokenizer, self.context, self.pad = tokenizer, context, tokenizer.pad_token_id
        empty = tokenizer.encode("", add_special_tokens=True)
        rare = self.ordinary()[-1]
        self.special = tuple(dict.fromkeys(empty))
        self.starts_with_class = bool(empty) and empty[0] == tokenizer.cls_token_id
        self.instead_of_nothing = [empty[-1] if empty else rare]
        mask = tokenizer.mask_token_id
        self.mask = int(tokenizer.get_vocab().get("M", rare) if mask is None else mask)

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        if not captions:
            return []
        clean = [caption.encode(errors="replace").decode() for caption in captions]  # lone surrogates
        rows = self.tokenizer(clean, truncation=True, max_length=self.context, return_attention_mask=False)["input_ids"]
        return [list(row) or self.instead_of_nothing for row in rows]

    def ordinary(self) -> list[int]:
        special = set(self.tokenizer.all_special_ids)
        return sorted(set(self.tokenizer.get_vocab().values()) - special) or sorted(special)

    def save(self, folder: Path) -> dict[str, Any]:
        with disk_errors(folder):
            self.tokenizer.save_pretrained(folder / "tokenizer")
        return {"kind": "hub", "context": self.context}


def choose_context(asked: int, *, longest: int) -> int:
    """The longest caption in tokens: the tower's own unless fewer are asked for."""
    if asked > longest or asked in (1, 2):
        raise UsageError(f"backbone.context is {asked}, the text tower takes 3 to {longest} — or set 0 for its own")
    return asked or longest


def read_tokenizer(saved: Mapping[str, Any], folder: Path) -> Tokenizer:
    """Build what :meth:`Tokenizer.save` described."""
    if saved["kind"] == "bytes":
        return ByteTokenizer(saved["vocabulary"], context=saved["context"])
    if saved["kind"] == "words":
        return WordTokenizer(saved["words"], context=saved["context"])
    from vacsr.backbones.hub import load_tokenizer

    return HubTokenizer(load_tokenizer(str(folder / "tokenizer")), context=saved["context"])
