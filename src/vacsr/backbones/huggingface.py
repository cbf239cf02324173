"""``clip:`` and ``towers:``: transformers checkpoints as towers, through the library's public interface.

``clip:ID_OR_FOLDER`` takes both towers of one CLIP or SigLIP checkpoint, ``towers:IMAGE,TEXT`` one tower each of any
two checkpoints, and of a two-tower checkpoint the side that is asked for.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vacsr.backbones import hub
from vacsr.backbones.base import Scheme, Source
from vacsr.backbones.images import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD, PhotoTransform
from vacsr.backbones.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer, choose_context
from vacsr.backbones.towers import Tower, TowerBackbone, read_assets
from vacsr.config import BackboneConfig
from vacsr.errors import UsageError

Output = Literal["hidden", "norm", "projected"]

_SHORT = {"vit-b32": ("openai/clip-vit-base-patch32", 32), "vit-b16": ("openai/clip-vit-base-patch16", 16)}
"""Short names in ``clip:``, with the side of a patch; these towers have the sizes that transformers has as defaults."""
_STATISTICS = {"clip": (CLIP_MEAN, CLIP_STD), "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}


class _HubTower(Tower):
    """One model of transformers: its tokens before or after its final norm, or projected.

    Models whose blocks end in a norm (BERT) have no final one: there `hidden` and `norm` are the same.
    """

    def __init__(self, loaded: hub.Loaded, *, output: Output) -> None:
        super().__init__()
        self.model, self.output, self.width = loaded.model, output, int(loaded.model.config.hidden_size)
        self.projection = loaded.projection if output == "projected" else None
        self.has_tokens = output != "projected" or self.model.config.model_type != "siglip_vision_model"
        self.dim = self.width if output != "projected" else int(getattr(self._head(), "out_features", self.width))

    def _head(self) -> Any:
        """CLIP's projection of a token, or the head inside SigLIP's models, which pools the tokens of a photo."""
        if self.projection is None and not self.model.config.model_type.startswith("siglip"):
            message = f"a {self.model.config.model_type} has no projection into a shared space"
            raise UsageError(f"{message} — train heads on top, with image_output and text_output at norm or hidden")
        return self.projection or self.model.head

    def final_norm(self) -> nn.Module | None:
        """The norm after the last block, if there is one: the last child of the model itself that is a norm."""
        norms = [child for child in self.model.children() if "Norm" in type(child).__name__]
        return norms[-1] if norms else None

    def blocks(self) -> list[nn.Module]:
        """The list of as many layers as the configuration says the model has."""
        count = self.model.config.num_hidden_layers
        lists = (list(module) for module in self.model.modules() if isinstance(module, nn.ModuleList))
        return next((layers for layers in lists if len(layers) == count), [])

    @property
    def norm(self) -> nn.Module | None:
        """The final norm, if the output passes it."""
        return None if self.output == "hidden" else self.final_norm()

    def finish(self, tokens: Tensor) -> Tensor:
        tokens = tokens if self.norm is None else self.norm(tokens)
        tokens = self._head()(tokens) if self.output == "projected" else tokens
        return tokens if self.has_tokens else tokens.unsqueeze(1)

    @abstractmethod
    def last_hidden(self, *inputs: Tensor) -> Any:
        """The tokens that the model itself gives."""

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.output == "norm" and self._norms_tokens():  # without a hook, so that torch.compile can trace it
            return self.last_hidden(*inputs)  # type: ignore[no-any-return]
        return super().forward(*inputs)

    def tokens(self, *inputs: Tensor) -> Tensor:
        norm = self.final_norm()
        if norm is None or not self._norms_tokens():
            return self.last_hidden(*inputs)  # type: ignore[no-any-return]
        before_norm: list[Tensor] = []
        with norm.register_forward_pre_hook(lambda _norm, args: before_norm.append(args[0])):
            self.last_hidden(*inputs)
        return before_norm[-1]

    def _norms_tokens(self) -> bool:
        """The model itself applies its final norm to every token; CLIP's image model does so to one only."""
        return self.final_norm() is not None and self.model.config.model_type != "clip_vision_model"

    def unused(self) -> list[nn.Parameter]:
        """A final norm that the output skips, and a head inside the model (SigLIP) that it does not reach."""
        norm = self.final_norm() if self.output == "hidden" else None
        head = getattr(self.model, "head", None) if self.output != "projected" else None
        return [parameter for module in (norm, head) if module is not None for parameter in module.parameters()]

    def set_checkpointing(self, on: bool) -> None:
        if on and not self.model.supports_gradient_checkpointing:
            raise UsageError(f"{type(self.model).__name__} cannot recompute — set backbone.checkpointing=false")
        name = "activation" if hasattr(self.model, "is_activation_checkpointing") else "gradient"  # transformers < 5.23
        if on:
            getattr(self.model, f"{name}_checkpointing_enable")(self.recompute)
        elif getattr(self.model, f"is_{name}_checkpointing"):
            getattr(self.model, f"{name}_checkpointing_disable")()

    def architecture(self) -> dict[str, Any]:
        projected = self.dim if self.projection is not None else 0
        return {"projection": projected, "config": hub.plain_config(self.model.config)}


