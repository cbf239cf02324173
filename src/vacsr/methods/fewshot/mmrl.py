"""MMRL (Guo and Gu, CVPR 2025): representation tokens that both towers share, inserted into their upper blocks.

R [n, rep_dim] is mapped by a linear layer of its own into every one of the last ``layers`` blocks of each tower. The n
mapped tokens stand right after the first token (the photo's class token, the sentence's start); they come in at the
first of these blocks and are replaced by the next block's own at every following one. A sentence's end moves n further.

A photo has two features: f_c from the class token through the tower's own norm and projection, which stay frozen, and
f_r from the mean of the representation tokens after the same norm, through a projection that learns. Loss:
w·CE(f_c) + (1−w)·CE(f_r) + λ(1−cos(f_c, f⁰)) + λ(1−cos(t, t⁰)), where f⁰ and t⁰ are the frozen towers' features.

f_r knows the classes of training; so w·logits(f_c) + (1−w)·logits(f_r) scores these, and f_c alone any other class list
and photos of another domain. Before training f_c is close to zero-shot CLIP but nothing makes it equal: the inserted
tokens are attended to from the start.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.base import Tower
from vacsr.backbones.edits import TowerEdits
from vacsr.config.fewshot.adapters import MmrlConfig
from vacsr.methods.fewshot.base import ClassSet, FewshotMethod, ShotBatch, drawn_from, scaled_cosines
from vacsr.methods.fewshot.clip import ClipModel, unit
from vacsr.methods.fewshot.kept import Kept
from vacsr.objective import LossTerms

_TOKEN_STD = 0.02


class InsertedTokens(TowerEdits):
    """Puts tokens after the first one: in at the first of the last blocks, replaced at each that follows."""

    def __init__(self, rows: Sequence[Tensor], *, depth: int) -> None:
        self.rows, self.first = rows, depth - len(rows)

    def before(self, depth: int, tokens: Tensor) -> Tensor:
        """[B, L, W] -> [B, L + n, W] at the first of the blocks, the same length at the others"""
        place = depth - self.first
        if place < 0:
            return tokens
        row = self.rows[place]
        old = 0 if place == 0 else len(row)
        inserted = row.to(tokens.dtype).expand(len(tokens), -1, -1)
        return torch.cat((tokens[:, :1], inserted, tokens[:, 1 + old :]), dim=1)


class ImageFeatures(NamedTuple):
    """What a photo is known by, unit vectors."""

    of_class: Tensor  # [B, d]
    of_representation: Tensor  # [B, d]


class MmrlTexts(NamedTuple):
    """The text side of a class list, and whether both features score it."""

    features: Tensor  # [C, d] unit
    mixed: bool


def maps_from(inputs: int, outputs: int, *, count: int) -> nn.ModuleList:
    """``count`` linear layers that all start from the same draw."""
    layer = nn.Linear(inputs, outputs)
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(count))


def final_norm(tower: Tower) -> nn.Module:
    """The norm between a tower's last block and its projection; nothing where it has none."""
    norm = getattr(tower, "norm", None)
    return norm if isinstance(norm, nn.Module) else nn.Identity()


def consistency(features: Tensor, frozen: Tensor) -> Tensor:
    """1 − the mean cosine of unit rows. [N, d], [N, d] -> 0-d"""
    return 1.0 - (features * frozen).sum(dim=1).mean()


