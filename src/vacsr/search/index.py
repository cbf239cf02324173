"""What an index is: vectors by id, with metadata, searched by inner product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from vacsr.errors import ProvenanceMismatch, ShapeMismatch

Metadata = dict[str, Any]
"""What JSON can hold."""
KINDS = ("images", "texts")
"""What vectors may be of."""


class Hits(NamedTuple):
    """Best first. Every row has k entries, or as many as the index holds vectors if that is fewer.

    Ids and metadata may be read only when they are asked for. They are those of the moment of the search, whatever
    happens to the index meanwhile.
    """

    ids: Sequence[Sequence[str]]  # [Q][k]
    scores: Tensor  # [Q, k] float32, inner products
    vectors: Tensor  # [Q, k, d] float32, as they are stored: what reranking reads
    metadata: Sequence[Sequence[Metadata]]  # [Q][k]


class Entry(NamedTuple):
    """What an index holds under one id."""

    vector: Tensor  # [d] float32
    metadata: Metadata


class AddResult(NamedTuple):
    """Of one call."""

    added: int
    """New ids."""
    replaced: int
    """Ids that were there: their vectors and metadata are the new ones."""


class IndexInfo(NamedTuple):
    """What an index says of itself."""

    kind: str
    where: str
    vectors: int
    dim: int
    dtype: str
    provenance: str
    dead: int
    """Deleted vectors that still take room."""
    parts: int
    """Files of vectors."""
    bytes: int | None
    """On this machine's disk; None where it lies elsewhere."""
    holds: str
    exact: bool
    sources: tuple[str, ...]


@runtime_checkable
class VectorIndex(Protocol):
    """Vectors of one kind, by id. The score is the inner product, so the cosine for unit vectors, as models give them.

    Vectors are kept as they come: whoever wants the cosine of others divides by their length first.
    """

    @property
    def dim(self) -> int:
        """Of a vector."""

    @property
    def provenance(self) -> str:
        """What the vectors are, see :func:`vacsr.search.embedding_provenance`; "" where nobody said."""

    @property
    def holds(self) -> str:
        """ "images" or "texts", as the provenance says; "" where it does not."""

    @property
    def exact(self) -> bool:
        """Does a search find the true nearest? False where it may miss some, and where that is not known."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The SPECs that it was filled from, in the order of their first use, with absolute paths."""

    def __len__(self) -> int:
        """Vectors that a search can find."""

    def add(self, ids: Sequence[str], vectors: Tensor, metadata: Sequence[Metadata] | None = None) -> AddResult:
        """Add vectors [N, d], or replace those whose ids are there. When it returns, they are stored for good."""

    def delete(self, ids: Sequence[str]) -> int:
        """Remove those that are there; how many that were."""

    def known(self, ids: Sequence[str]) -> list[bool]:
        """Which of these ids are there. [N]"""

    def get(self, ids: Sequence[str]) -> dict[str, Entry]:
        """Vector and metadata of those that are there."""

    def metadata(self, ids: Sequence[str]) -> dict[str, Metadata]:
        """Of those that are there."""

    def records(self) -> Iterator[tuple[str, Metadata]]:
        """Id and metadata of everything, in no particular order."""

    def note_source(self, spec: str) -> None:
        """Remember a SPEC that it is filled from, as it is given; once."""

    def search(self, queries: Tensor, k: int) -> Hits:
        """The k vectors of the highest inner product with each query. [Q, d]"""

    def settle(self) -> None:
        """After all has been added: make searches quick, where that is cheap."""

    def info(self) -> IndexInfo:
        """Its size and what it holds."""

    def close(self) -> None:
        """Let go of files and connections."""


def held_kind(provenance: str) -> str:
    """What a provenance says the vectors are of.

    >>> held_kind("texts:0a1b"), held_kind("")
    ('texts', '')
    """
    kind = provenance.partition(":")[0]
    return kind if kind in KINDS else ""


def check_same(where: str, *, dim: int, provenance: str, wanted_dim: int | None, wanted_provenance: str | None) -> None:
    """Raise where an index holds something else than is asked for. None, and an unknown provenance, fit anything.

    >>> check_same("exact:a", dim=4, provenance="images:1", wanted_dim=4, wanted_provenance="images:2")
    Traceback (most recent call last):
    vacsr.errors.ProvenanceMismatch: exact:a holds vectors of 'images:1', these are 'images:2': another model, or \
other weights — use the model that it was filled with, or fill another index
    """
    if provenance and wanted_provenance and provenance != wanted_provenance:
        held, wanted = held_kind(provenance), held_kind(wanted_provenance)
        if held and wanted and held != wanted:
            raise ProvenanceMismatch(f"{where} holds {held}, these are {wanted} — fill another index with {wanted}")
        message = f"{where} holds vectors of {provenance!r}, these are {wanted_provenance!r}"
        action = "use the model that it was filled with, or fill another index"
        raise ProvenanceMismatch(f"{message}: another model, or other weights — {action}")
    if wanted_dim is not None and dim != wanted_dim:
        message = f"{where} holds vectors of dimension {dim}, {wanted_dim} is asked for"
        raise ShapeMismatch(f"{message} — use the model that it was filled with, or fill another index")
