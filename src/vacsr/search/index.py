"""The interface of an index: vectors by id, with metadata, searched by inner product. :func:`open_index` opens one.

To add a backend, subclass :class:`VectorIndex` and add a line to :data:`BACKENDS`; tests/search/test_index.py then
checks that it behaves like the others.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from vacsr.errors import DataError, MissingExtra, ProvenanceMismatch, ShapeMismatch, UsageError

if TYPE_CHECKING:
    from vacsr.model import MatchingModel

Metadata = dict[str, Any]
"""A JSON object."""
Check = Callable[[dict[str, Metadata]], None]
"""Receives the stored metadata of ids that are about to be replaced, and may raise."""
BACKENDS = {
    "exact": "vacsr.search.local:ExactIndex",
    "faiss": "vacsr.search.faiss:FaissIndex",
    "milvus": "vacsr.search.milvus:MilvusIndex",
    "qdrant": "vacsr.search.qdrant:QdrantIndex",
    "pgvector": "vacsr.search.pgvector:PgvectorIndex",
}
"""Scheme → ``module:class``."""
DTYPES = {"float32": torch.float32, "float16": torch.float16}

_NOT_EMBEDDING = {"start", "weights", "augment", "checkpointing"}  # settings that change no vector
_MAX_NORM = 1e18  # the inner product of two such vectors stays within float32
_MAX_K = 16384  # Milvus returns no more, and backends should not differ


class Hits(NamedTuple):
    """Best first. Every row has k entries, or as many as the index holds vectors if that is fewer.

    Ids and metadata may be read lazily. They are those of the time of the search, whatever happens to the index later.
    """

    ids: Sequence[Sequence[str]]  # [Q][k]
    scores: Tensor  # [Q, k] float32, inner products
    vectors: Tensor  # [Q, k, d] float32, as stored, for rescoring
    metadata: Sequence[Sequence[Metadata]]  # [Q][k]


class Entry(NamedTuple):
    vector: Tensor  # [d] float32
    metadata: Metadata


class AddResult(NamedTuple):
    added: int
    replaced: int


class IndexInfo(NamedTuple):
    kind: str
    where: str
    vectors: int
    dim: int
    dtype: str
    provenance: str
    dead: int  # deleted vectors that still take space
    parts: int  # files of vectors
    bytes: int | None  # on disk; None where a server does not say
    holds: str  # images, texts, or "" if unknown
    exact: bool
    sources: tuple[str, ...]


class VectorIndex(ABC):
    """Vectors of one kind, by id. The score is the inner product: the cosine for unit vectors, which models return.

    Vectors are stored as they are: normalise them first if you want the cosine of others. A backend implements what is
    abstract; :meth:`_add` and :meth:`_search` receive checked arguments.
    """

    kind: str
    """The scheme in :data:`BACKENDS`."""
    where: str
    dim: int
    """Of a vector."""
    dtype: str = "float32"
    """How vectors are stored."""
    provenance: str
    """Which model made the vectors, see :func:`embedding_provenance`; "" if unknown."""
    exact: bool
    """Is the true nearest always found? False also where that is unknown."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Packages of the extra that is called as the scheme."""

    @classmethod
    @abstractmethod
    def open(cls, where: str, *, dim: int | None, provenance: str | None, dtype: str | None) -> Self:
        """Open the index. Where it does not exist and ``dim`` is given, create it."""

    @abstractmethod
    def __len__(self) -> int:
        """Vectors that a search can return."""

    @abstractmethod
    def delete(self, ids: Sequence[str]) -> int:
        """Delete those that exist, and return how many did."""

    @abstractmethod
    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        """Vector and metadata of those that exist."""

    @abstractmethod
    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        """Metadata of those that exist."""

    @abstractmethod
    def records(self) -> Iterator[tuple[str, Metadata]]:
        """Id and metadata of everything, in no particular order."""

    @property
    @abstractmethod
    def sources(self) -> tuple[str, ...]:
        """The SPECs that it was filled from, in the order of their first use, with absolute paths."""

    @abstractmethod
    def note_source(self, spec: str) -> None:
        """Remember a SPEC that it is filled from, once."""

    def optimize(self) -> None:  # noqa: B027 — most have nothing to do
        """Make searches fast again after many changes. Most backends do that themselves."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections."""

    @abstractmethod
    def _add(self, ids: list[str], vectors: Tensor, metadata: list[str], check: Check | None) -> AddResult:
        """See :meth:`add`. Unique ids, vectors [N, d] of the index's dtype on the CPU, metadata as JSON in ASCII."""

    @abstractmethod
    def _search(self, queries: Tensor, k: int) -> Hits:
        """See :meth:`search`. queries [Q, d] float32 on the CPU"""

    def add(
        self,
        ids: Sequence[str],
        vectors: Tensor,
        metadata: Sequence[Metadata] | None = None,
        *,
        check: Check | None = None,
    ) -> AddResult:
        """Add vectors [N, d], or replace those whose ids exist. When it returns, they are stored for good.

        ``check`` may refuse the whole call for what is stored under these ids. A local index calls it under its lock,
        so no other process can add an id in between.
        """
        names, items = _checked_ids(ids), [{}] * len(ids) if metadata is None else metadata
        if not len(names) == len(vectors) == len(items):
            counts = f"{len(names):,} ids, {len(vectors):,} vectors, {len(items):,} metadata"
            raise ShapeMismatch(f"{counts} — give one vector per id, and metadata for each or none")
        rows = _checked_rows(vectors, names, dim=self.dim, dtype=DTYPES[self.dtype])
        texts = [_as_json(name, item) for name, item in zip(names, items, strict=True)]
        return self._add(names, rows, texts, check) if names else AddResult(0, 0)

    def search(self, queries: Tensor, k: int) -> Hits:
        """The k vectors with the highest inner product with each query. [Q, d]"""
        if not 1 <= k <= _MAX_K:
            raise UsageError(f"k is {k}, expected 1 to {_MAX_K} — ask for 10")
        names = [f"query {row}" for row in range(len(queries))]
        return self._search(_checked_rows(queries, names, dim=self.dim, dtype=torch.float32), k)

    def known(self, ids: Sequence[str]) -> list[bool]:
        stored = self.metadata(ids)
        return [name in stored for name in ids]

    def info(self) -> IndexInfo:
        return IndexInfo(
            kind=self.kind, where=self.where, vectors=len(self), dim=self.dim, dtype=self.dtype,
            provenance=self.provenance, dead=0, parts=1, bytes=None, holds=held_kind(self.provenance),
            exact=self.exact, sources=self.sources,
        )  # fmt: skip


