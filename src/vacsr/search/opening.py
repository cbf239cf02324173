"""An index by its name: ``exact:PATH`` or ``milvus:FILE_OR_URI``."""

from __future__ import annotations

from pathlib import Path

from vacsr.errors import UsageError
from vacsr.search.exact import ExactIndex
from vacsr.search.index import VectorIndex, check_same
from vacsr.search.manifest import MANIFEST, create_exact

_HOW = "write exact:FOLDER, milvus:FILE.db or milvus:http://HOST:19530"


def open_index(
    spec: str,
    *,
    dim: int | None = None,
    provenance: str | None = None,
    create: bool = False,
    dtype: str | None = None,
) -> VectorIndex:
    """Open an index and check that it holds what is expected: a dimension and a provenance, where these are given.

    With ``create`` an absent one is made; that needs ``dim``. ``dtype``: how a new exact index keeps vectors, float32
    unless told float16; Milvus keeps float32.
    """
    scheme, colon, where = spec.partition(":")
    if not colon or scheme not in ("exact", "milvus") or not where:
        raise UsageError(f"{spec!r} is not the name of an index — {_HOW}")
    if create and dim is None:
        raise UsageError(f"a new index {spec} needs the dimension of its vectors — pass dim=512")
    new_dim = dim if create else None
    index: VectorIndex
    if scheme == "exact":
        index = _open_exact(Path(where).expanduser(), dim=new_dim, provenance=provenance, dtype=dtype)
    else:
        if dtype not in (None, "float32"):
            raise UsageError(f"Milvus keeps float32, {dtype} is asked for — leave it out, or use exact:FOLDER")
        from vacsr.search.milvus import MilvusIndex

        index = MilvusIndex(where, dim=new_dim, provenance=provenance)
    try:
        check_same(spec, dim=index.dim, provenance=index.provenance, wanted_dim=dim, wanted_provenance=provenance)
    except Exception:
        index.close()
        raise
    return index


def _open_exact(folder: Path, *, dim: int | None, provenance: str | None, dtype: str | None) -> ExactIndex:
    """``dim``: make it where it is absent."""
    if dim is not None and not (folder / MANIFEST).exists():
        create_exact(folder, dim=dim, provenance=provenance or "", dtype=dtype or "float32")
    index = ExactIndex(folder)
    kept = index.info().dtype
    if dtype is not None and kept != dtype:
        index.close()
        raise UsageError(f"{folder} keeps vectors as {kept}, {dtype} is asked for — leave it out, or fill another")
    return index
