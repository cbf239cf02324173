"""Configurations, weights, tokenizers and image processors through transformers, from a folder or by id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vacsr.backbones.images import IMAGENET_MEAN, IMAGENET_STD, PhotoTransform, Resample
from vacsr.config import BackboneConfig
from vacsr.errors import DataError, EnvironmentProblem, MissingExtra

_PIL_FILTERS: dict[int, Resample] = {2: "bilinear", 3: "bicubic"}  # PIL's numbers, as the settings hold them
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def is_folder(source: str) -> bool:
    """A path of this machine, rather than an id; one that is written as a path must exist."""
    written = source.startswith(("/", "./", "../", "~", ".\\")) or Path(source).is_absolute()
    folder = Path(source).expanduser()
    if written and not folder.is_dir():
        raise DataError(f"no such folder: {source} — give a folder with config.json and model.safetensors, or an id")
    return folder.is_dir()


def short_name(source: str) -> str:
    """An id as it is, a folder by its own name: no path of this machine reaches a file."""
    return Path(source).expanduser().resolve().name if is_folder(source) else source


def load_config(source: str) -> Any:
    """The checkpoint's configuration, for tokens alone: see :func:`_trim`."""
    library = _transformers()
    with _reaching(source):
        config = library.AutoConfig.from_pretrained(_path(source))
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        if part is not None:
            _trim(part)
    return config


def read_config(saved: Mapping[str, Any]) -> Any:
    """The configuration that :func:`plain_config` wrote."""
    return _transformers().AutoConfig.for_model(**saved)


def plain_config(config: Any) -> dict[str, Any]:
    """A tower's configuration as JSON, without paths, versions and number formats."""
    saved: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    private = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
    return {name: value for name, value in saved.items() if name not in private}


def _trim(config: Any) -> None:
    """Every dropout at 0, for training draws by seed and outside; no parts that give no tokens (SigLIP, DINOv2)."""
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, 0.0)
    for name in ("vision_use_head", "use_mask_token"):
        if hasattr(config, name):
            setattr(config, name, False)


class Loaded(NamedTuple):
    """A model, and whether it attends by torch's scaled_dot_product_attention."""

    model: Any
    sdpa: bool


def load_model(source: str, config: Any) -> Loaded:
    """The checkpoint with its weights in float32; from safetensors, since a pickle may run code."""
    library = _transformers()
    common = {"config": config, "dtype": torch.float32, "use_safetensors": True}
    with _reaching(source), _quiet(library):
        return _built(lambda **options: library.AutoModel.from_pretrained(_path(source), **common, **options))


def fresh_model(config: Any) -> Loaded:
    """The same architecture with random weights in float32."""
    library = _transformers()
    if config.model_type == "siglip_text_model":  # the one tower that AutoModel does not know
        return Loaded(library.SiglipTextModel(config).float(), sdpa=True)
    return _built(lambda **options: library.AutoModel.from_config(config, dtype=torch.float32, **options))


def _built(build: Callable[..., Any]) -> Loaded:
    """With torch's attention and without a pooling layer, whose weights would get no gradient, if possible."""
    kinds = [(attention, pooling) for attention in ("sdpa", "eager") for pooling in ({"add_pooling_layer": False}, {})]
    for attention, pooling in kinds[:-1]:
        try:
            return Loaded(build(attn_implementation=attention, **pooling), attention == "sdpa")
        except (TypeError, ValueError):  # the class knows no such argument, or no such attention
            continue
    return Loaded(build(attn_implementation="eager"), sdpa=False)


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Without a progress bar for a second's work, and without a report of weights that are left out on purpose."""
    logging = library.utils.logging
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


def load_tokenizer(source: str) -> Any:
    """The checkpoint's tokenizer."""
    library = _transformers()
    with _reaching(source):
        return library.AutoTokenizer.from_pretrained(_path(source))


def has_tokenizer(source: str) -> bool:
    """A folder with tokenizer files; of an id this is expected."""
    return not is_folder(source) or any((Path(source).expanduser() / name).is_file() for name in _TOKENIZER_FILES)


def processor_transform(source: str, config: BackboneConfig, *, usual: PhotoTransform) -> PhotoTransform:
    """What the image processor of a folder or id does, ``usual`` where it says nothing, changed as ``config`` asks."""
    settings: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json") if source else ():  # new and old names
        with _reaching(source):
            path = _file(source, name)
            written = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
            settings |= written.get("image_processor") or written
    return transform_from(settings, config, usual=usual)


def transform_from(settings: Mapping[str, Any], config: BackboneConfig, *, usual: PhotoTransform) -> PhotoTransform:
    """The same from settings at hand. A square is cut from a shorter side only where the processor does so."""
    crop, size = settings.get("crop_size"), settings.get("size")
    cut = crop is not None and settings.get("do_center_crop", True)
    processed = one_side(crop if cut else size) or usual.size
    mean, std = settings.get("image_mean") or usual.mean, settings.get("image_std") or usual.std
    if config.pixel_stats == "imagenet":
        mean, std = IMAGENET_MEAN, IMAGENET_STD
    side = config.image_size or processed
    short = max(side, round(side * one_side(size) / processed)) if cut else 0
    resample = _PIL_FILTERS.get(settings.get("resample", 0), usual.resample)
    return replace(
        usual,
        size=side,
        mean=tuple(mean),
        std=tuple(std),
        resample=resample if config.resample == "own" else config.resample,
        resize=config.resize,
        short=short if config.resize == "center" else 0,
    )


def one_side(size: Any) -> int:
    """A side, a pair of equal ones, or a processor's mapping, as one number; 0 for none."""
    if isinstance(size, Mapping):
        size = size.get("shortest_edge") or size.get("height")
    return int((size[0] if isinstance(size, list | tuple) else size) or 0)


def _file(source: str, name: str) -> Path | None:
    """One of a checkpoint's files, None where it has none of that name."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if is_folder(source):
        path = Path(source).expanduser() / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source, name))
    except EntryNotFoundError:
        return None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "clip") from error
    return transformers


def _path(source: str) -> str:
    return str(Path(source).expanduser()) if is_folder(source) else source


@contextmanager
def _reaching(source: str) -> Iterator[None]:
    """Turn the many ways in which a checkpoint cannot be loaded into one that says what to do."""
    from safetensors import SafetensorError

    folder = is_folder(source)
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        if folder:
            raise DataError(
                f"the folder {source} cannot be used as a tower ({reason}) — "
                "it needs config.json, model.safetensors and, for text, the tokenizer's files"
            ) from error
        raise EnvironmentProblem(
            f"model {source!r} not found ({reason}) — where there is a network run: "
            f"hf download {source} --local-dir FOLDER, then give the folder instead"
        ) from error
    except ImportError as error:
        raise EnvironmentProblem(f"{source} needs a package that is not installed: {error}") from error
