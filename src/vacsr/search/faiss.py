"""`faiss:FOLDER`: an exact index in a folder, with a FAISS index over its vectors; approximate ones are faster.

Vectors, ids and metadata are those of :mod:`.local`, with its guarantees: all or none, one writer, safe from a kill.
``exact:FOLDER`` opens the same folder. The FAISS file holds rows 0 to N of the vectors; :meth:`FaissIndex.optimize`
writes it anew, under the writer's lock, and renames it when it is complete. Without that file, or where it is old, the
search compares with the rows that it lacks. So it is never needed, and what was added is found at once.

FAISS proposes candidates, and these are scored from the stored vectors, so that a compressed index ranks them as well
as an exact one. FAISS trusts its files: open only folders that you trust.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

import vacsr.search.store as store
from vacsr.errors import UsageError
from vacsr.files import atomic_paths
from vacsr.search.database import import_extra
from vacsr.search.index import IndexInfo
from vacsr.search.local import ExactIndex, writer_lock
from vacsr.search.nearest import Floats, Rows, best_rows, nearest_rows
from vacsr.search.store import Snapshot

_NAME = re.compile(r"(?P<folder>.+?)(?:,index=(?P<index>.+?))?(?:,search=(?P<search>.+))?", re.DOTALL)
_FILE = re.compile(r"(.+)\.([0-9a-f]{32})-(\d{8})\.faiss")  # kind, id of the exact index, number of its files
_SPARE = 2  # candidates per hit: some are deleted rows
_BLOCK = 1 << 16  # vectors added at a time
_TRAINING = 1 << 17  # vectors that a new FAISS index is trained on


class FaissIndex(ExactIndex):
    """``index``: what `faiss.index_factory` takes; "Flat" is exact. ``search``: what `faiss.ParameterSpace` takes."""

    kind, needs = "faiss", ("faiss",)

    def __init__(self, folder: Path, *, index: str = "", search: str = "", patience: float = 60.0) -> None:
        super().__init__(folder, patience=patience)
        self._faiss = import_extra("faiss", "faiss")
        stored = [match[1] for path in folder.glob("*.faiss") if (match := _FILE.fullmatch(path.name))]
        self.index, self._settings = index or min(stored, default="Flat"), search
        self.exact, self.where = self.index == "Flat", f"{folder},index={self.index}"
        self.where += f",search={search}" if search else ""
        self._loaded: tuple[tuple[Path, int], Any] | None = None
        self._empty()
        self._load()

    @classmethod
    def open(cls, where: str, *, dim: int | None, provenance: str | None, dtype: str | None) -> Self:
        match = _NAME.fullmatch(where)
        assert match is not None  # it matches whatever is not empty
        ExactIndex.open(match["folder"], dim=dim, provenance=provenance, dtype=dtype).close()
        return cls(Path(match["folder"]).expanduser(), index=match["index"] or "", search=match["search"] or "")

    def refresh(self) -> bool:
        changed = super().refresh()
        self._load()
        return changed

    def info(self) -> IndexInfo:
        size = sum(path.stat().st_size for path in self.folder.glob("*.faiss"))
        info = super().info()
        return info._replace(bytes=(info.bytes or 0) + size)

    def close(self) -> None:
        super().close()
        self._loaded = None

    def optimize(self) -> None:
        """Bring the FAISS file up to date: add the new rows, or train it anew once they are the majority."""
        with writer_lock(self.folder, patience=self.patience):
            self.refresh()
            now, built = self._snapshot, self._built(self._snapshot)
            if not now.state.rows or (built is not None and built.ntotal == now.state.rows):
                return
            if built is None or 2 * built.ntotal < now.state.rows:
                built = self._empty()
                sample = torch.linspace(0, now.state.rows - 1, min(_TRAINING, now.state.rows)).long()
                try:
                    built.train(_floats(now.vectors[sample]))
                except RuntimeError as error:
                    message = f"{now.state.rows:,} vectors are too few to train {self.index}"
                    warnings.warn(f"{message} ({error}): searches stay exact", stacklevel=2)
                    return
            for start in range(built.ntotal, now.state.rows, _BLOCK):
                built.add(_floats(now.vectors[start : start + _BLOCK]))
            path = self._path(now)
            with store.storage_errors(path), atomic_paths(path) as (temporary,):
                self._faiss.write_index(built, str(temporary))
            for other in self.folder.glob("*.faiss"):
                if other != path and _FILE.fullmatch(other.name):
                    other.unlink()
            self._load()

    def _nearest(self, now: Snapshot, queries: Tensor, k: int) -> tuple[Rows, Floats]:
        built = self._built(now)
        k = min(k, len(now))
        if built is None or not k or not len(queries):
            return super()._nearest(now, queries, k)
        found = built.search(_floats(queries), min(_SPARE * k, built.ntotal))[1]
        alive = built.ntotal - int(now.deleted[: built.ntotal].sum())
        newer, deleted = now.vectors[built.ntotal :], now.deleted[built.ntotal :]
        tail = built.ntotal + nearest_rows(newer, queries, k, deleted=deleted, max_norm=now.state.max_norm)[0]
        rows, scores = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        for n, query in enumerate(queries):
            near = found[n][found[n] >= 0]
            near = near[~now.deleted[near]]
            if len(near) < min(k, alive):  # deleted ones came first, or lists of an inverted file were short
                rows[n : n + 1], scores[n : n + 1] = super()._nearest(now, query[None], k)
            else:
                near = np.sort(np.append(near, tail[n]))
                rows[n], scores[n] = best_rows(now.vectors, query.double().numpy(), near, k)
        return rows, scores

    def _empty(self) -> Any:
        """Of this kind, without vectors."""
        try:
            built = self._faiss.index_factory(self.dim, self.index, self._faiss.METRIC_INNER_PRODUCT)
            return self._with_settings(built)
        except RuntimeError as error:
            message = f"FAISS does not know index={self.index}, or not search={self._settings} of it"
            raise UsageError(f"{message} — write index=Flat, index=HNSW32 or index=IVF1024,Flat") from error

    def _with_settings(self, built: Any) -> Any:
        if self._settings:
            self._faiss.ParameterSpace().set_index_parameters(built, self._settings)
        elif hasattr(built, "nprobe"):
            built.nprobe = max(built.nlist // 16, 1)  # FAISS looks into one list only
        return built

    def _path(self, now: Snapshot) -> Path:
        return self.folder / f"{self.index}.{now.state.id}-{now.database.number:08d}.faiss"

    def _load(self) -> None:
        """Read the file of the present rows, if there is one and it is not the one that is loaded."""
        path = self._path(self._snapshot)
        try:
            key = path, store.regular_file(path).st_ino
        except FileNotFoundError:
            self._loaded = None
            return
        if self._loaded is None or self._loaded[0] != key:
            try:
                with self._bounded(path.stat().st_size):
                    built = self._faiss.read_index(str(path))
            except (RuntimeError, MemoryError) as error:
                raise store.damaged(path, str(error)) from error
            if built.d != self.dim:
                raise store.damaged(path, f"vectors of dimension {built.d}")
            self._loaded = key, self._with_settings(built)

    @contextmanager
    def _bounded(self, size: int) -> Iterator[None]:
        """No array that is read may be larger than its file; FAISS before 1.15 has no such limit."""
        change = getattr(self._faiss, "set_deserialization_vector_byte_limit", lambda _: None)
        before = getattr(self._faiss, "get_deserialization_vector_byte_limit", int)()
        change(size)
        try:
            yield
        finally:
            change(before)

    def _built(self, now: Snapshot) -> Any:
        """The FAISS index of a snapshot's rows; None if there is none."""
        loaded = self._loaded
        if loaded is None or loaded[0][0] != self._path(now) or loaded[1].ntotal > now.state.rows:
            return None  # of other rows, or of more: another process was faster
        return loaded[1]


def _floats(rows: Tensor) -> Floats:
    return np.ascontiguousarray(rows.float().numpy())
