"""One side of a transformers checkpoint as a tower: its blocks, its last norm and projection as asked, nothing else."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from vacsr.backbones.base import ImageTower, TextTower
from vacsr.backbones.hub import plain_config
from vacsr.backbones.patches import use_products
from vacsr.backbones.tokenizers import HubTokenizer, Tokenizer
from vacsr.errors import UsageError

Output = Literal["hidden", "norm", "projected"]

_MASKLESS = "vacsr_causal"  # an attention of transformers' register: sdpa, told by a flag that it is causal
_FINAL_NORMS = ("post_layernorm", "final_layer_norm", "final_norm", "layernorm", "ln_f", "norm")


class HubImageTower(ImageTower):
    """The tokens of an image model, class token first where it has one."""

    def __init__(self, model: nn.Module, *, output: Output, size: int, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.model, self.output = side_of(model, "vision_model"), output
        config: Any = self.model.config
        check_size(size, patch=_first(config.patch_size), name=type(self.model).__name__)
        resize_positions(self.model, size)
        use_products(self.model, size=size)
        self.class_token = any(name.endswith(("cls_token", "class_embedding")) for name, _ in model.named_parameters())
        drop_unused(self.model)
        if getattr(self.model, "use_head", False):  # SigLIP's attention pooling
            self.model.use_head, self.model.head = False, None
        self.norm, self.projection = final_layers(self.model, output, projection)
        self.dim = _width(self.model, self.projection)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, L, D]"""
        return self.finish(self.model(pixel_values=pixels).last_hidden_state)

    def finish(self, tokens: Tensor) -> Tensor:
        """Norm and projection. [B, L, W] -> [B, L, D]"""
        return _finish(tokens, self.norm, self.projection)

    def blocks(self) -> list[nn.Module]:
        """Its repeated layers."""
        return longest_list(self.model)

    def architecture(self) -> dict[str, Any]:
        """Configuration and output."""
        config: Any = self.model.config
        return {"output": self.output, "projection": self.dim if self.projection else 0, "config": plain_config(config)}


class HubTextTower(TextTower):
    """The tokens of a text model.

    Padding is kept out of attention by a mask that is ready for use: handed a plain one, transformers would look
    whether it masks anything, and wait for the device. A causal tower needs none, for its padding comes last. CLIP's
    never gets one, either: some versions of transformers write it out while a CUDA graph is captured, and only then.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        output: Output,
        pad: int,
        summary: Literal["first", "last"],
        projection: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model, self.output, self.pad, self.summary = side_of(model, "text_model"), output, pad, summary
        config: Any = self.model.config
        self.context = context_of(self.model)
        self.fills = config.model_type == "siglip_text_model"
        clip = config.model_type == "clip_text_model"
        self.causal = clip or any(getattr(module, "is_causal", False) for module in self.model.modules())
        if clip and config._attn_implementation == "sdpa":  # others may have a window, or look for the name
            config._attn_implementation = maskless()
        drop_unused(self.model)
        if self.fills:
            projection = self.model.head if output == "projected" else None
            self.model.head = nn.Identity()
        self.norm, self.projection = final_layers(self.model, output, projection)
        self.dim = _width(self.model, self.projection)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, L], [B, L] -> [B, L, D]"""
        return self.finish(self.model(input_ids=ids, attention_mask=self._attention(mask)).last_hidden_state)

    def finish(self, tokens: Tensor) -> Tensor:
        """Norm and projection. [B, L, W] -> [B, L, D]"""
        return _finish(tokens, self.norm, self.projection)

    def _attention(self, mask: Tensor) -> Tensor | None:
        """[B, L] -> what the model takes."""
        if self.causal or self.fills:
            return None
        config: Any = self.model.config
        if config._attn_implementation != "sdpa":
            return mask.long()
        first = torch.arange(mask.shape[1], device=mask.device) == 0  # a row of nothing must not divide by zero
        return (mask | first)[:, None, None, :].expand(-1, 1, mask.shape[1], -1)

    def vocabulary(self) -> int:
        """Rows of its embedding."""
        config: Any = self.model.config
        return int(config.vocab_size)

    def blocks(self) -> list[nn.Module]:
        """Its repeated layers."""
        return longest_list(self.model)

    def architecture(self) -> dict[str, Any]:
        """Configuration, output and what was read from the tokenizer."""
        config: Any = self.model.config
        projection = self.dim if self.projection and not self.fills else 0
        read = {"pad": self.pad, "summary": self.summary}
        return {"output": self.output, "projection": projection, **read, "config": plain_config(config)}


def maskless() -> str:
    """The name of an attention that is causal by its flag alone, made known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_MASKLESS, sdpa_attention_forward)
    AttentionMaskInterface.register(_MASKLESS, lambda *args, **kwargs: None)
    return _MASKLESS


def side_of(model: Any, side: str) -> Any:
    """The image or text half of a two-tower checkpoint, or the model itself where it is one tower."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(f"{type(model).__name__} is an encoder with a decoder, not a tower — give an encoder alone")
    return getattr(model, side, model)


