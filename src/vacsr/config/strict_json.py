"""JSON in which a key stands once: of two, plain JSON would keep the last and drop the first without a word."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from vacsr.errors import DataError


class _Repeated(Exception):
    """An object has this key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _Repeated(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object)  # kept, for files of one object a line


def load_json(text: str, *, place: object) -> Any:
    """Read JSON; ``place`` says in messages where it stands. What is no JSON fails as with :func:`json.loads`.

    >>> load_json('{"a": 1, "b": [2]}', place="a.json")
    {'a': 1, 'b': [2]}
    >>> load_json('{"a": 1, "b": 2, "a": 3}', place="a.json")
    Traceback (most recent call last):
    vacsr.errors.DataError: a.json: 'a' stands twice in one object — keep one of them
    """
    try:
        return _DECODER.decode(text)
    except _Repeated as error:
        raise DataError(f"{place}: {error.args[0]!r} stands twice in one object — keep one of them") from None
