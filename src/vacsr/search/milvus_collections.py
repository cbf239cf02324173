"""The tables in Milvus that an index lies in, and what they can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vacsr.errors import DataError, ShapeMismatch
from vacsr.search.index import Metadata
from vacsr.search.milvus_client import MilvusName
from vacsr.search.ondemand import OnDemand
from vacsr.search.rows import as_json

ID_BYTES = 65535
"""Of Milvus' longest text."""


def ensure_collection(client: Any, name: MilvusName, *, dim: int) -> None:
    """Make one, or see that the one that is there takes such vectors."""
    from pymilvus.exceptions import MilvusException

    if not client.has_collection(name.collection):
        try:
            make_collection(client, name, dim=dim)
        except MilvusException:
            if not client.has_collection(name.collection):  # else another was quicker
                raise
    fields = {field["name"]: field for field in client.describe_collection(name.collection)["fields"]}
    where, other = f"milvus:{name.uri}: the collection {name.collection!r}", f"milvus:{name.uri},collection=NAME"
    if not {"key", "id", "vector", "metadata"} <= fields.keys():
        raise DataError(f"{where} is no index of vacsr — choose another: {other}")
    there = int(fields["vector"]["params"]["dim"])
    if there != dim:
        raise ShapeMismatch(f"{where} takes vectors of dimension {there}, not {dim} — choose another: {other}")
    if not client.list_indexes(name.collection):
        client.create_index(name.collection, _kind(client, name.kind))


def make_collection(client: Any, name: MilvusName, *, dim: int) -> None:
    """An empty one."""
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("key", DataType.VARCHAR, max_length=64, is_primary=True)
    schema.add_field("id", DataType.VARCHAR, max_length=ID_BYTES)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("metadata", DataType.JSON)
    kind = _kind(client, name.kind)
    client.create_collection(name.collection, schema=schema, index_params=kind, consistency_level="Strong")


def is_flat(client: Any, collection: str) -> bool:
    """Are its vectors compared one by one? False too where the server does not say."""
    kinds = [client.describe_index(collection, name) or {} for name in client.list_indexes(collection)]
    return any(kind.get("field_name") == "vector" and kind.get("index_type") == "FLAT" for kind in kinds)


def _kind(client: Any, index: str) -> Any:
    """How the vectors are searched."""
    kind = client.prepare_index_params()
    kind.add_index("vector", index_type=index, metric_type="IP")
    return kind


def check_text(name: str, metadata: Metadata) -> None:
    """Refuse what Milvus cannot hold."""
    as_json(name, metadata)
    try:
        size = len(name.encode())
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = f"id or metadata of {name!r} are not Unicode text ({error.reason}), which Milvus does not take"
        raise DataError(f"{message} — mend them, or use exact:FOLDER") from error
    if size > ID_BYTES:
        raise DataError(f"id {name[:40]!r}… has over {ID_BYTES:,} bytes, which Milvus does not take — shorten it")


def metadata_of(answers: Sequence[Any]) -> Sequence[Metadata]:
    """Of one query's answers."""
    return OnDemand(lambda place: as_dict(answers[place]["entity"]["metadata"]), range(len(answers)))


def as_dict(value: Any) -> Metadata:
    """A JSON field, which some versions give as text."""
    found: Metadata = json.loads(value) if isinstance(value, str | bytes) else dict(value)
    return found
