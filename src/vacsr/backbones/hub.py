"""Checkpoints through transformers, from a folder or by id: configuration, weights, tokenizer, image processor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones.images import IMAGENET_MEAN, IMAGENET_STD, PhotoTransform, Resample
from vacsr.config import BackboneConfig
from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, UsageError

_PIL_FILTERS: dict[int, Resample] = {2: "bilinear", 3: "bicubic"}  # PIL's numbers, as the settings hold them


def local_folder(source: str) -> Path | None:
    """The folder that ``source`` names; None for an id. What is written as a path must exist."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if source.startswith(("/", "./", "../", "~", ".\\")) or folder.is_absolute():
        raise DataError(f"no such folder: {source} — give a folder with config.json and model.safetensors, or an id")
    return None


def load_config(source: str) -> Any:
    """The checkpoint's configuration without dropout, which training draws by seed outside of the towers, and without
    parts that give no tokens (SigLIP, DINOv2)."""
    with _transformers(source) as library:
        config = library.AutoConfig.from_pretrained(local_folder(source) or source, trust_remote_code=False)
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name, value in [] if part is None else list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
            elif name in ("vision_use_head", "use_mask_token"):
                setattr(part, name, False)
    return config


def read_config(saved: Mapping[str, Any]) -> Any:
    """The configuration that :func:`plain_config` wrote."""
    with _transformers() as library:
        return library.AutoConfig.for_model(**saved)


def plain_config(config: Any) -> dict[str, Any]:
    """A tower's configuration as JSON, without paths, versions and number formats."""
    saved: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    private = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
    return {name: value for name, value in saved.items() if name not in private}


class Loaded(NamedTuple):
    model: Any
    sdpa: bool = True  # attends by torch's scaled_dot_product_attention
    projection: nn.Module | None = None  # maps its tokens into a shared space

    def half(self, model: str, projection: str) -> Loaded:
        """One tower of a two-tower model, by its names there; a single tower as it is."""
        return Loaded(getattr(self.model, model, self.model), self.sdpa, getattr(self.model, projection, None))


def load_model(source: str, config: Any) -> Loaded:
    """The checkpoint with its weights in float32; from safetensors, since a pickle may run code."""
    with _transformers(source) as library, _quiet(library.utils.logging):
        name, kind = local_folder(source) or source, (config.architectures or [""])[0]
        # AutoModel would leave out the projection of a tower that was saved alone.
        loader = getattr(library, kind, library.AutoModel) if kind.endswith("WithProjection") else library.AutoModel
        return _built(partial(loader.from_pretrained, name, config=config, use_safetensors=True))


def fresh_model(config: Any, *, projection: int = 0) -> Loaded:
    """The same architecture with random weights in float32, and a map into ``projection`` dimensions unless 0."""
    with _transformers() as library:
        if config.model_type == "siglip_text_model":  # the one tower that AutoModel does not know
            loaded = Loaded(library.SiglipTextModel(config).float())
        else:
            loaded = _built(partial(library.AutoModel.from_config, config))
    layer = nn.Linear(config.hidden_size, projection, bias=False) if projection else None
    return loaded._replace(projection=layer)


def _built(build: Callable[..., Any]) -> Loaded:
    """With torch's attention and without a pooling layer, whose weights would get no gradient, if possible."""
    build = partial(build, dtype=torch.float32, trust_remote_code=False)
    kinds = [(attention, pooling) for attention in ("sdpa", "eager") for pooling in ({"add_pooling_layer": False}, {})]
    for attention, pooling in kinds[:-1]:
        with suppress(TypeError, ValueError):  # the class knows no such argument, or no such attention
            return Loaded(build(attn_implementation=attention, **pooling), attention == "sdpa")
    return Loaded(build(attn_implementation="eager"), sdpa=False)


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without a progress bar for a second's work, and without a report of weights that are left out on purpose."""
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def with_size(model: Any, size: int) -> Any:
    """An image model for photos of this side: its table of positions is interpolated once, by the model's own rule.

    Left to the model it would be done in every step, and its backward pass on a GPU is not repeatable.
    """
    if one_side(model.config.image_size) == size:
        return model
    config = deepcopy(model.config)
    config.image_size = size
    with torch.random.fork_rng(devices=[]):
        resized = fresh_model(config).model
    state = model.state_dict()
    for name, target in resized.state_dict().items():
        if state[name].shape != target.shape:
            table = next(module for module in model.modules() if hasattr(module, "interpolate_pos_encoding"))
            like = torch.empty(1, *target.shape[-2:])
            state[name] = table.interpolate_pos_encoding(like, size, size).reshape(target.shape)
    resized.load_state_dict(state)
    return resized


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


