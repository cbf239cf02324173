"""One file of an exact index: vectors, ids and metadata, mapped into memory and never changed.

An id is found by its 64-bit hash: the hashes lie sorted in the file, so that opening an index reads nothing and finding
an id among millions reads a few pages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vacsr.errors import DataError, EnvironmentProblem
from vacsr.files import write_tensors
from vacsr.search.index import Metadata
from vacsr.search.manifest import Part

T = TypeVar("T")

_DECODER = json.JSONDecoder()


@dataclass(frozen=True, eq=False)
class Segment:
    """N rows of an index, as they lie on the disk."""

    part: Part
    vectors: Tensor
    """[N, d] float32 or float16."""
    text: Tensor
    """[B] uint8: each row's id and metadata, as JSON."""
    offsets: Tensor
    """[N + 1] int64, where each row's text starts."""
    keys: Tensor
    """[N] int64, hashes of the ids, sorted."""
    key_rows: Tensor
    """[N] int64, the row of each key."""
    dead: Tensor | None = None
    """[N] bool."""

    def record(self, row: int) -> tuple[str, Metadata]:
        """Id and metadata."""
        return self._read(row, _both)

    def name(self, row: int) -> str:
        """The id alone: metadata may be long."""
        return self._read(row, _first)

    def _read(self, row: int, parse: Callable[[str], T]) -> T:
        try:
            start, stop = self.offsets.numpy()[row : row + 2]
            return parse(self.text.numpy()[start:stop].tobytes().decode("ascii"))
        except (ValueError, TypeError) as error:
            raise _damaged(Path(self.part.name), f"row {row}: {error}") from error

    def find(self, ids: Sequence[str], keys: npt.NDArray[np.int64]) -> Iterator[tuple[str, int]]:
        """Those of the ids that live here, with their rows."""
        mine = self.keys.numpy()
        first, last = np.searchsorted(mine, keys, "left"), np.searchsorted(mine, keys, "right")
        for n in np.flatnonzero(first < last).tolist():
            for row in self.key_rows[first[n] : last[n]].tolist():
                alive = self.dead is None or not bool(self.dead[row])
                if alive and self.name(row) == ids[n]:
                    yield ids[n], row

    def live_rows(self) -> Tensor:
        """[L] int64"""
        return torch.arange(self.part.rows) if self.dead is None else self.dead.logical_not().nonzero().flatten()


def _both(text: str) -> tuple[str, Metadata]:
    name, metadata = json.loads(text)
    return name, metadata


def _first(text: str) -> str:
    """Of a list's two items: what follows the bracket."""
    name, _ = _DECODER.raw_decode(text, 1)
    return str(name)


def keys_of(ids: Iterable[str]) -> npt.NDArray[np.int64]:
    """[N]"""
    digests = (hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest() for name in ids)
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def write_segment(folder: Path, name: str, *, vectors: Tensor, keys: Tensor, texts: Sequence[bytes]) -> Part:
    """Write N rows under a new name. [N, d], [N], [N]"""
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    order = keys.argsort(stable=True)
    tensors = {
        "vectors": vectors,
        "text": torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8),
        "offsets": torch.from_numpy(ends),
        "keys": keys[order],
        "key_rows": order,
    }
    _write(folder / name, tensors)
    longest = max(float(part.float().norm(dim=1).max()) for part in torch.split(vectors, 8192))
    return Part(name, len(vectors), (folder / name).stat().st_size, longest)


def rewrite_segments(folder: Path, name: str, segments: Sequence[Segment]) -> Part:
    """The living rows of some segments, in their order, as one file."""
    vectors, keys, texts = [], [], []
    for segment in segments:
        rows = segment.live_rows()
        vectors.append(segment.vectors[rows])
        by_row = torch.empty_like(segment.keys)
        by_row[segment.key_rows] = segment.keys
        keys.append(by_row[rows])
        blob, offsets = bytes(segment.text.numpy()), segment.offsets.tolist()
        texts += [blob[offsets[row] : offsets[row + 1]] for row in rows.tolist()]
    return write_segment(folder, name, vectors=torch.cat(vectors), keys=torch.cat(keys), texts=texts)


def mark_dead(folder: Path, name: str, segment: Segment, rows: Sequence[int]) -> Part:
    """Write which rows are dead, with these added."""
    dead = torch.zeros(segment.part.rows, dtype=torch.bool) if segment.dead is None else segment.dead.clone()
    dead[torch.tensor(rows)] = True
    _write(folder / name, {"dead": dead})
    return replace(segment.part, dead=name, dead_rows=int(dead.sum()))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        write_tensors(path, tensors)
    except (OSError, SafetensorError) as error:
        raise EnvironmentProblem(f"cannot write {path} ({error}) — check the folder's rights") from error


def read_segment(folder: Path, part: Part, *, dim: int, dtype: torch.dtype) -> Segment:
    """Map a file. One that is not there is a FileNotFoundError: who reads may have an older manifest."""
    path, rows, whole = folder / part.name, part.rows, torch.int64
    tensors = _mapped(path)
    if path.stat().st_size != part.bytes:
        raise _damaged(path, "another size than the manifest says")
    _check(path, tensors, {
        "vectors": (dtype, [rows, dim]), "text": (torch.uint8, None), "offsets": (whole, [rows + 1]),
        "keys": (whole, [rows]), "key_rows": (whole, [rows]),
    })  # fmt: skip
    if tensors["text"].dim() != 1 or tensors["offsets"][[0, -1]].tolist() != [0, len(tensors["text"])]:
        raise _damaged(path, "the texts' places do not fit the texts")
    if not part.dead:
        return Segment(part=part, **tensors)
    marks = _mapped(folder / part.dead)
    _check(folder / part.dead, marks, {"dead": (torch.bool, [rows])})
    return Segment(part=part, dead=marks["dead"], **tensors)


def _check(path: Path, tensors: dict[str, Any], expected: dict[str, tuple[torch.dtype, list[int] | None]]) -> None:
    """Raise where a file holds other tensors than these; None: of any shape."""
    if tensors.keys() != expected.keys():
        raise _damaged(path, f"it holds {sorted(tensors)}, {sorted(expected)} expected")
    for name, (dtype, shape) in expected.items():
        given = tensors[name]
        if given.dtype != dtype or shape not in (None, list(given.shape)):
            raise _damaged(path, f"{name}: {given.dtype} {list(given.shape)}, {dtype} {shape or ''} expected")


def _mapped(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged ({why}) — copy the index again, or fill it anew")
