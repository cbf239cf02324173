"""Saved models in sentence-transformers: embeddings as a SentenceTransformer, scores of pairs as a CrossEncoder.

A folder of :meth:`vacsr.MatchingModel.save_pretrained` is one for that library: its modules.json names
:class:`Matcher`. The library imports classes of other packages only with ``trust_remote_code=True``, which lets a
folder name any class. ``SentenceTransformer(modules=[Matcher(model)])`` needs no trust.
"""

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import nn

from vacsr.data.decode import PHOTO_SUFFIXES
from vacsr.errors import MissingExtra, UsageError
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer


class Matcher(nn.Module):
    """The one module of such a model. Texts are strings, photos are PIL images or paths of existing photo files.

    It only infers: train with vacsr. Embeddings have length 1, so their cosine is the model's; those of an ensemble's
    members stand end to end, as in an index.
    """

    config_keys: tuple[str, ...] = ()  # config.json is vacsr's
    save_in_root = True
    modalities = ("text", "image")

    def __init__(self, model: MatchingModel) -> None:
        super().__init__()
        if not model.backbone.reads_photos:
            raise UsageError("the model reads cached features, not photos and words — use vacsr.PairScorer")
        self.model = model.eval()
        self._scorer: PairScorer | None = None

    @classmethod
    def load(cls, source: str, revision: str | None = None, local_files_only: bool = False, **_: Any) -> Self:
        """From a folder or Hub id, as sentence-transformers asks for it."""
        return cls(MatchingModel.from_pretrained(source, revision=None if os.path.isdir(source) else revision))

    def save(self, folder: str, *_: Any, **__: Any) -> None:
        """Beside the files that sentence-transformers writes."""
        self.model.save_pretrained(folder)

    def get_embedding_dimension(self) -> int:
        return self.model.dim

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Texts and photos, or pairs of one text and one photo in either order; a prompt goes before texts."""
        if not inputs or not isinstance(inputs[0], tuple | list):
            return {"items": [_prompted(item, prompt) for item in inputs]}
        pairs = [sorted((_prompted(item, prompt) for item in pair), key=_is_photo) for pair in inputs]
        if any([_is_photo(item) for item in pair] != [False, True] for pair in pairs):
            raise UsageError(
                "a pair to score is a text and a photo — give (text, image), the image as PIL image or path"
            )
        return {"pairs": pairs}

    @torch.inference_mode()
    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Adds ``sentence_embedding`` [N, d] of items, or ``scores`` [N, 1] of pairs."""
        device = next(chain(self.parameters(), self.buffers())).device
        if self._scorer is None or self._scorer.device != device:
            self._scorer = PairScorer(self.model, device=device)
        scorer = self._scorer
        if "pairs" in features:
            texts, photos = (_unique(column) for column in zip(*features["pairs"], strict=True))
            found = scorer.score_all(photos[0], texts[0])
            return {**features, "scores": found.score_of(torch.tensor(photos[1]), torch.tensor(texts[1]))[:, None]}
        items = features["items"]
        embed = scorer.embed_images if _is_photo(items[0]) else scorer.embed_texts
        return {**features, "sentence_embedding": embed(items).mean}


def cross_encoder(source: str | Path | MatchingModel, *, device: str | None = None) -> Any:
    """A ``sentence_transformers.CrossEncoder``: ``predict`` of (text, photo) pairs gives the scores of
    :class:`vacsr.PairScorer`, ``rank`` sorts photos for a text, or texts for a photo.

    Its ``save_pretrained`` writes a folder that ``CrossEncoder(folder, trust_remote_code=True)`` opens.
    """
    try:
        from sentence_transformers import CrossEncoder
    except ImportError as error:
        raise MissingExtra("sentence-transformers", "sentence-transformers") from error
    model = source if isinstance(source, MatchingModel) else MatchingModel.from_pretrained(source)
    return CrossEncoder(modules=[Matcher(model)], activation_fn=nn.Identity(), device=device)


def _is_photo(item: Any) -> bool:
    """A PIL image, a path, or a string that is the name of an existing photo file."""
    if isinstance(item, str):
        if item.startswith(("http://", "https://", "data:image/")) and " " not in item:
            raise UsageError(f"{item[:80]!r} is a URL, nothing is downloaded — give a photo file or a PIL image")
        return item.lower().endswith(PHOTO_SUFFIXES) and os.path.isfile(item)
    return isinstance(item, Image.Image | Path)


def _prompted(item: Any, prompt: str | None) -> Any:
    return prompt + item if prompt and isinstance(item, str) and not _is_photo(item) else item


def _unique(items: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Each item once, and the position of every one among them: a query of many pairs is embedded once."""
    keys = [item if isinstance(item, str | Path) else id(item) for item in items]
    rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
    return [dict(zip(keys, items, strict=True))[key] for key in rows], [rows[key] for key in keys]
