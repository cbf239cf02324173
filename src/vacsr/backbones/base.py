"""An image tower, a text tower, a tokenizer and a photo transform, as one backbone."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vacsr.backbones.augment import Vocabulary, change_words, draw_boxes, drop_image_tokens
from vacsr.backbones.mixing import Partners, blend
from vacsr.backbones.preprocess import PhotoTransform
from vacsr.backbones.resample import resize, whole
from vacsr.backbones.tokenizers import Tokenizer, WordTokenizer, pad
from vacsr.backbones.tokens import Tokens
from vacsr.backbones.variance import VarianceBranch
from vacsr.config import BackboneConfig
from vacsr.errors import ShapeMismatch, UsageError
from vacsr.files import write_json
from vacsr.noise import RowNoise
from vacsr.provenance import UNKNOWN, Provenance

ASSETS = "backbone.json"
"""The file of :meth:`TowerBackbone.save_assets` that describes the rest."""


class TowerParams(NamedTuple):
    """A tower's parameters by depth, for learning rates that differ with it."""

    stem: list[tuple[str, nn.Parameter]]
    """Everything outside the blocks: embeddings, norms, projection."""
    blocks: list[list[tuple[str, nn.Parameter]]]
    """The first block is the nearest to the input."""


class Tower(nn.Module):
    """One side of a backbone."""

    dim: int
    """Of a token."""

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Its repeated layers, input first."""

    @abstractmethod
    def finish(self, tokens: Tensor) -> Tensor:
        """What follows the last block: norm and projection, where the output asks for them. [B, L, W] -> [B, L, D]"""

    @abstractmethod
    def architecture(self) -> dict[str, Any]:
        """What builds the same tower with other weights, as JSON."""


class ImageTower(Tower):
    """Normalised pixels to tokens; ``forward(pixels [B, 3, S, S]) -> [B, L, D]``."""

    class_token: bool
    """The first token speaks for the whole photo."""


class TextTower(Tower):
    """Token ids to token vectors; ``forward(ids [B, L] int64, mask [B, L] bool) -> [B, L, D]``."""

    context: int
    """Longest row it takes."""
    pad: int
    """The id that fills a row's end."""
    summary: Literal["first", "last"]
    """Which real token speaks for the whole caption; with ``fills`` the last place, real or not."""
    fills: bool
    """Trained on rows filled up to ``context`` with padding it attends to (SigLIP): they are filled here too."""

    @abstractmethod
    def vocabulary(self) -> int:
        """How many ids it knows; a tokenizer may hold more."""


class Backbone(nn.Module):
    """Images and texts to tokens. With ``noise`` the encoders augment, as in training; without it they do not.

    The defaults describe a backbone without towers, such as cached features: nothing to tokenize, compile or freeze.
    """

    name: str
    """What its embeddings are known by; "" where they come from elsewhere."""
    config: BackboneConfig
    image_dim: int
    """Of an image token."""
    text_dim: int
    """Of a text token."""
    cached: bool = False
    """Reads cached features: rows of numbers instead of photos and captions."""
    transform: PhotoTransform
    """How photos become squares. Not there where ``cached``."""

    @property
    def pooling(self) -> Literal["gpo", "mean", "cls"]:
        """How its tokens become one vector."""
        return self.config.pooling

    @abstractmethod
    def encode_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Tokens:
        """Photos uint8 [B, 3, H, W] (or features [B, D]) -> [B, L, D]; ``mix`` blends each with its partner."""

    @abstractmethod
    def encode_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Tokens:
        """Rows of :meth:`tokenize` int [B, L] (or features [B, D]) -> [B, L, D]"""

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids, −1 after the end. -> [M, L] int32"""
        raise UsageError("the backbone reads cached features, not words — train a model with clip:, towers: or tiny:")

    def fit(self, pairs: Any) -> None:
        """Learn what the training set has to tell before training: statistics of features, or words of captions."""

    def tower_params(self) -> dict[str, TowerParams]:
        """Parameters by tower and depth; together they are all that the towers train."""
        return {}

    def add_variance(self) -> None:
        """Give each tower a branch that variances are made from."""

    def variance_params(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The branches' parameters by tower; none where there are no branches."""
        return {}

    def compilable(self) -> list[nn.Module]:
        """The repeated layers that may be compiled."""
        return []

    def set_checkpointing(self, on: bool) -> None:
        """Recompute the blocks' activations in the backward pass, or keep them."""

    def provenance(self) -> Provenance:
        """Where embeddings come from that it makes."""
        return UNKNOWN

    def save_assets(self, folder: Path) -> None:
        """Write what, besides the weights, rebuilds the towers."""


