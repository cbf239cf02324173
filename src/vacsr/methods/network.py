"""One network: a backbone, two projection heads and their pooling. From inputs to unit vectors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import Backbone, ProjectionHead
from vacsr.backbones.mixing import Partners
from vacsr.backbones.pooling import build_pooling
from vacsr.backbones.tokens import Tokens
from vacsr.backbones.variance import VarianceHead
from vacsr.config import BackboneConfig, TowersConfig
from vacsr.methods.base import Embedding, ParamGroup, split_by_decay
from vacsr.noise import RowNoise, Stream


class Network(nn.Module):
    """Images and texts in, unit vectors out. A model has one of these, or two that teach each other."""

    def __init__(self, backbone: Backbone, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.image_head = ProjectionHead(backbone.image_dim, config.head)
        self.text_head = ProjectionHead(backbone.text_dim, config.head)
        self.image_pool, self.text_pool = build_pooling(backbone.pooling), build_pooling(backbone.pooling)
        self.image_variance: VarianceHead | None = None
        self.text_variance: VarianceHead | None = None

    def add_variance(self, start: float) -> None:
        """Give every item a variance, its logarithm near ``start``: heads of their own, on towers a block each too."""
        pooling, config = self.backbone.pooling, self.config.head
        self.image_variance = VarianceHead(self.backbone.image_dim, config, pooling=pooling, start=start)
        self.text_variance = VarianceHead(self.backbone.text_dim, config, pooling=pooling, start=start)
        self.backbone.add_variance()

    def embed_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Embedding:
        """Features [N, D_image], or photos [N, 3, H, W] uint8, to unit vectors [N, d]; the rest is for training."""
        return self.project_images(self.backbone.encode_images(images, noise, mix), noise)

    def embed_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Embedding:
        """Features [M, D_text], or tokens [M, L] with −1 for padding, to unit vectors [M, d]."""
        return self.project_texts(self.backbone.encode_texts(texts, noise), noise)

    def project_images(self, tokens: Tokens, noise: RowNoise | None = None) -> Embedding:
        """From the backbone's image tokens to unit vectors. -> [N, d]"""
        mean = _unit(self._pooled(tokens, self.image_head, self.image_pool, noise))
        return Embedding(mean, self._log_var(tokens, self.image_variance, noise))

    def project_texts(self, tokens: Tokens, noise: RowNoise | None = None) -> Embedding:
        """From the backbone's text tokens to unit vectors. -> [M, d]"""
        mean = _unit(self._pooled(tokens, self.text_head, self.text_pool, noise))
        return Embedding(mean, self._log_var(tokens, self.text_variance, noise))

    def _log_var(self, tokens: Tokens, head: VarianceHead | None, noise: RowNoise | None) -> Tensor | None:
        """logσ², with dropout of its own; None without variance heads. -> [N, d]"""
        if head is None:
            return None
        assert tokens.spread is not None, "a backbone of a model with variances gives tokens for them"
        tokens = tokens._replace(values=tokens.spread)
        return self._pooled(tokens, head.head, head.pool, None if noise is None else noise.other(Stream.VARIANCE))

    def _pooled(self, tokens: Tokens, head: nn.Module, pool: nn.Module, noise: RowNoise | None) -> Tensor:
        """GPO sorts the projected tokens; mean and class token are taken before, which is cheaper. -> [N, d]"""
        if self.backbone.pooling == "gpo":
            projected: Tensor = pool(tokens._replace(values=head(tokens.values, noise)))
            return projected
        pooled: Tensor = head(pool(tokens), noise)
        return pooled

    def head_params(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained from scratch: heads and pooling, by their names in this network."""
        names = ("image_head.", "text_head.", "image_pool.", "text_pool.", "image_variance.", "text_variance.")
        named = dict(self.named_parameters())
        return [(name, named[name]) for start in names for name in named if name.startswith(start)]

    def tower_groups(self, config: TowersConfig) -> list[ParamGroup]:
        """Block ℓ of L at rate·decay^(L−ℓ), everything outside the blocks at the tower's own rate."""
        groups: list[ParamGroup] = []
        rates = {"image": config.image_lr, "text": config.text_lr}
        for name, parts in self.backbone.tower_params().items():
            rate = rates[name]
            if rate == 0:
                continue
            groups += split_by_decay(f"{name}-stem", parts.stem, lr_scale=rate)
            for number, block in enumerate(parts.blocks):
                scale = rate * config.layer_decay ** (len(parts.blocks) - number)
                groups += split_by_decay(f"{name}-block-{number}", block, lr_scale=scale)
            branch = self.backbone.variance_params()[name]
            groups += split_by_decay(f"{name}-variance", branch, lr_scale=rate * config.layer_decay)
        return groups

    def rest_towers(self, towers: Iterable[str]) -> None:
        """Let these towers ("image", "text") rest: no gradient; the others learn."""
        resting = frozenset(towers)
        for name, parts in self.backbone.tower_params().items():
            branch = self.backbone.variance_params()[name]
            for _, parameter in [*parts.stem, *(named for block in parts.blocks for named in block), *branch]:
                parameter.requires_grad_(name not in resting)

    def blocks(self) -> list[nn.Module]:
        """The towers' repeated layers that may be compiled."""
        return self.backbone.compilable()


def _unit(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1)