class HubImageTower(_HubTower):
    """The tokens of an image model, class token first where it has one."""

    def __init__(self, loaded: hub.Loaded, *, output: Output) -> None:
        super().__init__(loaded, output=output)
        names = [name for name, _ in self.model.named_parameters()]
        self.class_token = not self.has_tokens or any(name.endswith(("cls_token", "class_embedding")) for name in names)
        hub.use_products(self.model)

    def last_hidden(self, *inputs: Tensor) -> Any:
        return self.model(pixel_values=inputs[0]).last_hidden_state

    def joints(self) -> tuple[None, nn.Module]:
        return None, self.model.embeddings  # pixels and positions


class HubTextTower(_HubTower):
    """The tokens of a text model.

    It gets its attention mask in four dimensions, which transformers uses as it is. Given a plain one it would look
    whether that masks anything, and wait for the device. Given none it would write out CLIP's causal mask while a CUDA
    graph is captured, and only then, so that compiled blocks would be compiled again in the middle of the capture.
    """

    causal: Tensor

    def __init__(self, loaded: hub.Loaded, tokenizer: Tokenizer, *, output: Output) -> None:
        super().__init__(loaded, output=output)
        config, self.sdpa = self.model.config, loaded.sdpa
        self.context, self.vocabulary = context_of(self.model), int(config.vocab_size)
        self.summary = "first" if tokenizer.starts_with_class else "last"
        pad = config.pad_token_id if tokenizer.pad is None else tokenizer.pad
        self.pad = int(pad) if pad is not None and 0 <= pad < self.vocabulary else 0
        self.fills, self.clip = config.model_type == "siglip_text_model", config.model_type == "clip_text_model"
        self.is_causal = any(getattr(module, "is_causal", False) for module in self.model.modules())
        causal = torch.ones(self.context, self.context, dtype=torch.bool).tril() if self.clip else None
        self.register_buffer("causal", causal, persistent=False)

    def last_hidden(self, *inputs: Tensor) -> Any:
        ids, mask = inputs
        return self.model(input_ids=ids, attention_mask=self._attention(mask)).last_hidden_state

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

    def joints(self) -> tuple[nn.Embedding | None, nn.Module | None]:
        """CLIP and SigLIP embed words and positions in one module."""
        embeddings = getattr(self.model, "embeddings", None)
        words = getattr(embeddings, "token_embedding", None)
        return super().joints() if words is None else (words, embeddings)


def context_of(model: Any) -> int:
    """How many tokens the table of positions holds; RoBERTa's leaves its first ones unused."""
    positions = int(model.config.max_position_embeddings)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return positions - module.padding_idx - 1
    return positions


def _load(config: BackboneConfig, source: Source) -> TowerBackbone:
    """The towers that the spec names. A two-tower checkpoint in ``towers:`` gives the side that is asked for.

    SigLIP has no class token: its photos are pooled by ``gpo``, ``mean`` or, projected, by its own head. Its captions
    are filled up to its context with padding that it attends to, as in its training.
    """
    if source.assets is not None:
        saved = read_assets(source.assets)
        towers = [saved[side] for side in ("image", "text")]
        sides = [hub.fresh_model(hub.read_config(one["config"]), projection=one["projection"]) for one in towers]
        return _backbone(config, sides, saved["tokenizer"], saved["transform"], saved["name"])
    checkpoints, patch = _checkpoints(config)
    fresh = config.weights == "random"
    offline = patch > 0 and fresh
    standard = {"model_type": "clip", "vision_config": {"patch_size": patch}}
    configs = [hub.read_config(standard)] if offline else [hub.load_config(one) for one in checkpoints]
    vision = _check_sides(config, checkpoints, configs)
    settings = {} if offline else hub.processor_settings(checkpoints[0])
    kind = configs[0].model_type.removesuffix("_vision_model")  # an image tower of CLIP alone sees pixels as CLIP does
    statistics = _STATISTICS.get(kind, (IMAGENET_MEAN, IMAGENET_STD))
    # DINOv2's table of positions is for 518, but its image processor cuts 224.
    side = 224 if vision.model_type.startswith("dinov2") else hub.one_side(vision.image_size)
    usual, patch_side = PhotoTransform(side, *statistics), hub.one_side(vision.patch_size)
    transform = hub.transform_from(settings, config, usual=usual, patch=patch_side)
    if fresh:
        vision.image_size = transform.size
    if vision.model_type == "siglip_vision_model":
        vision.vision_use_head = config.image_output == "projected"
    pairs = zip(checkpoints, configs, strict=True)
    models = [hub.fresh_model(one) if fresh else hub.load_model(name, one) for name, one in pairs]
    image, text = models[0].half("vision_model", "visual_projection"), models[-1].half("text_model", "text_projection")
    image = image._replace(model=hub.with_size(image.model, transform.size))
    tokenizer = _tokenizer("" if offline else checkpoints[-1], config, text=text.model)
    # A folder goes by its own name: no path of this machine reaches a file.
    names = [folder.resolve().name if (folder := hub.local_folder(one)) else one for one in checkpoints]
    name = f"{config.spec.partition(':')[0]}:{','.join(names)}"
    backbone = _backbone(config, (image, text), tokenizer, transform, name)
    backbone.pretrained_loss = {} if fresh else _pretrained_loss(models[-1].model)
    return backbone


