"""``clip:`` and ``towers:``: transformers checkpoints as towers, through the library's public interface.

``clip:ID_OR_FOLDER`` takes both towers of one CLIP or SigLIP checkpoint, ``towers:IMAGE,TEXT`` one tower each of any
two checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import hub
from vacsr.backbones.base import Scheme, Source
from vacsr.backbones.images import CLIP_MEAN, CLIP_STD, PhotoTransform
from vacsr.backbones.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer, choose_context
from vacsr.backbones.towers import ImageTower, Joints, TextTower, Tower, TowerBackbone, saved_assets
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError

Output = Literal["hidden", "norm", "projected"]

_BUILT_IN = {"vit-b32": ("openai/clip-vit-base-patch32", 32), "vit-b16": ("openai/clip-vit-base-patch16", 16)}
_STATISTICS = {"clip": (CLIP_MEAN, CLIP_STD), "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}


class _HubTower(Tower):
    """One model of transformers: its tokens before or after its final norm, or projected.

    Models whose blocks end in a norm (BERT) have no final one: there `hidden` and `norm` are the same.
    """

    def __init__(self, model: Any, *, output: Output, projection: nn.Module | None) -> None:
        super().__init__()
        self.model, self.output, self.width = model, output, int(model.config.hidden_size)
        self.projection = projection if output == "projected" else None
        self.dim = self.width
        if output == "projected":
            layer: Any = self.projection or self._head()
            if layer is None:
                message = f"{type(model).__name__} has no projection per token"
                raise UsageError(f"{message} — set image_output or text_output to norm or hidden")
            self.dim = int(layer.out_features)

    def _head(self) -> Any:
        """The projection inside SigLIP's text model."""
        return getattr(self.model, "head", None) if self.model.config.model_type == "siglip_text_model" else None

    def final_norm(self) -> nn.Module | None:
        """The norm after the last block, if there is one: the last child of the model itself that is a norm."""
        norms = [child for child in self.model.children() if "Norm" in type(child).__name__]
        return norms[-1] if norms else None

    @property
    def norm(self) -> nn.Module | None:
        """The final norm, if the output passes it."""
        return None if self.output == "hidden" else self.final_norm()

    def blocks(self) -> list[nn.Module]:
        """The list of as many layers as the configuration says the model has."""
        count = self.model.config.num_hidden_layers
        lists = (list(module) for module in self.model.modules() if isinstance(module, nn.ModuleList))
        return next((layers for layers in lists if len(layers) == count), [])

    def finish(self, tokens: Tensor) -> Tensor:
        return self._projected(tokens if self.norm is None else self.norm(tokens))

    def _projected(self, tokens: Tensor) -> Tensor:
        return (self.projection or self._head())(tokens) if self.output == "projected" else tokens

    def _encode(self, **inputs: Any) -> Tensor:
        """The model's tokens as the output asks. -> [B, L, D]"""
        norm = self.final_norm()
        if norm is None or self.model.config.model_type == "clip_vision_model":  # applies its norm to one token only
            return self.finish(self.model(**inputs).last_hidden_state)
        if self.output != "hidden":
            return self._projected(self.model(**inputs).last_hidden_state)
        normed: list[Tensor] = []
        with norm.register_forward_pre_hook(lambda _norm, args: normed.append(args[0])):
            self.model(**inputs)
        return normed[-1]

    def unused(self) -> list[nn.Parameter]:
        """A final norm that the output skips, and a head inside the model (SigLIP) that it does not reach."""
        norm = self.final_norm() if self.output == "hidden" else None
        head = getattr(self.model, "head", None) if self.output != "projected" else None
        return [parameter for module in (norm, head) if module is not None for parameter in module.parameters()]

    def set_checkpointing(self, on: bool) -> None:
        if on and not self.model.supports_gradient_checkpointing:
            message = f"{type(self.model).__name__} cannot recompute its activations"
            raise UsageError(f"{message} — set backbone.checkpointing=false")
        if on:
            self.model.gradient_checkpointing_enable(self.recompute)
        elif self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_disable()

    def joints(self) -> Joints:
        """CLIP and SigLIP embed words or pixels and positions in one module."""
        embeddings = getattr(self.model, "embeddings", None)
        words = getattr(embeddings, "token_embedding", None)
        if embeddings is None or (words is None and isinstance(self, TextTower)):
            return super().joints()
        return Joints(words, embeddings)

    def architecture(self) -> dict[str, Any]:
        projected = self.dim if self.projection is not None else 0
        return {"projection": projected, "config": hub.plain_config(self.model.config)}