@dataclass(frozen=True)
class Scheme:
    """One kind of backbone: what a recipe writes before the colon of ``backbone.spec``."""

    usage: str
    """What to write, for messages."""
    load: Callable[[BackboneConfig, Source], Backbone]
    """Build it."""
    check: Callable[[BackboneConfig], None]
    """Refuse a config that could never be loaded, as far as that shows without reading files."""
    cached: bool = False
    """Reads cached features, not photos."""
    pretrained: bool = False
    """Comes with trained weights, so it can embed photos as it is."""
    matched: bool = False
    """Its two towers were trained together and have projections into one space, so they match without training."""


class Source(NamedTuple):
    """What a backbone is built from besides its config."""

    image_dim: int = 0
    """Of cached features."""
    text_dim: int = 0
    assets: Path | None = None
    """A folder of :meth:`Backbone.save_assets`: the same towers with fresh weights, to be loaded by the caller."""


class TowerBackbone(Backbone):
    """An image tower, a text tower, a tokenizer and a photo transform."""

    special: Tensor
    ordinary: Tensor

    def __init__(
        self,
        image: ImageTower,
        text: TextTower,
        *,
        tokenizer: Tokenizer,
        transform: PhotoTransform,
        config: BackboneConfig,
        name: str,
    ) -> None:
        super().__init__()
        if config.pooling == "cls" and not image.class_token:
            raise UsageError(f"{name} has no class token for images — set backbone.pooling to gpo or mean")
        self.image, self.text = image, text
        self.image_dim, self.text_dim = image.dim, text.dim
        self.tokenizer, self.transform, self.config, self.name = tokenizer, transform, config, name
        self.image_variance: VarianceBranch | None = None
        self.text_variance: VarianceBranch | None = None
        self._note_ids()
        self.set_checkpointing(config.checkpointing)

    def _note_ids(self) -> None:
        """Keep the ids that augmentation needs where the towers are, but not with the weights."""
        device, known = next(self.parameters()).device, self.text.vocabulary()
        ordinary = [number for number in self.tokenizer.ordinary() if number < known]
        for name, ids in (("special", self.tokenizer.special), ("ordinary", ordinary)):
            self.register_buffer(name, torch.tensor(ids, dtype=torch.int64, device=device), persistent=False)

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids, −1 after the end; L is the longest given, cut at the context. -> [M, L] int32"""
        return pad(self.tokenizer.encode(list(captions)))

    def encode_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Tokens:
        """Bytes of any size, brought to the tower's own here; ``noise`` crops, flips and drops tokens.

        ``mix`` blends the photos as the tower would see them, each cropped for itself. uint8 [B, 3, H, W] -> [B, L, D]
        """
        pixels = self._prepared(images, noise)
        if mix is not None:
            others = None if noise is None else replace(noise, rows=mix.rows)
            partners = pixels.flip(0) if mix.images is None else self._prepared(mix.images, others)
            pixels = blend(pixels, partners, mix.mixture)
        values: Tensor = self.image(pixels)
        spread = None if self.image_variance is None else self.image.finish(self.image_variance())
        mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if noise is not None:
            mask = drop_image_tokens(mask, noise, rate=self.config.augment.image_tokens)
        return Tokens(values, mask, torch.zeros(len(values), dtype=torch.int64, device=values.device), spread)

    def _prepared(self, images: Tensor, noise: RowNoise | None) -> Tensor:
        """Cropped, flipped, resized and normalised. uint8 [B, 3, H, W] -> [B, 3, S, S]"""
        augment, (height, width) = self.config.augment, images.shape[-2:]
        size, pixels = self.transform.size, images
        if noise is not None and (augment.crop != (1.0, 1.0) or augment.flip > 0.0):
            boxes = draw_boxes(noise, augment, height=height, width=width)
            pixels = resize(images, boxes, size=size, resample="bilinear")
        elif (height, width) != (size, size):
            pixels = resize(images, whole(images), size=size, resample=self.transform.resample)
        return self.transform.normalize(pixels)

    def encode_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Tokens:
        """Rows of :meth:`tokenize`; ``noise`` masks, replaces and drops words. int [B, L] -> [B, L, D]"""
        if texts.shape[1] > self.text.context:
            raise ShapeMismatch(
                f"captions are {texts.shape[1]} tokens long, the text tower takes {self.text.context} — "
                "tokenize them with this backbone"
            )
        if noise is not None:
            vocabulary = Vocabulary(self.special, self.ordinary, self.tokenizer.mask)
            texts = change_words(texts, noise, self.config.augment, vocabulary=vocabulary)
        if self.text.fills:
            texts = functional.pad(texts, (0, self.text.context - texts.shape[1]), value=-1)
        mask = texts >= 0
        values: Tensor = self.text(torch.where(mask, texts, self.text.pad).long(), mask)
        spread = None if self.text_variance is None else self.text.finish(self.text_variance())
        return Tokens(values, mask, self._summary(mask), spread)

    def _summary(self, mask: Tensor) -> Tensor:
        """[B, L] -> [B]"""
        if self.text.fills:
            return torch.full_like(mask[:, 0], mask.shape[1] - 1, dtype=torch.int64)
        if self.text.summary == "first":
            return torch.zeros_like(mask[:, 0], dtype=torch.int64)
        return (mask.sum(dim=1) - 1).clamp(min=0)

    def fit(self, pairs: Any) -> None:
        """Learn the words of the training captions, where the tokenizer counts words and has none yet.

        A tower that was fitted keeps its words, so that a trained one can be trained on.
        """
        if not hasattr(pairs, "photos"):
            raise UsageError(
                f"backbone '{self.config.spec}' reads photos, these data are cached features — set "
                "backbone.spec=features:, or give photos such as data.pairs=folder:DIR"
            )
        self.fit_words(pairs.captions)

    def fit_words(self, captions: Sequence[str]) -> None:
        """The same from captions alone."""
        resize_words = getattr(self.text, "resize", None)
        if isinstance(self.tokenizer, WordTokenizer) and not self.tokenizer.words and resize_words is not None:
            self.tokenizer.fit(captions, limit=self.text.architecture()["words"])
            resize_words(len(self.tokenizer))
            self._note_ids()

    def tower_params(self) -> dict[str, TowerParams]:
        """Parameters by tower and depth; together they are all there are."""
        return {name: _by_depth(name, tower) for name, tower in (("image", self.image), ("text", self.text))}

    def add_variance(self) -> None:
        """Give both towers a branch that variances are made from: a copy of the last block, as it is now."""
        self.image_variance, self.text_variance = VarianceBranch(self.image), VarianceBranch(self.text)
        self.set_checkpointing(self.config.checkpointing)

    def variance_params(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The branches' parameters by tower; none where there are no branches."""
        branches = {"image": self.image_variance, "text": self.text_variance}
        return {name: [] if branch is None else list(branch.named_parameters()) for name, branch in branches.items()}

    def compilable(self) -> list[nn.Module]:
        """The blocks of both towers and their branches, but for those whose input a branch must see."""
        found: list[nn.Module] = []
        for tower, branch in ((self.image, self.image_variance), (self.text, self.text_variance)):
            blocks = tower.blocks()
            found += blocks if branch is None else [*blocks[:-1], branch.block]
        return found

    def set_checkpointing(self, on: bool) -> None:
        """Recompute the blocks' activations in the backward pass, or keep them."""
        branches = [branch.block for branch in (self.image_variance, self.text_variance) if branch is not None]
        for block in (*self.image.blocks(), *self.text.blocks(), *branches):
            block.__dict__.pop("forward", None)
            if on:
                block.__dict__["forward"] = partial(_recomputed, block.forward)

    def provenance(self) -> Provenance:
        """The towers by name, how inputs are prepared, and a hash of the present weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
        outputs = f"{self.config.image_output}/{self.config.text_output} tokens"
        prepared = f"{self.transform.describe()}; {self.tokenizer.context} tokens; {outputs}"
        return Provenance(self.name, prepared, digest.hexdigest()[:12])

    def save_assets(self, folder: Path) -> None:
        """Write what besides the weights builds this backbone again: architectures, tokenizer, transform."""
        saved = {
            "name": self.name,
            "image": self.image.architecture(),
            "text": self.text.architecture(),
            "tokenizer": self.tokenizer.save(folder),
            "transform": asdict(self.transform),
        }
        write_json(folder / ASSETS, saved)  # last: a folder without it was not written to the end


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block's forward whose activations are not kept. No dropout is left in the towers, so no generator is saved."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _by_depth(side: str, tower: Tower) -> TowerParams:
    place = {id(p): depth for depth, block in enumerate(tower.blocks()) for p in block.parameters()}
    blocks: list[list[tuple[str, nn.Parameter]]] = [[] for _ in tower.blocks()]
    stem: list[tuple[str, nn.Parameter]] = []
    for name, parameter in tower.named_parameters(prefix=side):
        (blocks[place[id(parameter)]] if id(parameter) in place else stem).append((name, parameter))
    return TowerParams(stem, blocks)
