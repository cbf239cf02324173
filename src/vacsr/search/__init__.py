"""Put a trained model to work: an index of image vectors, and search with it. :mod:`.audit` looks at a data set."""

from vacsr.search.engine import Searcher
from vacsr.search.index import AddResult, Entry, Hits, IndexInfo, VectorIndex
from vacsr.search.opening import open_index
from vacsr.search.provenance import embedding_provenance, model_digest

__all__ = [
    "AddResult",
    "Entry",
    "Hits",
    "IndexInfo",
    "Searcher",
    "VectorIndex",
    "embedding_provenance",
    "model_digest",
    "open_index",
]