class HubImageTower(_HubTower, ImageTower):
    """The tokens of an image model, class token first where it has one."""

    def __init__(self, model: Any, *, output: Output, projection: nn.Module | None = None) -> None:
        super().__init__(model, output=output, projection=projection)
        self.class_token = any(name.endswith(("cls_token", "class_embedding")) for name, _ in model.named_parameters())
        use_products(model)

    def forward(self, pixels: Tensor) -> Tensor:
        return self._encode(pixel_values=pixels)


class HubTextTower(_HubTower, TextTower):
    """The tokens of a text model.

    It gets its attention mask in four dimensions, which transformers uses as it is. Given a plain one it would look
    whether that masks anything, and wait for the device. Given none it would write out CLIP's causal mask while a CUDA
    graph is captured, and only then, so that compiled blocks would be compiled again in the middle of the capture.
    """

    causal: Tensor

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        output: Output,
        projection: nn.Module | None = None,
        sdpa: bool = True,
    ) -> None:
        super().__init__(model, output=output, projection=projection)
        starts_with_class = isinstance(tokenizer, HubTokenizer) and tokenizer.starts_with_class
        self.summary = "first" if starts_with_class else "last"
        self.pad, self.context, self.sdpa = _pad_id(model, tokenizer), context_of(model), sdpa
        self.fills = model.config.model_type == "siglip_text_model"
        self.clip = model.config.model_type == "clip_text_model"
        self.is_causal = any(getattr(module, "is_causal", False) for module in model.modules())
        causal = torch.ones(self.context, self.context, dtype=torch.bool).tril() if self.clip else None
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self._encode(input_ids=ids, attention_mask=self._attention(mask))

    def _attention(self, mask: Tensor) -> Tensor | None:
        """What the model takes; other causal towers need none, for padding comes last. [B, L] -> [1 or B, 1, L, L]"""
        length = mask.shape[1]
        if self.clip:
            return self.causal[None, None, :length, :length]
        if self.is_causal or self.fills:
            return None
        if not self.sdpa:
            return mask.long()
        first = torch.arange(length, device=mask.device) == 0  # a row of nothing must not divide by zero
        return (mask | first)[:, None, None, :].expand(-1, 1, length, -1)

    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)


class PatchProduct(nn.Conv2d):
    """A convolution that cuts a photo into patches, as one matrix product with the same parameters.

    In bfloat16 with 32×32 patches it and its gradient take 0.2 instead of 2.8 ms for 128 photos on an NVIDIA H200.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, D, H / k, W / k]"""
        batch, channels, height, width = x.shape
        (k, _), rows, columns = self.kernel_size, height // self.kernel_size[0], width // self.kernel_size[1]
        patches = x.view(batch, channels, rows, k, columns, k).permute(0, 2, 4, 1, 3, 5)
        out = functional.linear(patches.reshape(batch, rows * columns, -1), self.weight.flatten(1), self.bias)
        return out.transpose(1, 2).reshape(batch, -1, rows, columns)


def use_products(model: nn.Module) -> None:
    """Put products where convolutions cut photos into patches: no overlap, no padding, no groups."""
    for name, conv in list(model.named_modules()):
        if type(conv) is not nn.Conv2d or (conv.groups, conv.dilation) != (1, (1, 1)):
            continue
        side = conv.kernel_size[0]
        if side > 1 and {*conv.kernel_size, *conv.stride} == {side} and conv.padding in ((0, 0), "valid"):
            with torch.device("meta"):  # which draws nothing
                product = PatchProduct(conv.in_channels, conv.out_channels, side, stride=side)
            product.weight, product.bias = conv.weight, conv.bias
            model.set_submodule(name, product)


def context_of(model: Any) -> int:
    """How many tokens the table of positions holds; RoBERTa's leaves its first ones unused."""
    positions = int(model.config.max_position_embeddings)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return positions - module.padding_idx - 1
    return positions


