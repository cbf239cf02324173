"""Put a trained model to work: an index of image vectors, and search with it. :mod:`.audit` checks a data set.

The names below are loaded when first used: the command line reads :mod:`.policies` and should not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vacsr.search.index import Hits, VectorIndex, embedding_provenance, model_digest, open_index
    from vacsr.search.searcher import Searcher

__all__ = ["Hits", "Searcher", "VectorIndex", "embedding_provenance", "model_digest", "open_index"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vacsr.search' has no attribute '{name}'")
    return getattr(import_module(f"vacsr.search.{'searcher' if name == 'Searcher' else 'index'}"), name)
