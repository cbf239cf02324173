"""The encoders that cached features came from: a model on features uses them again for photos and words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vacsr.backbones.base import Backbone
from vacsr.backbones.heads import build_pooling
from vacsr.backbones.hub import local_folder
from vacsr.config import BackboneConfig
from vacsr.config.io import parse
from vacsr.errors import DataError, VacsrError
from vacsr.noise import seeded
from vacsr.provenance import Provenance

Kind = Literal["cls", "mean"]


class FeatureEncoder(nn.Module):
    """Pretrained towers, and the pooling that makes one unit vector of a photo's or a caption's tokens."""

    def __init__(self, backbone: Backbone, *, image_pooling: Kind, text_pooling: Kind) -> None:
        super().__init__()
        self.backbone, self.kinds = backbone.eval(), (image_pooling, text_pooling)
        self.image_pool, self.text_pool = build_pooling(image_pooling), build_pooling(text_pooling)

    @classmethod
    def from_provenance(cls, origin: Provenance) -> FeatureEncoder:
        """The encoders that :meth:`provenance` described; it is an error if their weights have changed since."""
        from vacsr.backbones import load_backbone

        try:
            settings = json.loads(origin.encoder)
            with seeded(0):  # as random weights were drawn, if the features have such
                backbone = load_backbone(parse(BackboneConfig, settings["backbone"]))
            origin.check(backbone.provenance())
            return cls(backbone, image_pooling=settings["image"], text_pooling=settings["text"])
        except (VacsrError, ValueError, KeyError, TypeError) as error:
            message = f"the model was trained on features of {origin.backbone}, which cannot be used here ({error})"
            raise DataError(f"{message} — put the encoders where they were, or give features") from error

    def provenance(self) -> Provenance:
        """Where the features come from, with what loads the encoders again: ids, or folders of this machine."""
        config = self.backbone.config
        scheme, _, names = config.spec.partition(":")
        folders = [str(folder.resolve()) if (folder := local_folder(name)) else name for name in names.split(",")]
        changed = config.model_copy(update={"spec": f"{scheme}:{','.join(folders)}"}).model_dump(exclude_defaults=True)
        settings = {"backbone": changed, "image": self.kinds[0], "text": self.kinds[1]}
        return Provenance(**{**vars(self.backbone.provenance()), "encoder": json.dumps(settings)})

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        return self.backbone.tokenize(captions)

    @torch.no_grad()
    def images(self, pixels: Tensor) -> Tensor:
        """uint8 [B, 3, H, W] -> [B, D], of length 1"""
        return normalize(self.image_pool(self.backbone.encode_images(pixels)), dim=-1)

    @torch.no_grad()
    def texts(self, ids: Tensor) -> Tensor:
        """Rows of :meth:`tokenize` [B, L] -> [B, D], of length 1"""
        return normalize(self.text_pool(self.backbone.encode_texts(ids)), dim=-1)
