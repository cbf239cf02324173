"""vacsr's models in the benchmark package mteb: retrieval, compositionality and the other tasks of MIEB.

:class:`VacsrEncoder` gives vectors, of which mteb takes cosines. :class:`VacsrReranker` orders what an encoder found
by the scores of pairs. mteb calls both; it documents what it calls in ``mteb.models.models_protocols``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.errors import MissingExtra, UsageError
from vacsr.methods.base import Embedding
from vacsr.scoring import PairScorer, PairScores
from vacsr.search.index import model_digest

_CHUNK = 256  # items that are embedded at a time: some loaders of mteb give one photo per batch


class _Side(NamedTuple):
    kind: str  # image or text
    vectors: Embedding  # of the distinct items [U, d]
    rows: Tensor  # [N], the distinct item of each input


class _MtebModel:
    """A model and how mteb names it."""

    _kind, _suffix = "dense", ""

    def __init__(self, model: str | Path | PairScorer, *, name: str = "", device: str = "auto") -> None:
        """``model``: a run folder, a model folder, a Hub id, ``clip:ID``, or a scorer that is loaded already.

        ``name``: of the model in mteb's results, ORGANIZATION/NAME; by default vacsr/ and the last part of ``model``.
        """
        try:
            from mteb.models import ModelMeta
        except ImportError as error:
            raise MissingExtra("mteb", "mteb") from error
        self.scorer = model if isinstance(model, PairScorer) else PairScorer.from_pretrained(model, device=device)
        network = self.scorer.model
        if not (network.has_towers or network.backbone.reads_photos):
            message = "the model reads cached features, and mteb gives photos and words"
            raise UsageError(f"{message} — use a model with towers, or one trained on features of `vacsr embed`")
        last = network.method.config.name if isinstance(model, PairScorer) else re.split(r"[/:]", str(model))[-1]
        unknown = dict.fromkeys(
            ("loader", "release_date", "languages", "memory_usage_mb", "max_tokens", "license", "open_weights",
             "public_training_code", "public_training_data", "training_datasets")
        )  # fmt: skip
        self.mteb_model_meta = ModelMeta(
            **unknown,
            name=(name or f"vacsr/{last}") + self._suffix,
            revision=model_digest(network),  # mteb takes stored results of a revision, so other weights need another
            n_parameters=network.count_parameters(),
            embed_dim=network.dim,
            framework=["PyTorch"],
            similarity_fn_name="cosine",
            use_instructions=False,
            modalities=["image", "text"],
            model_type=[self._kind],
        )

    def _embed(self, loader: Any) -> tuple[str, Embedding]:
        """Photos or captions, batch by batch. -> their kind, [N, d]"""
        kind, waiting, parts = "", list[Any](), list[Embedding]()
        for batch in loader:
            kind, items = _content(batch)
            waiting += items
            if len(waiting) >= _CHUNK:
                parts.append(self._vectors(kind, waiting))
                waiting = []
        parts += [self._vectors(kind, waiting)] if waiting else []
        spreads = [part.log_var for part in parts if part.log_var is not None]
        return kind, Embedding(torch.cat([part.mean for part in parts]), torch.cat(spreads) if spreads else None)

    def _vectors(self, kind: str, items: list[Any]) -> Embedding:
        return self.scorer.embed_images(items) if kind == "image" else self.scorer.embed_texts(items)


class VacsrEncoder(_MtebModel):
    """The first stage: vectors. Satisfies mteb's ``EncoderProtocol``."""

    def encode(
        self, inputs: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, prompt_type: Any = None, **kwargs: Any
    ) -> Tensor:
        """Unit vectors of a loader's photos or captions; mteb's other arguments change nothing. -> [N, d]"""
        return self._embed(inputs)[1].mean.float().cpu()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosines of all pairs. [A, d], [B, d] -> [A, B]"""
        return _unit(embeddings1) @ _unit(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Cosines of the pairs (n, n). [N, d], [N, d] -> [N]"""
        return (_unit(embeddings1) * _unit(embeddings2)).sum(dim=-1)


class VacsrReranker(_MtebModel):
    """The second stage: the scores of candidate pairs. Satisfies mteb's ``CrossEncoderProtocol``."""

    _kind, _suffix = "cross-encoder", "-reranker"

    def predict(
        self, inputs1: Any, inputs2: Any, *, task_metadata: Any, hf_split: str, hf_subset: str, prompt_type: Any = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Scores of the pairs (n, n) of two loaders, one of photos and one of captions; the rest as above. -> [N]"""
        sides = {side.kind: side for side in (self._side(inputs1), self._side(inputs2))}
        if len(sides) < 2:
            message = f"both sides of the pairs are of the kind {', '.join(sides)}"
            raise UsageError(f"{message}, and vacsr scores an image with a text — use VacsrEncoder for this task")
        images, texts = sides["image"], sides["text"]
        scores = PairScores(self.scorer, images.vectors, texts.vectors)
        return scores.score_of(images.rows, texts.rows).float().cpu()

    def _side(self, loader: Any) -> _Side:
        """Each item is embedded once, though mteb repeats it for all its pairs."""
        ids = list(loader.dataset["id"])
        first = {name: row for row, name in reversed([*enumerate(ids)])}
        rows = {name: row for row, name in enumerate(first)}
        settings = {name: getattr(loader, name) for name in ("batch_size", "collate_fn", "num_workers")}
        distinct = torch.utils.data.DataLoader(loader.dataset.select(list(first.values())), **settings)
        kind, vectors = self._embed(distinct)
        return _Side(kind, vectors, torch.tensor([rows[name] for name in ids]))


def _content(batch: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """What a batch has: photos or captions."""
    kinds = [name for name in ("image", "text", "audio", "video") if name in batch]
    if kinds not in (["image"], ["text"]):
        message = f"the items of this task are {' and '.join(kinds) or 'of an unknown kind'}"
        raise UsageError(f"{message}, and vacsr embeds an image or a text — choose tasks of the categories t2i and i2t")
    return kinds[0], list(batch[kinds[0]])


def _unit(vectors: Any) -> Tensor:
    """An array or tensor as float32 vectors of length 1: mteb may cache vectors, or average them. [N, d] -> [N, d]"""
    return functional.normalize(torch.as_tensor(vectors).float(), dim=-1)
