"""Which model made a vector, as a few words that an index keeps."""

from __future__ import annotations

import hashlib
import json

import torch

from vacsr.errors import UsageError
from vacsr.model import MatchingModel

# Settings of the backbone that change no embedding.
_NOT_SEEN = ("start", "weights", "augment", "variance_block", "checkpointing")


def model_digest(model: MatchingModel, *, method: bool = True) -> str:
    """A hash of a model's weights and settings; the same wherever it is loaded. Without ``method``, of what embeds."""
    settings = {name: value for name, value in model.config.model_dump(mode="json").items() if name not in _NOT_SEEN}
    if model.has_towers:
        settings["transform"] = model.backbone.transform.describe()
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if method or not name.startswith("method."):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def embedding_provenance(model: MatchingModel, kind: str = "images") -> str:
    """What an index of this model's embeddings holds. The method is left out: it scores vectors and makes none.

    A model that gives each item a variance cannot be searched so: an index holds one vector an item.
    """
    if model.image_variance is not None:
        name = getattr(getattr(model.method, "config", None), "name", type(model.method).__name__)
        message = f"{name} gives every image a variance beside its vector, and an index holds vectors only"
        raise UsageError(f"{message} — use a model of another method, such as vacsr")
    return f"{kind}:{model_digest(model, method=False)}"
