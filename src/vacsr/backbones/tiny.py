"""``tiny:``: a small CLIP in plain torch that learns a simple world in minutes on a laptop's processor.

A convolutional stem rather than patches: on little data it finds edges and colours sooner. Options follow the colon,
``tiny:width=96,depth=3``; :class:`TinyConfig` lists them.
"""

from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vacsr.backbones.base import Scheme, Source
from vacsr.backbones.images import PhotoTransform
from vacsr.backbones.tokenizers import WordTokenizer, choose_context
from vacsr.backbones.towers import Tower, TowerBackbone, read_assets
from vacsr.config import BackboneConfig, Config
from vacsr.config.io import parse
from vacsr.errors import UsageError

_HALF = (0.5, 0.5, 0.5)
_GRID = 16  # pixels of a side that become one token
_Count = Annotated[int, Field(ge=1)]


class TinyConfig(Config):
    """Sizes of both towers."""

    width: _Count = 64  # of a token
    depth: _Count = 2  # blocks of the image tower
    text_depth: _Count = 2  # blocks of the text tower
    heads: _Count = 4  # of attention
    size: _Count = 64  # side of the photos, a multiple of 16: every 16×16 pixels become one token
    context: Annotated[int, Field(ge=3)] = 32  # longest caption in words, start and end included
    words: Annotated[int, Field(ge=5)] = 4096  # largest vocabulary; the rarest words beyond it are unknown

    @model_validator(mode="after")
    def _multiples(self) -> Self:
        if self.width % (2 * self.heads) or self.size % _GRID:
            wanted = f"width {self.width} must be a multiple of {2 * self.heads}, size {self.size} of {_GRID}"
            raise ValueError(f"{wanted} — e.g. tiny:width=96,size=64")
        return self


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A block begins as the identity: tokens keep their content, and learning starts sooner."""
        for start in (*self.output.parameters(), *self.mlp[2].parameters()):
            nn.init.zeros_(start)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, L, D], [B, 1, 1, L] True where attended to -> [B, L, D]"""
        split = self.inputs(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], attn_mask=mask)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _TinyTower(Tower):
    """What both towers share: the blocks and the norm after them."""

    def _add_blocks(self, config: TinyConfig, *, depth: int, output: str) -> None:
        self.config, self.dim, self.width = config, config.width, config.width
        self.layers = nn.ModuleList(Block(config.width, heads=config.heads) for _ in range(depth))
        self.norm = nn.LayerNorm(config.width) if output == "norm" else nn.Identity()
        self.checkpointing = False

    def _run_blocks(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, L, D] -> [B, L, D]"""
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, mask, **self.recompute)
            else:
                x = layer(x, mask)
        return x

    def finish(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.norm(tokens)
        return out

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def set_checkpointing(self, on: bool) -> None:
        self.checkpointing = on

    def architecture(self) -> dict[str, Any]:
        return self.config.model_dump()


class TinyImageTower(_TinyTower):
    """Three convolutions, a class token, some blocks."""

    class_token = True

    def __init__(self, config: TinyConfig, *, output: str) -> None:
        super().__init__()
        width = config.width
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 4, 4, stride=4),
            nn.GELU(),
            nn.Conv2d(width // 4, width // 2, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
        )
        self.start = nn.Parameter(0.1 * torch.randn(width))
        self.positions = nn.Parameter(0.1 * torch.randn(1 + (config.size // _GRID) ** 2, width))
        self._add_blocks(config, depth=config.depth, output=output)

    def tokens(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, 1 + (S/16)², D]"""
        patches = self.stem(pixels).flatten(2).transpose(1, 2)
        start = self.start.expand(patches.shape[0], 1, -1)
        return self._run_blocks(torch.cat((start, patches), dim=1) + self.positions)

    def joints(self) -> tuple[None, None]:
        return None, None


class TinyTextTower(_TinyTower):
    """Words and positions, some blocks; every word sees all others. The end token stands for the caption."""

    pad = WordTokenizer.END

    def __init__(self, config: TinyConfig, *, output: str, words: int) -> None:
        super().__init__()
        self.context, self.vocabulary = config.context, words
        self.words = nn.Embedding(words, config.width)
        self.positions = nn.Parameter(0.1 * torch.randn(config.context, config.width))
        self._add_blocks(config, depth=config.text_depth, output=output)
        nn.init.normal_(self.words.weight, std=0.5)

    def resize_vocabulary(self, words: int) -> None:
        """The largest vocabulary was drawn at the start, so the seed alone decides the embeddings."""
        self.words = nn.Embedding(words, self.dim, _weight=self.words.weight[:words].detach().clone())
        self.vocabulary = words

    def tokens(self, ids: Tensor, mask: Tensor) -> Tensor:
        seen = (mask | (torch.arange(ids.shape[1], device=ids.device) == 0))[:, None, None, :]
        return self._run_blocks(self.words(ids) + self.positions[: ids.shape[1]], seen)

    def joints(self) -> tuple[nn.Embedding, None]:
        return self.words, None


def _load(config: BackboneConfig, source: Source) -> TowerBackbone:
    """Fresh towers of the sizes that ``tiny:…`` names; there are no pretrained ones.

    They have as many rows of words as the tokenizer, or all there may be until it is fitted.
    """
    if "projected" in (config.image_output, config.text_output):
        raise UsageError("tiny: has no projection — set image_output and text_output to norm or hidden")
    if source.assets is None:
        options = (part.strip().partition("=") for part in filter(None, config.spec.partition(":")[2].split(",")))
        values: dict[str, str | int] = {name: value for name, _, value in options}
        sizes = parse(TinyConfig, values | ({"size": config.image_size} if config.image_size else {}), within="tiny")
        tokenizer = WordTokenizer(context=choose_context(config.context, longest=sizes.context))
        resample = "bilinear" if config.resample == "own" else config.resample
        transform, name = PhotoTransform(sizes.size, _HALF, _HALF, resample, config.resize), config.spec
    else:
        saved = read_assets(source.assets)
        sizes, name = TinyConfig(**saved["image"]), saved["name"]
        tokenizer, transform = saved["tokenizer"], saved["transform"]
    image = TinyImageTower(sizes, output=config.image_output)
    text = TinyTextTower(sizes, output=config.text_output, words=len(tokenizer) if tokenizer.words else sizes.words)
    return TowerBackbone(image, text, tokenizer=tokenizer, transform=transform, config=config, name=name)


SCHEME = Scheme("tiny:", _load)
