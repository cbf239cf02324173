"""Captions to rows of token ids: a checkpoint's own tokenizer, words counted from the captions, or bytes."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vacsr.errors import UsageError
from vacsr.files import disk_errors

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


class Tokenizer(Protocol):
    """What a text tower's words come through."""

    context: int
    """Longest row, start and end included."""
    special: tuple[int, ...]
    """Start and end: augmentation leaves them alone."""
    mask: int
    """Stands for a hidden word."""

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Ids with start and end, cut at ``context`` with the end kept; never an empty row."""

    def ordinary(self) -> list[int]:
        """Ids a random word may be drawn from; at least one."""

    def save(self, folder: Path) -> dict[str, Any]:
        """Write what files it needs; return what else it needs to be built again, as JSON."""


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows side by side, −1 where one is shorter. -> [M, L] int32

    >>> pad([[1, 2, 3], [4]]).tolist()
    [[1, 2, 3], [4, -1, -1]]
    """
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    out = np.full((len(rows), max(1, int(lengths.max(initial=0)))), -1, dtype=np.int32)
    out[np.arange(out.shape[1]) < lengths[:, None]] = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32)
    return torch.from_numpy(out)


class ByteTokenizer:
    """One id per byte of UTF-8, start and end at the top of the vocabulary.

    It stands in where a random-weight tower has no tokenizer at hand: right ids and shapes for timing and tests, and
    nothing a pretrained tower would understand.
    """

    def __init__(self, vocabulary: int, *, context: int) -> None:
        self.vocabulary, self.context = vocabulary, context
        self.special: tuple[int, ...] = (vocabulary - 2, vocabulary - 1)
        self.mask = 0

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Bytes, folded into the vocabulary."""
        start, end = self.special
        room = max(0, self.context - 2)
        return [[start, *(b % start for b in caption.encode(errors="replace")[:room]), end] for caption in captions]

    def ordinary(self) -> list[int]:
        """All but start and end."""
        return list(range(self.special[0]))

    def save(self, folder: Path) -> dict[str, Any]:
        """Two numbers."""
        return {"kind": "bytes", "vocabulary": self.vocabulary, "context": self.context}


class WordTokenizer:
    """Lower-case words without punctuation; the vocabulary is counted from the captions it is fitted on.

    >>> words = WordTokenizer(context=8)
    >>> words.fit(["A red dog.", "a dog"], limit=100)
    >>> words.words, words.encode(["the red dog!"])
    (('a', 'dog', 'red'), [[0, 2, 6, 5, 1]])
    """

    START, END, UNKNOWN, MASK = range(4)

    def __init__(self, words: Sequence[str] = (), *, context: int) -> None:
        self.context = context
        self.special: tuple[int, ...] = (self.START, self.END)
        self.mask = self.MASK
        self._take(words)

    def _take(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: number for number, word in enumerate(words, start=4)}

    def __len__(self) -> int:
        return 4 + len(self.words)

    def fit(self, captions: Sequence[str], *, limit: int) -> None:
        """Most frequent words first, equal ones in alphabetical order, ``limit`` ids with the four special ones."""
        counts = Counter(word for caption in captions for word in split_words(caption))
        self._take(sorted(counts, key=lambda word: (-counts[word], word))[: max(0, limit - 4)])

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Known words by number, all others as one."""
        room = max(0, self.context - 2)
        known = ([self._ids.get(word, self.UNKNOWN) for word in split_words(caption)[:room]] for caption in captions)
        return [[self.START, *ids, self.END] for ids in known]

    def ordinary(self) -> list[int]:
        """The words; the unknown one while there are none."""
        return list(range(4, len(self))) or [self.UNKNOWN]

    def save(self, folder: Path) -> dict[str, Any]:
        """The words."""
        return {"kind": "words", "words": list(self.words), "context": self.context}


def split_words(caption: str) -> list[str]:
    """Words of any script, lower case; what is neither letter nor digit parts them.

    >>> split_words("Two dogs’ ball, isn't it? 🐕")
    ['two', 'dogs', 'ball', "isn't", 'it']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", caption).lower().replace("’", "'"))


class HubTokenizer:
    """A checkpoint's own tokenizer, from transformers.

    The mask is its mask token. CLIP has none: there the byte "M" serves, as in PCME++; captions are lower-cased first,
    so it never occurs otherwise. A vocabulary without either gives its last ordinary id, a rare word.
    """

    def __init__(self, tokenizer: Any, *, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context
        inner = tokenizer.encode("", add_special_tokens=True)
        self.special: tuple[int, ...] = tuple(dict.fromkeys(inner))
        self._last = [inner[-1] if inner else self.ordinary()[-1]]
        self.mask = self._mask()

    def _mask(self) -> int:
        if self.tokenizer.mask_token_id is not None:
            return int(self.tokenizer.mask_token_id)
        return int(self.tokenizer.get_vocab().get("M", self.ordinary()[-1]))

    @property
    def classifies(self) -> bool:
        """It starts rows with a class token, as BERT does; others (GPT, CLIP) end them with the telling one."""
        return self.tokenizer.cls_token_id is not None and self.special[:1] == (self.tokenizer.cls_token_id,)

    def encode(self, captions: Sequence[str]) -> list[list[int]]:
        """Its own ids; a row that comes out empty holds its last special one."""
        if not captions:
            return []
        clean = [caption.encode(errors="replace").decode() for caption in captions]  # lone surrogates
        rows = self.tokenizer(clean, truncation=True, max_length=self.context, return_attention_mask=False)["input_ids"]
        return [list(row) or self._last for row in rows]

    def ordinary(self) -> list[int]:
        """Every id but its special ones."""
        special = set(self.tokenizer.all_special_ids)
        return sorted(set(self.tokenizer.get_vocab().values()) - special) or sorted(special)

    def save(self, folder: Path) -> dict[str, Any]:
        """Its own files, in a folder beside."""
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