def _pad_id(model: Any, tokenizer: Tokenizer) -> int:
    """What fills the end of a row: the tokenizer's padding, else the configuration's, else the first id."""
    pad = tokenizer.tokenizer.pad_token_id if isinstance(tokenizer, HubTokenizer) else None
    pad = model.config.pad_token_id if pad is None else pad
    return int(pad) if pad is not None and 0 <= pad < model.config.vocab_size else 0


def _check_size(size: int, vision: Any, name: str) -> None:
    """A tower cuts its square into whole patches."""
    patch = hub.one_side(vision.patch_size)
    if size < patch or size % patch:
        below, above = max(patch, size // patch * patch), (size // patch + 1) * patch
        raise UsageError(
            f"{name} cuts photos into patches of {patch}, which do not fill a side of {size} — "
            f"set backbone.image_size to {below} or {above}"
        )


def _projection(width: int, projected: int) -> nn.Linear | None:
    """CLIP's map into its shared space with fresh weights, or none."""
    if not projected:
        return None
    layer = nn.Linear(width, projected, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


def _tokenizer(source: str, config: BackboneConfig, *, text: Any) -> Tokenizer:
    """The checkpoint's own; bytes where there is none, for random weights only."""
    longest = context_of(text)
    if not source or (config.weights == "random" and not hub.has_tokenizer(source)):
        return ByteTokenizer(text.config.vocab_size, context=choose_context(config.context, longest=longest))
    tokenizer = hub.load_tokenizer(source)
    longest = min(longest, int(tokenizer.model_max_length))
    return HubTokenizer(tokenizer, context=choose_context(config.context, longest=longest))


class _Models(NamedTuple):
    """Two models, what projects their tokens, and whether the text model attends by torch's own function."""

    image: Any
    text: Any
    projections: Sequence[nn.Module | None] = (None, None)
    sdpa: bool = True


def _backbone(
    config: BackboneConfig, models: _Models, *, tokenizer: Tokenizer, transform: PhotoTransform, name: str
) -> TowerBackbone:
    image = HubImageTower(models.image, output=config.image_output, projection=models.projections[0])
    text = HubTextTower(
        models.text, tokenizer, output=config.text_output, projection=models.projections[1], sdpa=models.sdpa
    )
    return TowerBackbone(image, text, tokenizer=tokenizer, transform=transform, config=config, name=name)


def _rebuild(config: BackboneConfig, folder: Path) -> TowerBackbone:
    """From saved assets, with fresh weights; needs no network and no checkpoint."""
    with saved_assets(folder) as saved:
        sides = saved.image, saved.text
        image, text = (hub.fresh_model(hub.read_config(side["config"])) for side in sides)
        widths = image.model.config.hidden_size, text.model.config.hidden_size
        projections = [_projection(width, side["projection"]) for width, side in zip(widths, sides, strict=True)]
        models = _Models(image.model, text.model, projections, text.sdpa)
        return _backbone(config, models, tokenizer=saved.tokenizer, transform=saved.transform, name=saved.name)


def _load_clip(config: BackboneConfig, source: Source) -> TowerBackbone:
    """``clip:vit-b32`` and ``clip:vit-b16`` are OpenAI's, by a short name; with random weights they need no download.

    SigLIP has no class token, so it is pooled by ``gpo`` or ``mean``; its captions are filled up to its context with
    padding that it attends to, as in its training.
    """
    if source.assets is not None:
        return _rebuild(config, source.assets)
    name = _one_source(config)
    checkpoint, patch = _BUILT_IN.get(name, (name, 0))
    fresh = config.weights == "random"
    offline = fresh and patch > 0
    # The library's defaults are OpenAI's ViT-B.
    standard = {"model_type": "clip", "vision_config": {"patch_size": patch}}
    described = hub.read_config(standard) if offline else hub.load_config(checkpoint)
    if described.model_type not in _STATISTICS:
        message = f"{checkpoint} is of type {described.model_type!r}, clip: takes CLIP and SigLIP"
        raise UsageError(f"{message} — for two towers of any kind write towers:IMAGE,TEXT")
    vision, text = described.vision_config, described.text_config
    usual = PhotoTransform(vision.image_size, *_STATISTICS[described.model_type])
    transform = hub.transform_from({} if offline else hub.processor_settings(checkpoint), config, usual=usual)
    _check_size(transform.size, vision, checkpoint)
    if fresh:
        vision.image_size = transform.size
        projected = described.projection_dim if described.model_type == "clip" else 0
        towers = hub.fresh_model(vision).model, hub.fresh_model(text).model
        models = _Models(*towers, [_projection(side.hidden_size, projected) for side in (vision, text)])
    else:
        model = hub.load_model(checkpoint, described).model
        projections = getattr(model, "visual_projection", None), getattr(model, "text_projection", None)
        models = _Models(hub.with_size(model.vision_model, transform.size), model.text_model, projections)
    tokenizer = _tokenizer("" if offline else checkpoint, config, text=models.text)
    name = f"clip:{hub.short_name(checkpoint)}"
    return _backbone(config, models, tokenizer=tokenizer, transform=transform, name=name)


def _load_towers(config: BackboneConfig, source: Source) -> TowerBackbone:
    """Folders or ids of a vision and of a text transformer; a two-tower checkpoint gives the side that is asked for.

    ``hidden`` and ``norm`` are tokens before and after the final norm where the architecture has one (ViT, DINOv2).
    Tokens are projected only by a text tower that has a head of its own (SigLIP).
    """
    if source.assets is not None:
        return _rebuild(config, source.assets)
    first, second = _two_sources(config)
    described = hub.load_config(first)
    vision = getattr(described, "vision_config", described)
    if not hasattr(vision, "image_size") or not hasattr(vision, "patch_size"):
        raise UsageError(
            f"{first} ({described.model_type}) is not an image transformer with patches — give one such as DINOv2 or "
            "ViT first, the text tower second"
        )
    # DINOv2's table of positions is for 518, but its image processor cuts 224.
    side = 224 if vision.model_type.startswith("dinov2") else hub.one_side(vision.image_size)
    transform = hub.transform_from(hub.processor_settings(first), config, usual=PhotoTransform(side))
    _check_size(transform.size, vision, first)
    if config.weights == "random":
        vision.image_size = transform.size
    image = _side(first, described, config, "vision_model").model
    text = _side(second, hub.load_config(second), config, "text_model")
    return _backbone(
        config,
        _Models(hub.with_size(image, transform.size), text.model, sdpa=text.sdpa),
        tokenizer=_tokenizer(second, config, text=text.model),
        transform=transform,
        name=f"towers:{hub.short_name(first)},{hub.short_name(second)}",
    )


def _side(source: str, described: Any, config: BackboneConfig, side: str) -> hub.Loaded:
    """The image or text half of a two-tower checkpoint, or the model itself where it is one tower."""
    tower = getattr(described, side.replace("model", "config"), described)
    if getattr(described, "is_encoder_decoder", False) or not hasattr(tower, "hidden_size"):
        message = f"{source} ({described.model_type}) is not an encoder with tokens of one width"
        raise UsageError(f"{message} — give an encoder alone, a transformer such as ViT or BERT")
    loaded = hub.fresh_model(described) if config.weights == "random" else hub.load_model(source, described)
    return loaded._replace(model=getattr(loaded.model, side, loaded.model))


def _one_source(config: BackboneConfig) -> str:
    name = config.spec.partition(":")[2].strip()
    if not name:
        raise UsageError("clip: names no checkpoint — write clip:vit-b32, clip:ID or clip:FOLDER")
    return name


def _two_sources(config: BackboneConfig) -> tuple[str, str]:
    sources = [part.strip() for part in config.spec.partition(":")[2].split(",")]
    if len(sources) != 2 or not all(sources):
        raise UsageError(f"{config.spec!r} does not name two towers — write towers:IMAGE,TEXT (folders or ids)")
    return sources[0], sources[1]


def _check_towers(config: BackboneConfig) -> None:
    _two_sources(config)
    if config.image_output == "projected":  # a text tower may have a head of its own (SigLIP)
        raise UsageError("towers: has no projection per token of images — set image_output to norm or hidden")


CLIP = Scheme("clip:ID_OR_FOLDER", _load_clip, _one_source, pretrained=True, matched=True)
TOWERS = Scheme("towers:IMAGE,TEXT", _load_towers, _check_towers, pretrained=True)