def open_index(
    spec: str, *, dim: int | None = None, provenance: str | None = None, create: bool = False, dtype: str | None = None
) -> VectorIndex:
    """Open an index by its name, as in docs/cli.md, or just ``FOLDER``; checks dimension and provenance if given.

    ``create`` makes a missing index, which needs ``dim``. ``dtype``: how a new index in a folder stores vectors,
    float32 (default) or float16; databases store float32.
    """
    backend, where = find_backend(spec)
    if (create and not dim) or dtype not in (None, *DTYPES):
        raise UsageError(f"dim={dim}, dtype={dtype}: a new index needs both — pass dim=512, and float32 or float16")
    index = backend.open(where, dim=dim if create else None, provenance=provenance, dtype=dtype)
    try:
        check_fits(spec, index, dim=dim, provenance=provenance)
        if dtype not in (None, index.dtype):
            raise UsageError(f"{spec} stores {index.dtype}, not {dtype} — leave it out, or fill another index")
    except Exception:
        index.close()
        raise
    return index


def find_backend(spec: str) -> tuple[type[VectorIndex], str]:
    """The class of an index and its place, by its name; raises where its extra is missing."""
    scheme, colon, where = spec.partition(":")
    if not colon:
        scheme, where = "exact", spec
    if scheme not in BACKENDS or not where:
        others = ", ".join(f"{name}:" for name in BACKENDS if name != "exact")
        raise UsageError(f"{spec!r} is not the name of an index — write exact:FOLDER, or a place after {others}")
    module, _, name = BACKENDS[scheme].partition(":")
    backend: type[VectorIndex] = getattr(import_module(module), name)
    for package in backend.needs:
        if not find_spec(package):
            raise MissingExtra(package, scheme)
    return backend, where


def check_fits(where: str, index: VectorIndex, *, dim: int | None, provenance: str | None) -> None:
    """Raise where an index holds something else than expected. None, and an unknown provenance, fit anything."""
    if index.provenance and provenance and index.provenance != provenance:
        held, wanted = held_kind(index.provenance), held_kind(provenance)
        if held and wanted and held != wanted:
            raise ProvenanceMismatch(f"{where} holds {held}, these are {wanted} — fill another index with {wanted}")
        message = f"{where} was filled with another model, or other weights of this one"
        source = next(iter(index.sources), "SPEC")
        action = f"search it with that model, or fill one for this: vacsr index add INDEX --run RUN --pairs {source}"
        raise ProvenanceMismatch(f"{message} — {action}")
    if dim is not None and index.dim != dim:
        raise ShapeMismatch(f"{where} holds vectors of dimension {index.dim}, not {dim} — fill another index")


def held_kind(provenance: str) -> str:
    """What a provenance says the vectors are of: "images", "texts", or "" if it does not say.

    >>> held_kind("texts:0a1b"), held_kind("")
    ('texts', '')
    """
    kind = provenance.partition(":")[0]
    return kind if kind in ("images", "texts") else ""


