"""Put a trained model to work: an index of image vectors, and what is built on it."""

from vacsr.search.index import AddResult, Hits, IndexInfo, VectorIndex
from vacsr.search.opening import open_index
from vacsr.search.provenance import embedding_provenance, model_digest

__all__ = [
    "AddResult",
    "Hits",
    "IndexInfo",
    "VectorIndex",
    "embedding_provenance",
    "model_digest",
    "open_index",
]