class Mmrl(FewshotMethod):
    """Two cross-entropies, and two cosines to the frozen towers."""

    def __init__(self, clip: ClipModel, config: MmrlConfig, *, classes: ClassSet, generator: torch.Generator) -> None:
        super().__init__(clip, config, classes=classes, generator=generator)
        self.config, self.names = config, classes.names
        self.depths = len(clip.backbone.image.blocks()), len(clip.backbone.text.blocks())
        count = min(config.layers, *self.depths)
        self.tokens = nn.Parameter(_TOKEN_STD * torch.randn(config.tokens, config.rep_dim, generator=generator))
        with drawn_from(generator):
            self.image_maps = maps_from(config.rep_dim, clip.image_width, count=count)
            self.text_maps = maps_from(config.rep_dim, clip.text_width, count=count)
            self.projection = self._projection().requires_grad_(True)
        self._frozen = Kept[Tensor]()

    def _projection(self) -> nn.Module:
        """From normed tokens into the shared space. [..., W] -> [..., d]"""
        if self.config.projection == "clip":
            own = (getattr(self.clip.backbone.image, "projection", None), self.clip.image_map)
            return nn.Sequential(*(copy.deepcopy(layer) for layer in own if layer is not None))
        layer = nn.Linear(self.clip.image_width, self.clip.dim, bias=False)
        nn.init.normal_(layer.weight, std=self.clip.image_width**-0.5)
        return layer

    def images(self, pixels: Tensor) -> ImageFeatures:
        """Both features. [B, 3, S, S] -> [B, d] each"""
        clip, tower = self.clip, self.clip.backbone.image
        rows = [layer(self.tokens) for layer in self.image_maps]
        tokens = clip.image_tokens(pixels, edits=InsertedTokens(rows, depth=self.depths[0]))
        whole = clip.image_map(tower.finish(tokens).mean(dim=1)) if clip.mean else clip.finish_image(tokens[:, 0])
        inserted = final_norm(tower)(tokens[:, 1 : 1 + len(self.tokens)])
        return ImageFeatures(unit(whole), unit(self.projection(inserted.mean(dim=1))))

    def texts(self, tokens: Tensor) -> Tensor:
        """Unit features of sentences. [C, L] ids -> [C, d]"""
        rows = [layer(self.tokens) for layer in self.text_maps]
        return self.clip.text(tokens, edits=InsertedTokens(rows, depth=self.depths[1]), shift=len(self.tokens))

    @torch.no_grad()
    def frozen_texts(self, classes: ClassSet) -> Tensor:
        """Zero-shot features of the classes' sentences, kept from one step to the next. -> [C, d]"""
        ids = self.sentence_ids(classes)
        return self._frozen.of((classes.names, classes.template, ids.device), lambda: self.clip.text(ids))

    def loss(self, batch: ShotBatch, classes: ClassSet) -> LossTerms:
        """Of one step."""
        c = self.config
        with torch.no_grad():
            frozen_images = self.clip.image(batch.pixels)
        images, texts = self.images(batch.pixels), self.texts(self.sentence_ids(classes))
        parts = {
            "ce": functional.cross_entropy(self._cosines(images.of_class, texts), batch.labels),
            "ce_rep": functional.cross_entropy(self._cosines(images.of_representation, texts), batch.labels),
            "image": consistency(images.of_class, frozen_images),
            "text": consistency(texts, self.frozen_texts(classes)),
        }
        recognised = torch.lerp(parts["ce_rep"], parts["ce"], c.class_weight)
        total = recognised + c.consistency * (parts["image"] + parts["text"])
        return LossTerms(total, {name: part.detach() for name, part in parts.items()})

    @torch.no_grad()
    def prepared(self, classes: ClassSet) -> MmrlTexts:
        """Both features score the class list of training."""
        trained = classes.names == self.names and not classes.shifted
        mixed = trained if self.config.mixed == "trained" else self.config.mixed == "always"
        return MmrlTexts(self.texts(self.sentence_ids(classes)), mixed)

    @torch.no_grad()
    def logits(self, pixels: Tensor, prepared: MmrlTexts) -> Tensor:
        """[B, 3, S, S], [C, d] -> [B, C]"""
        images = self.images(pixels)
        by_class = self._cosines(images.of_class, prepared.features)
        if not prepared.mixed:
            return by_class
        return torch.lerp(
            self._cosines(images.of_representation, prepared.features), by_class, self.config.class_weight
        )

    def _cosines(self, images: Tensor, texts: Tensor) -> Tensor:
        return scaled_cosines(images, texts, scale=self.clip.scale)