def final_layers(model: Any, output: Output, projection: nn.Module | None) -> tuple[nn.Module | None, nn.Module | None]:
    """Take the norm after the last block out of the model; give back what the output asks for of norm and projection.

    Families differ in what they apply it to; outside, every token gets it. Models whose blocks end in a norm (BERT)
    have no further one: there `hidden` and `norm` are the same.
    """
    if output == "projected" and projection is None:
        raise UsageError(
            f"{type(model).__name__} has no projection per token — set image_output or text_output to norm or hidden"
        )
    norm = None
    for name in _FINAL_NORMS:
        found = getattr(model, name, None)
        if isinstance(found, nn.Module) and "norm" in type(found).__name__.lower():
            norm = found
            setattr(model, name, nn.Identity())
            break
    return (None if output == "hidden" else norm), (projection if output == "projected" else None)


def _finish(tokens: Tensor, norm: nn.Module | None, projection: nn.Module | None) -> Tensor:
    for layer in (norm, projection):
        tokens = tokens if layer is None else layer(tokens)
    return tokens


def drop_unused(model: nn.Module) -> None:
    """Leave out what no token passes: poolers, and the mask token of masked pre-training.

    Parameters without a gradient would be counted, saved, and waited for by distributed training.
    """
    for module in list(model.modules()):
        if isinstance(getattr(module, "pooler", None), nn.Module):
            module.pooler = None  # type: ignore[assignment]
        if isinstance(getattr(module, "mask_token", None), nn.Parameter):
            module.mask_token = None  # type: ignore[assignment]


def longest_list(model: nn.Module) -> list[nn.Module]:
    """The longest list of layers of one class: a transformer's blocks, whatever they are called."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    return max(alike, key=len, default=[])


@torch.no_grad()
def resize_positions(model: Any, size: int) -> None:
    """Interpolate the table of positions once for photos of this side, with the model's own rule.

    Left to the model it would be done in every step, and its backward pass on a GPU is not repeatable.
    """
    config = model.config
    if _first(config.image_size) == size:
        return
    table = next((m for m in model.modules() if hasattr(m, "interpolate_pos_encoding")), None)
    if table is not None:
        _replace_table(table, size=size, grid=size // _first(config.patch_size), dim=config.hidden_size)
    config.image_size = size


def _replace_table(table: Any, *, size: int, grid: int, dim: int) -> None:
    free = hasattr(table, "position_embeddings")  # a parameter [1, P, D] (ViT), or an embedding (CLIP)
    old = table.position_embeddings if free else table.position_embedding.weight
    extra = old.shape[-2] - round(old.shape[-2] ** 0.5 - 0.5) ** 2  # places that are no patch: the class token
    wanted = torch.empty(1, extra + grid * grid, dim)
    new = table.interpolate_pos_encoding(wanted, size, size).detach().clone().contiguous()
    if free:
        table.position_embeddings = nn.Parameter(new)
    else:
        table.position_embedding = nn.Embedding(new.shape[1], dim, _weight=new[0])
        table.register_buffer("position_ids", torch.arange(new.shape[1]).expand(1, -1), persistent=False)
    for module in (table, *table.children()):
        for name, value in (("image_size", size), ("num_patches", grid * grid), ("num_positions", new.shape[1])):
            if hasattr(module, name):
                setattr(module, name, (value, value) if isinstance(getattr(module, name), tuple | list) else value)


def context_of(model: nn.Module) -> int:
    """How many tokens the table of positions holds; RoBERTa's leaves its first places unused."""
    config: Any = model.config
    places = int(config.max_position_embeddings)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return places - module.padding_idx - 1
    return places


def check_size(size: int, *, patch: int, name: str) -> None:
    """A tower cuts its square into whole patches."""
    if size < patch or size % patch:
        below, above = max(patch, size // patch * patch), (size // patch + 1) * patch
        raise UsageError(
            f"{name} cuts photos into patches of {patch}, which do not fill a side of {size} — "
            f"set backbone.image_size to {below} or {above}"
        )


def pad_id(model: Any, tokenizer: Tokenizer) -> int:
    """What fills the end of a row: the tokenizer's padding, else the configuration's, else the first id."""
    own = tokenizer.tokenizer.pad_token_id if isinstance(tokenizer, HubTokenizer) else None
    chosen = model.config.pad_token_id if own is None else own
    return int(chosen) if chosen is not None and 0 <= chosen < model.config.vocab_size else 0


def clip_projection(width: int, projected: int) -> nn.Linear | None:
    """CLIP's map into its shared space with fresh weights, or none."""
    if not projected:
        return None
    layer = nn.Linear(width, projected, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


def _width(model: nn.Module, projection: nn.Module | None) -> int:
    config: Any = model.config
    width = getattr(config, "hidden_size", None)
    if width is None:
        raise UsageError(f"{type(model).__name__} gives no tokens of one width — give a transformer (ViT, BERT, …)")
    return int(getattr(projection, "out_features", width))


def _first(size: Any) -> int:
    """Of a side or a pair of equal ones."""
    return int(size[0] if isinstance(size, list | tuple) else size)
