"""CoOp's cached draws, ``split_fewshot/shot_16-seed_1.pkl``: pickles of Dassl's photo records.

A pickle may run any code when it is read. These hold dicts, lists, texts, numbers and one class of record, so that is
all this reader knows; a file that asks for anything else is refused before it gets it. Dassl need not be installed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vacsr.data.fewshot.entries import Entry
from vacsr.errors import DataError

MAX_BYTES = 64 << 20
"""A draw of 16 of each ImageNet class takes about 3 MB."""
_RECORD = ("dassl.data.datasets.base_dataset", "Datum")
_FIELDS: Mapping[str, type] = {"_impath": str, "_label": int, "_domain": int, "_classname": str}


class _Refused(Exception):
    """The pickle asks for what a draw has no need of."""


class _Record:
    """What stands in for Dassl's record: four plain fields and nothing that runs."""

    entry: Entry

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict) or set(state) != set(_FIELDS):
            raise _Refused("a record has other fields than path, label, domain and class name")
        wrong = [name for name, kind in _FIELDS.items() if type(state[name]) is not kind]
        if wrong:
            raise _Refused(f"field {wrong[0]} of a record is a {type(state[wrong[0]]).__name__}")
        self.entry = Entry(state["_impath"], state["_label"], state["_classname"])


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The record, and nothing else that a pickle could name."""
        if (module, name) != _RECORD:
            raise _Refused(f"it asks for {module}.{name}")
        return _Record


def read_pickled(path: Path) -> dict[str, list[Entry]]:
    """The splits of a published draw (``train``, and mostly ``val``), paths as they were where it was written."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _Refused(f"it has {size:,} bytes, {MAX_BYTES:,} are the limit")
        value = _Reader(io.BytesIO(path.read_bytes())).load()
        if not isinstance(value, dict) or not isinstance(value.get("train"), list):
            raise _Refused("it holds no list 'train'")
        return {split: _entries(value[split]) for split in ("train", "val") if split in value}
    except _Refused as reason:
        message = f"{path} is not a published draw: {reason}; expected lists of {'.'.join(_RECORD)} alone"
        raise DataError(f"{message} — do not open it with pickle, use a draw from a source you trust") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}) — check the path") from error
    except MemoryError:
        raise
    except Exception as error:  # broken bytes meet the unpickler in many ways
        raise DataError(f"{path} is not a whole pickle ({type(error).__name__}: {error}) — copy it again") from error


def _entries(records: Sequence[Any]) -> list[Entry]:
    if not isinstance(records, list) or not all(isinstance(one, _Record) and "entry" in vars(one) for one in records):
        raise _Refused("a list holds something else than records")
    return [one.entry for one in records]
