"""One network: a backbone, two projection heads and their pooling. From inputs to unit vectors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import FeatureBackbone, ProjectionHead, TowerBackbone
from vacsr.backbones.mixing import Partners, blend
from vacsr.backbones.pooling import build_pooling
from vacsr.backbones.tokens import Tokens
from vacsr.backbones.variance import VarianceHead
from vacsr.config import BackboneConfig, TowersConfig
from vacsr.draws import RowNoise
from vacsr.methods.base import Embedding, ParamGroup, split_by_decay

_VARIANCE = 5  # purpose of draws, after augmentation's and mixing's


class Network(nn.Module):
    """Images and texts in, unit vectors out. A model has one of these, or two that teach each other."""

    def __init__(self, backbone: FeatureBackbone | TowerBackbone, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.image_head = ProjectionHead(backbone.image_dim, config.head)
        self.text_head = ProjectionHead(backbone.text_dim, config.head)
        self.image_pool = build_pooling(config.pooling) if isinstance(backbone, TowerBackbone) else None
        self.text_pool = build_pooling(config.pooling) if isinstance(backbone, TowerBackbone) else None
        self.image_variance: VarianceHead | None = None
        self.text_variance: VarianceHead | None = None

    def add_variance(self, start: float) -> None:
        """Give every item a variance, its logarithm near ``start``: heads of their own, on towers a block each too."""
        towers = isinstance(self.backbone, TowerBackbone)
        self.image_variance = VarianceHead(self.backbone.image_dim, self.config, start=start, pooled=towers)
        self.text_variance = VarianceHead(self.backbone.text_dim, self.config, start=start, pooled=towers)
        if isinstance(self.backbone, TowerBackbone):
            self.backbone.add_variance()

    def embed_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Embedding:
        """Features [N, D_image], or photos [N, 3, H, W] uint8, to unit vectors [N, d]; the rest is for training."""
        return self.project_images(self.backbone_images(images, noise, mix), noise)

    def embed_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Embedding:
        """Features [M, D_text], or tokens [M, L] with −1 for padding, to unit vectors [M, d]."""
        return self.project_texts(self.backbone_texts(texts, noise), noise)

    def backbone_images(
        self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None
    ) -> Tensor | Tokens:
        """What the image head gets: scaled features, or a tower's tokens."""
        if isinstance(self.backbone, FeatureBackbone):
            if mix is not None:
                images = blend(images, images.flip(0) if mix.images is None else mix.images, mix.mixture)
            return self.backbone.encode_image(images)
        return self.backbone.encode_image(images, noise, mix)

    def backbone_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Tensor | Tokens:
        """What the text head gets."""
        if isinstance(self.backbone, FeatureBackbone):
            return self.backbone.encode_text(texts)
        return self.backbone.encode_text(texts, noise)

    def project_images(self, values: Tensor | Tokens, noise: RowNoise | None = None) -> Embedding:
        """From the backbone's side of the image head to unit vectors. -> [N, d]"""
        mean = _unit(self._pooled(values, self.image_head, self.image_pool, noise))
        return Embedding(mean, self._log_var(values, self.image_variance, noise))

    def project_texts(self, values: Tensor | Tokens, noise: RowNoise | None = None) -> Embedding:
        """From the backbone's side of the text head to unit vectors. -> [M, d]"""
        mean = _unit(self._pooled(values, self.text_head, self.text_pool, noise))
        return Embedding(mean, self._log_var(values, self.text_variance, noise))

    def _log_var(self, values: Tensor | Tokens, head: VarianceHead | None, noise: RowNoise | None) -> Tensor | None:
        """logσ², with dropout of its own; None without variance heads. -> [N, d]"""
        if head is None:
            return None
        if not isinstance(values, Tensor):
            assert values.spread is not None, "towers that give variances have a branch for them"
            values = values._replace(values=values.spread)
        return self._pooled(values, head.head, head.pool, None if noise is None else noise.other(_VARIANCE))

    def _pooled(
        self, values: Tensor | Tokens, head: nn.Module, pool: nn.Module | None, noise: RowNoise | None
    ) -> Tensor:
        """GPO sorts the projected tokens; mean and class token are taken before, which is cheaper. -> [N, d]"""
        if isinstance(values, Tensor):
            features: Tensor = head(values, noise)
            return features
        assert pool is not None, "towers have a pooling"
        if self.config.pooling == "gpo":
            projected: Tensor = pool(values._replace(values=head(values.values, noise)))
            return projected
        pooled: Tensor = head(pool(values), noise)
        return pooled

    def head_params(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained from scratch: heads and pooling, by their names in this network."""
        names = ("image_head.", "text_head.", "image_pool.", "text_pool.", "image_variance.", "text_variance.")
        named = dict(self.named_parameters())
        return [(name, named[name]) for start in names for name in named if name.startswith(start)]

    def tower_groups(self, config: TowersConfig) -> list[ParamGroup]:
        """Block ℓ of L at rate·decay^(L−ℓ), everything outside the blocks at the tower's own rate."""
        if not isinstance(self.backbone, TowerBackbone):
            return []
        groups: list[ParamGroup] = []
        for name, rate in (("image", config.image_lr), ("text", config.text_lr)):
            parts = self.backbone.tower_params()[name]
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
        if isinstance(self.backbone, TowerBackbone):
            resting = frozenset(towers)
            for name, parts in self.backbone.tower_params().items():
                branch = self.backbone.variance_params()[name]
                for _, parameter in [*parts.stem, *(named for block in parts.blocks for named in block), *branch]:
                    parameter.requires_grad_(name not in resting)

    def blocks(self) -> list[nn.Module]:
        """The towers' repeated layers that may be compiled."""
        return self.backbone.compilable() if isinstance(self.backbone, TowerBackbone) else []


def _unit(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1)