def load_tokenizer(source: str) -> Any:
    with _transformers(source) as library:
        return library.AutoTokenizer.from_pretrained(local_folder(source) or source, trust_remote_code=False)


def has_tokenizer(source: str) -> bool:
    """Whether a folder has tokenizer files; of an id this is expected."""
    folder = local_folder(source)
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")
    return folder is None or any((folder / name).is_file() for name in names)


def processor_settings(source: str) -> dict[str, Any]:
    """What the checkpoint's image processor is set to; empty where it has none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    settings: dict[str, Any] = {}
    folder = local_folder(source)
    for name in ("processor_config.json", "preprocessor_config.json"):  # new and old names
        with _transformers(source), suppress(EntryNotFoundError, FileNotFoundError):
            path = Path(hf_hub_download(source, name)) if folder is None else folder / name
            written = json.loads(path.read_text(encoding="utf-8"))
            settings |= written.get("image_processor") or written
    return settings


def transform_from(
    settings: Mapping[str, Any], config: BackboneConfig, *, usual: PhotoTransform, patch: int = 1
) -> PhotoTransform:
    """A processor's settings, ``usual`` where they say nothing, changed as ``config`` asks: a square of whole patches.

    It is cut from a shorter side only where the processor does so.
    """
    crop, size = settings.get("crop_size"), settings.get("size")
    cut = crop is not None and settings.get("do_center_crop", True)
    processed = one_side(crop if cut else size) or usual.size
    side = config.image_size or processed
    if side < patch or side % patch:
        below = max(patch, side // patch * patch)
        message = f"patches of {patch} pixels do not fill a side of {side}"
        raise UsageError(f"{message} — set backbone.image_size to {below} or {below + patch}")
    short = max(side, round(side * one_side(size) / processed)) if cut and config.resize == "center" else 0
    mean, std = settings.get("image_mean") or usual.mean, settings.get("image_std") or usual.std
    if config.pixel_stats == "imagenet":
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    resample = _PIL_FILTERS.get(settings.get("resample", 0), usual.resample)
    resample = resample if config.resample == "own" else config.resample
    return PhotoTransform(side, tuple(mean), tuple(std), resample, config.resize, short)


def one_side(size: Any) -> int:
    """A side, a pair of equal ones, or a processor's mapping, as one number; 0 for none."""
    if isinstance(size, Mapping):
        size = size.get("shortest_edge") or size.get("height")
    return int((size[0] if isinstance(size, list | tuple) else size) or 0)


@contextmanager
def _transformers(source: str = "") -> Iterator[Any]:
    """The library. The many ways in which it cannot load ``source`` become one error that says what to do."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "clip") from error
    from safetensors import SafetensorError

    retries = logging.getLogger("huggingface_hub.utils._http")  # without a network ten lines before our message
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        yield transformers
    except ImportError as error:
        raise EnvironmentProblem(f"{source} needs a package that is not installed: {error}") from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if not source:
            raise
        reason = str(error).strip().split("\n")[0]
        if local_folder(source) is not None:
            needs = "it needs config.json, model.safetensors and, for text, the tokenizer's files"
            raise DataError(f"the folder {source} cannot be used as a tower ({reason}) — {needs}") from error
        advice = f"with a network run: hf download {source} --local-dir FOLDER, then give the folder instead"
        raise EnvironmentProblem(f"model {source!r} not found ({reason}) — {advice}") from error
    finally:
        retries.setLevel(level)
