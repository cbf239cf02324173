"""Getting configurations, weights and tokenizers through transformers, from a folder or by id, with clear refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vacsr.errors import DataError, EnvironmentProblem, MissingExtra

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
    """The checkpoint's configuration, with every dropout at 0: training's draws are made elsewhere, by seed."""
    library = _transformers()
    with _reaching(source):
        return without_dropout(library.AutoConfig.from_pretrained(_place(source)))


def read_config(saved: Mapping[str, Any]) -> Any:
    """The configuration that :func:`plain_config` wrote."""
    rest = {name: value for name, value in saved.items() if name != "model_type"}
    return _transformers().AutoConfig.for_model(saved["model_type"], **rest)


def plain_config(config: Any) -> dict[str, Any]:
    """A tower's configuration as JSON, without paths, versions and number formats."""
    saved: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    private = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
    return {name: value for name, value in saved.items() if name not in private}


def without_dropout(config: Any) -> Any:
    """The same object: dropout, stochastic depth and layer drop at 0, in its sub-configurations too."""
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name, value in list(vars(part).items()) if part is not None else ():
            if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool):
                setattr(part, name, 0.0)
    return config


def load_model(source: str, config: Any) -> Any:
    """The checkpoint with its weights in float32; from safetensors, since a pickle may run code."""
    library = _transformers()
    with _reaching(source), _without_bars(library):
        return library.AutoModel.from_pretrained(
            _place(source), config=config, dtype=torch.float32, use_safetensors=True
        )


@contextmanager
def _without_bars(library: Any) -> Iterator[None]:
    """Weights are read in a second; a bar for it only clutters the terminal."""
    shown = library.utils.logging.is_progress_bar_enabled()
    library.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.utils.logging.enable_progress_bar()


def fresh_model(config: Any) -> Any:
    """The same architecture with random weights in float32."""
    library = _transformers()
    if config.model_type == "siglip_text_model":  # the one tower that AutoModel does not know
        return library.SiglipTextModel(config).float()
    return library.AutoModel.from_config(config, dtype=torch.float32)


def load_tokenizer(source: str) -> Any:
    """The checkpoint's tokenizer."""
    library = _transformers()
    with _reaching(source):
        return library.AutoTokenizer.from_pretrained(_place(source))


def has_tokenizer(source: str) -> bool:
    """A folder with tokenizer files; of an id this is expected."""
    return not is_folder(source) or any((Path(source).expanduser() / name).is_file() for name in _TOKENIZER_FILES)


def processor_settings(source: str) -> dict[str, Any]:
    """What the checkpoint's image processor is set to; empty where it says nothing."""
    settings: dict[str, Any] = {}
    with _reaching(source):
        for name in ("processor_config.json", "preprocessor_config.json"):  # new and old names
            path = _file(source, name)
            if path is not None:
                found = json.loads(path.read_text(encoding="utf-8"))
                settings |= found.get("image_processor") or found
    return settings


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


def _place(source: str) -> str:
    return str(Path(source).expanduser()) if is_folder(source) else source


@contextmanager
def _reaching(source: str) -> Iterator[None]:
    """Turn the many ways in which a checkpoint cannot be had into one that says what to do."""
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
            f"the model {source!r} cannot be had ({reason}) — where there is a network run: "
            f"hf download {source} --local-dir FOLDER, then give the folder in its place"
        ) from error
    except ImportError as error:
        raise EnvironmentProblem(f"{source} needs a package that is not installed: {error}") from error