def _pretrained_loss(model: Any) -> dict[str, Any]:
    """The loss that a two-tower checkpoint was trained with, as a method's fields: SigLIP's sigmoid, CLIP's InfoNCE."""
    if not hasattr(model, "logit_scale"):
        return {}
    scale = float(model.logit_scale.detach().exp())
    if hasattr(model, "logit_bias"):
        return {"name": "sigmoid", "scale": scale, "bias": float(model.logit_bias.detach()), "learnable": False}
    return {"name": "infonce", "scale": scale, "learnable": False}


def _backbone(
    config: BackboneConfig, sides: Sequence[hub.Loaded], tokenizer: Tokenizer, transform: PhotoTransform, name: str
) -> TowerBackbone:
    image = HubImageTower(sides[0], output=config.image_output)
    text = HubTextTower(sides[1], tokenizer, output=config.text_output)
    return TowerBackbone(image, text, tokenizer=tokenizer, transform=transform, config=config, name=name)


def _checkpoints(config: BackboneConfig) -> tuple[list[str], int]:
    """The folders or ids that the spec names, one of ``clip:`` and two of ``towers:``; the patches of a short name."""
    scheme, _, rest = config.spec.partition(":")
    if scheme == "clip":
        if not rest.strip():
            raise UsageError("clip: names no checkpoint — write clip:vit-b32, clip:ID or clip:FOLDER")
        checkpoint, patch = _SHORT.get(rest.strip(), (rest.strip(), 0))
        return [checkpoint], patch
    names = [part.strip() for part in rest.split(",")]
    if len(names) != 2 or not all(names):
        raise UsageError(f"{config.spec!r} does not name two towers — write towers:IMAGE,TEXT (folders or ids)")
    return names, 0


def _check_sides(config: BackboneConfig, checkpoints: Sequence[str], configs: Sequence[Any]) -> Any:
    """The configuration of the image tower, after a check that both can be towers."""
    kind = configs[0].model_type
    if config.spec.startswith("clip:") and kind not in _STATISTICS:
        raise UsageError(f"clip: takes CLIP and SigLIP, {checkpoints[0]} is {kind!r} — write towers:IMAGE,TEXT")
    vision = getattr(configs[0], "vision_config", configs[0])
    text = getattr(configs[-1], "text_config", configs[-1])
    if not hasattr(vision, "image_size") or not hasattr(vision, "patch_size"):
        raise UsageError(f"{checkpoints[0]} ({kind}) is not an image transformer — give one such as ViT first")
    for name, whole, side in ((checkpoints[0], configs[0], vision), (checkpoints[-1], configs[-1], text)):
        if getattr(whole, "is_encoder_decoder", False) or not hasattr(side, "hidden_size"):
            raise UsageError(f"{name} ({whole.model_type}) is not one encoder — give an encoder alone, as ViT or BERT")
    return vision


def _tokenizer(source: str, config: BackboneConfig, *, text: Any) -> Tokenizer:
    """The checkpoint's own; bytes where there is none, for random weights only."""
    longest = context_of(text)
    if not source or (config.weights == "random" and not hub.has_tokenizer(source)):
        return ByteTokenizer(text.config.vocab_size, context=choose_context(config.context, longest=longest))
    tokenizer = hub.load_tokenizer(source)
    longest = min(longest, int(tokenizer.model_max_length))
    return HubTokenizer(tokenizer, context=choose_context(config.context, longest=longest))


CLIP = Scheme("clip:ID_OR_FOLDER", _load, pretrained=True, matched=True)
TOWERS = Scheme("towers:IMAGE,TEXT", _load, pretrained=True)
