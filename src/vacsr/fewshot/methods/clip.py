"""A trained image–text model as unit features of photos and sentences: what few-shot methods start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import Backbone, TowerBackbone, load_backbone, scheme_of
from vacsr.backbones.edits import TowerEdits, edited
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError
from vacsr.model import MatchingModel
from vacsr.noise import seeded

_CLIP_SCALE = 100.0  # where CLIP's own training ended


class ClipModel(nn.Module):
    """Towers and maps into their shared space: unit vectors. A method freezes them; its edits change what they do."""

    def __init__(
        self, backbone: Backbone, *, image_map: nn.Module, text_map: nn.Module, dim: int, scale: float = _CLIP_SCALE
    ) -> None:
        super().__init__()
        if not isinstance(backbone, TowerBackbone):
            raise UsageError("the model reads cached features — start from a run with clip: or tiny: towers")
        if not backbone.image.has_tokens:
            raise UsageError(f"{backbone.name} pools photos with a head of its own — use a CLIP checkpoint")
        self.backbone, self.image_map, self.text_map = backbone, image_map, text_map
        self.scale, self.dim = scale, dim
        self.image_width, self.text_width = backbone.image.width, backbone.text.width

    @classmethod
    def from_config(cls, config: BackboneConfig) -> ClipModel:
        """``clip:`` with its own projections, or the towers, heads and scale of the model that ``start`` names.

        With ``start`` everything that says what the towers see and give is that model's; ``checkpointing`` is read.
        """
        check_matched(config)
        if not config.start:
            outputs = {"image_output": "projected", "text_output": "projected", "pooling": "cls"}
            with seeded(0):  # random weights, if asked for, are always the same
                backbone = load_backbone(config.model_copy(update=outputs))
            return cls(backbone, image_map=nn.Identity(), text_map=nn.Identity(), dim=backbone.image_dim)
        model = MatchingModel.from_pretrained(Path(config.start).expanduser())
        saved, likelihood = model.config, model.method.likelihood()
        scale = _CLIP_SCALE if likelihood is None else likelihood.scale
        heads = {"image_map": model.image_head, "text_map": model.text_head}
        clip = cls(model.backbone, **heads, dim=saved.head.dim, scale=scale)
        if config.spec not in (BackboneConfig().spec, saved.spec):
            raise UsageError(f"{config.start} has towers {saved.spec!r}, not {config.spec!r} — leave backbone.spec out")
        if model.second is not None:
            raise UsageError(f"{config.start} has two networks — start from a method with one, such as infonce")
        if saved.pooling != "cls":
            raise UsageError(f"{config.start} pools with {saved.pooling} — train it with backbone.pooling=cls")
        clip.backbone.set_checkpointing(config.checkpointing)
        return clip

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def depths(self) -> tuple[int, int]:
        """Blocks of the image tower and of the text tower."""
        return len(self.backbone.image.blocks()), len(self.backbone.text.blocks())

    def tokens(self, prompts: Sequence[str]) -> Tensor:
        """Ids, −1 after the end, as long as the longest. -> [C, L]"""
        return self.backbone.tokenize(prompts).long().to(self.device)

    def image(self, pixels: Tensor, *, edits: TowerEdits | None = None) -> Tensor:
        """Unit vectors of normalised photos. [B, 3, S, S] -> [B, d]"""
        return self.pool_image(self.image_tokens(pixels, edits=edits))

    def image_tokens(self, pixels: Tensor, *, edits: TowerEdits | None = None) -> Tensor:
        """After the last block, before the final norm; class token first. [B, 3, S, S] -> [B, L, W]"""
        with edited(self.backbone.image, edits):
            return self.backbone.image.tokens(pixels)

    def pool_image(self, tokens: Tensor) -> Tensor:
        """Unit vectors of the class token. [B, L, W] -> [B, d]"""
        return unit(self.image_map(self.backbone.image.finish(tokens[:, 0])))

    def text(self, tokens: Tensor, *, edits: TowerEdits | None = None) -> Tensor:
        """Unit vectors of sentences; ``edits`` may add tokens before the end. [C, L] ids -> [C, d]"""
        tower = self.backbone.text
        mask = tokens >= 0
        with edited(tower, edits):
            states = tower.tokens(torch.where(mask, tokens, tower.pad), mask)
        ends = mask.sum(dim=1) - 1 + states.shape[1] - tokens.shape[1]
        index = torch.zeros_like(ends) if tower.summary == "first" else ends
        pooled = tower.finish(states[torch.arange(len(states), device=states.device), index])
        return unit(self.text_map(pooled))


def check_matched(config: BackboneConfig) -> None:
    """Refuse towers that were never trained to match photos and sentences, and LoRA: few-shot methods freeze them."""
    if config.lora.rank:
        raise UsageError("few-shot methods train prompts and adapters, not towers — set backbone.lora.rank=0")
    if not config.start and not scheme_of(config.spec).matched:
        message = f"backbone {config.spec!r} is not trained to match photos and sentences"
        raise UsageError(f"{message} — write clip:ID_OR_FOLDER, or set backbone.start to a trained run")


def unit(x: Tensor) -> Tensor:
    """Of length 1, and not in half precision. [..., d] -> [..., d]"""
    return functional.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