def direction_of(provenance: str) -> Literal["t2i", "i2t"]:
    """What an index of such vectors answers with grades: texts that ask for images, or images that ask for texts."""
    return "i2t" if held_kind(provenance) == "texts" else "t2i"


def model_digest(model: MatchingModel, *, method: bool = True) -> str:
    """A hash of weights and settings, the same wherever a model is loaded. Without ``method``: of what embeds."""
    from vacsr.backbones import scheme_of
    from vacsr.pretrained import weights_digest

    settings = model.config.model_dump(mode="json", exclude=_NOT_EMBEDDING)
    if model.has_towers:
        settings["transform"] = model.backbone.transform.describe()
        if scheme_of(model.config.spec).pretrained:
            settings["spec"] = model.config.spec.partition(":")[0]  # wherever its files are
    elif model.untrained:  # no weight tells such encoders apart
        settings["origin"] = [model.provenance.backbone, model.provenance.preprocessing, model.provenance.revision]
    tensors = {name: each for name, each in model.state_dict().items() if method or not name.startswith("method.")}
    return weights_digest(tensors, start=json.dumps(settings, sort_keys=True))[:32]


def embedding_provenance(model: MatchingModel, kind: str = "images") -> str:
    """What an index of this model's embeddings holds. Without the method, which only scores vectors.

    A model that gives each item a variance is refused: an index stores one vector per item.
    """
    if model.image_variance is not None:
        name = getattr(getattr(model.method, "config", None), "name", type(model.method).__name__)
        message = f"{name} gives every image a variance beside its vector, and an index stores vectors only"
        raise UsageError(f"{message} — use a model of another method, such as vacsr")
    return f"{kind}:{model_digest(model, method=False)}"


def calibration_path(run: Path) -> Path:
    from vacsr.pretrained import model_folder

    return model_folder(run) / "search.json"


def index_calibration_path(index: VectorIndex | None) -> Path | None:
    """In the folder of a local index; None for one without a folder."""
    local = index is not None and index.where and Path(index.where).is_dir()
    return Path(index.where) / "search.json" if index is not None and local else None


def calibration_paths(run: Path, index: VectorIndex | None = None) -> list[Path]:
    """Where a calibration may be: the first that exists is used, that of the index before that of the run."""
    from vacsr.pretrained import encoder_spec

    paths = [index_calibration_path(index), None if encoder_spec(run) is not None else calibration_path(run)]
    return [path for path in paths if path is not None]


def _checked_ids(ids: Sequence[str]) -> list[str]:
    """None empty, none twice."""
    seen: set[str] = set()
    for row, name in enumerate(ids):
        if isinstance(ids, str) or not isinstance(name, str) or not name or name in seen:
            raise DataError(f"id {row}, {name!r}, is empty, not a str, or a duplicate — give a list of unique ids")
        seen.add(name)
    return list(ids)


def _checked_rows(rows: Tensor, names: Sequence[str], *, dim: int, dtype: torch.dtype) -> Tensor:
    """As they are stored or searched. [N, d] -> [N, d] of ``dtype`` on the CPU"""
    if rows.ndim != 2 or rows.shape[1] != dim:
        message = f"vectors are {list(rows.shape)}, the index holds vectors of dimension {dim}"
        raise ShapeMismatch(f"{message} — give [N, {dim}], from the model that it was filled with")
    stored = rows.detach().to("cpu", torch.float32).to(dtype)
    bad = ~(torch.linalg.vector_norm(stored.float(), dim=1) <= _MAX_NORM)  # true for NaN
    if bool(bad.any()):
        name, content = names[int(bad.nonzero()[0])], f"NaN, infinity, or values too large for {dtype}"
        raise DataError(f"the vector of {name!r} holds {content} — check what embedded it")
    return stored


def _as_json(name: str, metadata: Metadata) -> str:
    """A JSON object in ASCII: strings may hold lone surrogates, UTF-8 may not."""
    try:
        return json.dumps(dict(metadata), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the metadata of {name!r} are not a JSON object ({error})"
        raise DataError(f"{message} — use strings, numbers and lists") from error


class LazyList(Sequence[Any]):
    """``read(row)`` for each of some rows, called when an item is accessed. It equals any sequence of equal items.

    A search returns hundreds of candidates and shows ten: reading all would take longer than finding them.

    >>> letters = LazyList("abc".__getitem__, [2, 0])
    >>> letters[0], letters[1:], letters == ["c", "a"]
    ('c', LazyList(['a']), True)
    """

    def __init__(self, read: Callable[[int], Any], rows: Sequence[int]) -> None:
        self._read, self._rows = read, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: Any) -> Any:
        return LazyList(self._read, self._rows[key]) if isinstance(key, slice) else self._read(self._rows[key])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    def __repr__(self) -> str:
        return f"LazyList({list(self)!r})"
