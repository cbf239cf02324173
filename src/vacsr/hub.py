"""Models on the Hugging Face Hub: which ids name one, downloads of one commit, and uploads of a folder."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.files import read_json

_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_FILES = ["config.json", "model.safetensors", "README.md", "search.json", "backbone/**"]


class HubId(NamedTuple):
    """A model on the Hub, at a branch, tag or commit; None is the default branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def hub_id(source: str | Path, revision: str | None = None) -> HubId | None:
    """The Hub id that ``source`` is, perhaps with its revision; None for a folder, present or mistyped.

    >>> hub_id("user/model@v1"), hub_id("runs/mine")
    (HubId(repo='user/model', revision='v1'), None)
    """
    match = None if str(source).startswith("runs/") else _ID.fullmatch(str(source))
    if match is not None and not (Path(match[1]).exists() or Path(match[1]).parent.is_dir()):
        return HubId(match[1], revision or match[2])
    if revision:
        raise UsageError(f"{source} is no Hub id, only these have revisions — give user/model, or leave revision out")
    return None


def published_config(model: HubId) -> dict[str, Any]:
    """Its config.json: from the cache where it is, else downloaded."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with _hub_errors(model):
        cached = try_to_load_from_cache(model.repo, "config.json", revision=model.revision)
        found = (
            cached if isinstance(cached, str) else hf_hub_download(model.repo, "config.json", revision=model.revision)
        )
    return read_json(Path(found))


def download(model: HubId) -> Path:
    """The folder of a vacsr model in the Hub's cache, named by its commit. Only safetensors are fetched."""
    from huggingface_hub import snapshot_download

    with _hub_errors(model):
        return Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=_FILES))


def upload(folder: Path, model: HubId, *, private: bool | None, token: str | None) -> str:
    """Put a folder's files into one commit of a repository, which is created if needed. -> ``user/model@commit``"""
    from huggingface_hub import CommitOperationAdd, HfApi

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    adds = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
    api = HfApi(token=token, library_name="vacsr")
    with _hub_errors(model, action="check the id, and log in with write access: hf auth login"):
        api.create_repo(model.repo, private=private, exist_ok=True)
        if model.revision is not None:
            api.create_branch(model.repo, branch=model.revision, exist_ok=True)
        done = api.create_commit(model.repo, adds, commit_message="Save a model", revision=model.revision)
    return str(HubId(model.repo, done.oid))


def card_licence(source: str, folder: Path | None) -> str:
    """The licence on the card of a checkpoint, from its folder or the Hub's cache; "unknown" if none is there."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    card: Any = folder / "README.md" if folder is not None else None
    if folder is None and hub_id(source) is not None:
        card = try_to_load_from_cache(source, "README.md")
    if not isinstance(card, str | Path) or not Path(card).is_file():
        return "unknown"
    try:
        return str(ModelCard.load(card).data.license or "unknown")
    except (ValueError, OSError):  # a card without front matter that can be read
        return "unknown"


@contextmanager
def _hub_errors(model: HubId, *, action: str = "") -> Iterator[None]:
    """The Hub's many errors as one that ends in what to do."""
    log = logging.getLogger("huggingface_hub.utils._http")  # which announces each retry
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:  # of the Hub, of HTTP libraries that change, of JSON, of the disk
        reason = " ".join(str(error).split("\n\n")[-1].split())[:300]
        failed = f"{model} cannot be pushed ({reason})" if action else f"model '{model}' not found ({reason})"
        action = action or "check the id, run hf auth login if it is private, or give a folder"
        raise EnvironmentProblem(f"{failed} — {action}") from error
    finally:
        log.setLevel(level)
