"""An image tower, a text tower, a tokenizer and a photo transform as one backbone."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from vacsr.backbones.augment import Partners, blend, change_words, draw_boxes, drop_image_tokens
from vacsr.backbones.base import Backbone, NamedParams, Tokens, TowerParams
from vacsr.backbones.images import PhotoTransform, resize
from vacsr.backbones.lora import add_lora, merge_lora
from vacsr.backbones.tokenizers import Tokenizer, WordTokenizer, read_tokenizer
from vacsr.config import BackboneConfig, LoraConfig
from vacsr.errors import UsageError
from vacsr.files import write_json
from vacsr.noise import RowNoise
from vacsr.provenance import Provenance

ASSETS = "backbone.json"  # the file of :meth:`TowerBackbone.save_assets` that describes the rest


class Tower(nn.Module):
    """One side of a backbone: pixels [B, 3, S, S], or ids [B, L] and their mask [B, L], to tokens [B, L, D]."""

    dim: int  # of a token that comes out
    width: int  # of a token between the blocks
    class_token: bool  # images: the first token stands for the whole photo
    has_tokens: bool = True  # images: one vector per patch comes out; False if the tower pools them itself
    context: int  # texts: the longest row it takes
    vocabulary: int  # texts: how many ids it knows; a tokenizer may hold more
    pad: int  # texts: the id that fills a row's end
    summary: Literal["first", "last"] = "last"
    """Texts: which real token stands for the whole caption; with ``fills`` the last position, real or not."""
    fills: bool = False
    """Texts: trained on rows filled up to ``context`` with padding it attends to (SigLIP): they are filled here too."""
    tokens: Callable[..., Tensor]  # method: the inputs' tokens after the last block -> [B, L, W]
    edits: Any = None  # the vacsr.backbones.edits.TowerEdits that it computes with at the moment, if any

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Its repeated layers, input first."""

    @abstractmethod
    def finish(self, tokens: Tensor) -> Tensor:
        """What follows the last block: norm and projection, where the output asks for them. [..., W] -> [..., D]"""

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.finish(self.tokens(*inputs))

    @abstractmethod
    def set_checkpointing(self, on: bool) -> None:
        """Recompute the blocks' activations in the backward pass with :attr:`recompute`, or store them."""

    @abstractmethod
    def architecture(self) -> dict[str, Any]:
        """What builds the same tower with other weights, as JSON."""

    def resize_vocabulary(self, words: int) -> None:
        """Keep the first rows of the word embeddings, where the tokenizer counts its words."""
        raise NotImplementedError

    def unused(self) -> list[nn.Parameter]:
        return []

    def joints(self) -> tuple[nn.Embedding | None, nn.Module | None]:
        """Where prompts and adapters go in: the word embeddings (None in image towers), and the module that adds the
        positions (None where the first block's input has them)."""
        raise UsageError(f"{type(self).__name__} cannot be given prompts or adapters — use clip: or tiny: towers")

    @property
    def recompute(self) -> dict[str, Any]:
        """Options of ``torch.utils.checkpoint``: a block is recomputed with the edits that it was computed with."""
        from vacsr.backbones.edits import edited

        return {
            "use_reentrant": False,
            "preserve_rng_state": False,  # towers draw nothing
            "context_fn": lambda: (nullcontext(), edited(self, self.edits)),
        }


class TowerBackbone(Backbone):
    """Two towers. They have no dropout of their own: whatever training drops is drawn by seed, outside of them."""

    special: Tensor
    ordinary: Tensor

    def __init__(
        self, image: Tower, text: Tower, *, tokenizer: Tokenizer, transform: PhotoTransform, config: BackboneConfig,
        name: str,
    ) -> None:  # fmt: skip
        super().__init__(config, image_dim=image.dim, text_dim=text.dim)
        if config.pooling == "cls" and not image.class_token:
            raise UsageError(f"{name} has no class token for images — set backbone.pooling to gpo or mean")
        self.image, self.text = image, text
        self.spread_dims = image.width, text.width  # a branch's tokens pass neither norm nor projection
        self.tokenizer, self.transform, self.name = tokenizer, transform, name
        self.image_variance: nn.Module | None = None
        self.text_variance: nn.Module | None = None
        self.checkpointing = self.has_lora = False
        for parameter in self.unused_params():
            parameter.requires_grad_(False)
        self._register_ids()
        self.set_checkpointing(config.checkpointing)

    def _register_ids(self) -> None:
        """The ids that augmentation needs, on the towers' device but not saved with the weights."""
        device = next(self.parameters()).device
        ordinary = [number for number in self.tokenizer.ordinary() if number < self.text.vocabulary]
        for name, ids in (("special", self.tokenizer.special), ("ordinary", ordinary)):
            self.register_buffer(name, torch.tensor(ids, dtype=torch.int64, device=device), persistent=False)

    def _sides(self) -> dict[str, tuple[Tower, nn.Module | None]]:
        """Each tower with its variance branch."""
        return {"image": (self.image, self.image_variance), "text": (self.text, self.text_variance)}

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        rows = [torch.tensor(row, dtype=torch.int32) for row in self.tokenizer.encode(list(captions))]
        return pad_sequence(rows, batch_first=True, padding_value=-1) if rows else torch.zeros(0, 1, dtype=torch.int32)

    def encode_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Tokens:
        """Photos of any size, resized to the tower's; ``noise`` crops, flips and drops tokens.

        ``mix`` blends the photos as the tower would see them, each cropped for itself. uint8 [B, 3, H, W] -> [B, L, D]
        """
        pixels = self._prepare(images, noise)
        if mix is not None:
            others = None if noise is None else replace(noise, rows=mix.rows)
            partners = pixels.flip(0) if mix.images is None else self._prepare(mix.images, others)
            pixels = blend(pixels, partners, mix.mixture)
        values, spread = self._run(self.image, self.image_variance, pixels)
        mask = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if noise is not None:
            mask = drop_image_tokens(mask, noise, rate=self.config.augment.image_tokens)
        return Tokens(values, mask, torch.zeros_like(mask[:, 0], dtype=torch.int64), spread)

    def _prepare(self, images: Tensor, noise: RowNoise | None) -> Tensor:
        """Crop, flip, resize and normalise. uint8 [B, 3, H, W] -> [B, 3, S, S]"""
        augment, (height, width) = self.config.augment, images.shape[-2:]
        size, pixels = self.transform.size, images
        if noise is not None and (augment.crop != (1.0, 1.0) or augment.flip > 0.0):
            boxes = draw_boxes(noise, augment, height=height, width=width)
            pixels = resize(images, boxes, size=size, resample="bilinear")
        elif (height, width) != (size, size):
            pixels = resize(images, size=size, resample=self.transform.resample)
        return self.transform.normalize(pixels)

    def encode_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Tokens:
        """Rows of :meth:`tokenize`; ``noise`` masks, replaces and drops words. int [B, L] -> [B, L, D]"""
        if noise is not None:
            texts = change_words(
                texts, noise, self.config.augment,
                special=self.special, ordinary=self.ordinary, mask=self.tokenizer.mask,
            )  # fmt: skip
        if self.text.fills:
            texts = functional.pad(texts, (0, self.text.context - texts.shape[1]), value=-1)
        mask = texts >= 0
        if self.text.fills:
            summary = torch.full_like(mask[:, 0], mask.shape[1] - 1, dtype=torch.int64)
        elif self.text.summary == "first":
            summary = torch.zeros_like(mask[:, 0], dtype=torch.int64)
        else:
            summary = (mask.sum(dim=1) - 1).clamp(min=0)
        ids = torch.where(mask, texts, self.text.pad).long()
        values, spread = self._run(self.text, self.text_variance, ids, mask)
        return Tokens(values, mask, summary, spread)

    def _run(self, tower: Tower, branch: nn.Module | None, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """A tower's tokens, and those of its branch, which gets what the last block gets. -> [B, L, D], [B, L, W]"""
        if branch is None:
            return tower(*inputs), None
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        # A compiled block may skip its hooks, so the last block is not compiled where it has a branch beside it.
        with tower.blocks()[-1].register_forward_pre_hook(
            lambda _block, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        ):
            values: Tensor = tower(*inputs)
        args, kwargs = calls[0]
        if self.checkpointing and torch.is_grad_enabled():
            out = checkpoint(branch, *args, **tower.recompute, **kwargs)
        else:
            out = branch(*args, **kwargs)
        return values, out[0] if isinstance(out, tuple) else out

    def fit(self, pairs: Any) -> None:
        if not hasattr(pairs, "photos"):
            message = f"backbone '{self.config.spec}' reads photos, these data are cached features"
            raise UsageError(f"{message} — set backbone.spec=features:, or give photos such as data.pairs=folder:DIR")
        self.fit_words(pairs.captions)

    def fit_words(self, captions: Sequence[str]) -> None:
        """Count words, where the tokenizer does that. A fitted one keeps its words, so that training can go on."""
        if isinstance(self.tokenizer, WordTokenizer) and not self.tokenizer.words:
            self.tokenizer.fit(captions, limit=self.text.vocabulary)
            self.text.resize_vocabulary(len(self.tokenizer))
            self._register_ids()

    def tower_params(self) -> dict[str, TowerParams]:
        fixed = set(map(id, [*self.unused_params(), *self.base_params()]))
        return {name: _by_depth(name, tower, branch, fixed) for name, (tower, branch) in self._sides().items()}

    def unused_params(self) -> list[nn.Parameter]:
        return [*self.image.unused(), *self.text.unused()]

    def add_variance(self) -> None:
        """Give both towers a branch that variances are made from: a second last block, as PCME++ has it.

        It starts fresh, except for weights that torch has no initialisation for (the layer scale of DINOv2): copies.
        """
        self.set_checkpointing(False)  # so that nothing of it is copied
        branches = [deepcopy(tower.blocks()[-1]) for tower in (self.image, self.text)]
        for module in (module for block in branches for module in reversed([*block.modules()])):
            # Inner modules first: a block that begins in a special way has the last word.
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        self.image_variance, self.text_variance = branches
        self.set_checkpointing(self.config.checkpointing)

    def add_lora(self) -> None:
        self.set_checkpointing(False)
        for side, tower in (("image", self.image), ("text", self.text)):
            add_lora(tower, self.config.lora, side=side)
        self.has_lora = True
        self.set_checkpointing(self.config.checkpointing)

    def merge_lora(self) -> None:
        for tower in (self.image, self.text):
            merge_lora(tower)
        self.has_lora, self.config = False, self.config.model_copy(update={"lora": LoraConfig()})

    def base_params(self) -> list[nn.Parameter]:
        towers = (self.image, self.text) if self.has_lora else ()
        return [parameter for tower in towers for name, parameter in tower.named_parameters() if ".lora_" not in name]

    def compile_blocks(self, on: bool) -> None:
        for tower, branch in self._sides().values():
            for block in tower.blocks() if branch is None else [*tower.blocks()[:-1], branch]:
                block.compile(dynamic=False, disable=not on)

    def set_checkpointing(self, on: bool) -> None:
        self.checkpointing = on
        for tower in (self.image, self.text):
            tower.set_checkpointing(on)
        self.train(self.training)

    def train(self, mode: bool = True) -> TowerBackbone:
        """Nothing in the towers depends on their mode but whether they recompute, so checkpointing keeps it on."""
        super().train(mode)
        for tower in (self.image, self.text):
            tower.train(mode or self.checkpointing)
        return self

    def provenance(self) -> Provenance:
        """The towers by name, how inputs are prepared, and a hash of the present weights."""
        outputs = f"{self.config.image_output}/{self.config.text_output} tokens"
        prepared = f"{self.transform.describe()}; {self.tokenizer.context} tokens; {outputs}"
        return Provenance(self.name, prepared, hash_weights(self.state_dict()))

    def save_assets(self, folder: Path) -> None:
        saved = {
            "name": self.name,
            "image": self.image.architecture(),
            "text": self.text.architecture(),
            "tokenizer": self.tokenizer.save(folder),
            "transform": asdict(self.transform),
        }
        write_json(folder / ASSETS, saved)  # last: a folder without it was not written to the end


def hash_weights(state: Mapping[str, Tensor], *, start: str = "") -> str:
    """Twelve hexadecimal digits that change with any name or number, and with ``start``."""
    digest = hashlib.sha256(start.encode())
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def read_assets(folder: Path) -> dict[str, Any]:
    """What :meth:`TowerBackbone.save_assets` wrote, with tokenizer and transform rebuilt."""
    saved: dict[str, Any] = json.loads((folder / ASSETS).read_text(encoding="utf-8"))
    settings: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved["transform"].items()}
    tokenizer = read_tokenizer(saved["tokenizer"], folder)
    return {**saved, "tokenizer": tokenizer, "transform": PhotoTransform(**settings)}


def _by_depth(side: str, tower: Tower, branch: nn.Module | None, fixed: set[int]) -> TowerParams:
    """All parameters but those whose ids are ``fixed``."""
    depths = {id(p): depth for depth, block in enumerate(tower.blocks()) for p in block.parameters()}
    blocks: list[NamedParams] = [[] for _ in tower.blocks()]
    stem: NamedParams = []
    for name, parameter in tower.named_parameters(prefix=side):
        if id(parameter) not in fixed:
            (blocks[depths[id(parameter)]] if id(parameter) in depths else stem).append((name, parameter))
    return TowerParams(stem, blocks, [] if branch is None else list(branch.named_parameters()))
