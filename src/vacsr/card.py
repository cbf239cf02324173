"""The model card, README.md of a model folder: metadata that the Hub reads, what made the model, and how to use it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vacsr.backbones import Backbone
from vacsr.hub import card_licence, hub_id

PLACE = "FOLDER_OR_ID"  # where the card says how to load the model: replaced by the id when it is pushed
_PATH = re.compile(r"(?<![\w./])(?:[~.]{0,2}/)[^\s,'\"]*/(?=[^\s,'\"/]+)")


class Made(NamedTuple):
    """What a run knows about its model; all empty for a model without one."""

    recipe: Mapping[str, Any] = {}  # what differs from the defaults
    metrics: str = ""  # a Markdown table


def model_card(
    method: str, backbone: Backbone, *, spec: str, size: str, weights: str, revision: str = "", made: Made | None = None
) -> str:
    """The card of a model; ``size`` says how large it is, ``weights`` is their checksum, ``revision`` their origin."""
    towers = _towers(spec, backbone)
    licences = {name: card_licence(name, folder) for name, folder in towers.items()}
    licence = next(iter(licences.values())) if len(set(licences.values())) == 1 else "unknown"
    bases = [name for name, folder in towers.items() if folder is None and hub_id(name) is not None]
    meta = {
        "library_name": "vacsr",
        "pipeline_tag": "zero-shot-image-classification" if backbone.reads_photos else None,
        "tags": ["image-text-retrieval", "uncertainty", *["sentence-transformers"] * backbone.reads_photos],
        "license": licence,
        "base_model": bases or None,
    }
    source = backbone.name or backbone.origin.backbone or "unknown embeddings"
    front = yaml.safe_dump({name: value for name, value in meta.items() if value is not None}, sort_keys=False)
    parts = [f"---\n{front}---\n# {method} on {source}", size, f"## Use\n\n{_usage(backbone)}", *_made(made or Made())]
    named = [f"{name}: {each}" for name, each in licences.items()]
    facts = [f"- Licences of the towers: {', '.join(named) or 'unknown'}", f"- SHA-256 of the weights: `{weights}`"]
    facts += [f"- Loaded from `{revision}`"] * bool(revision)
    return "\n\n".join([*parts, "## Facts\n\n" + "\n".join(facts)]) + "\n"


def _towers(spec: str, backbone: Backbone) -> dict[str, Path | None]:
    """The checkpoints in it, or those that made the features it reads: by id, or by name with the folder if it is here.

    None of a spec that has no checkpoints.
    """
    if backbone.cached and backbone.origin.encoder:
        spec = json.loads(backbone.origin.encoder)["backbone"].get("spec", spec)
    scheme, _, places = spec.partition(":")
    names = (backbone.name or backbone.origin.backbone).partition(":")[2].split(",")
    if scheme not in ("clip", "towers"):
        return {}
    folders = (Path(place.strip()).expanduser() for place in places.split(","))
    return {name: folder if folder.is_dir() else None for name, folder in zip(names, folders, strict=False)}


def _usage(backbone: Backbone) -> str:
    inputs = "['photo.jpg'], ['a dog on a beach']"
    if not backbone.reads_photos:
        inputs = f"images, texts)  # features [N, {backbone.image_dim}] and [N, {backbone.text_dim}]"
    lines = [
        "import vacsr",
        f"scorer = vacsr.PairScorer.from_pretrained('{PLACE}')",
        f"pairs = scorer.score_pairs({inputs}{')' * backbone.reads_photos}",
        "print(pairs.score, pairs.grade, pairs.uncertainty)",
    ]
    return "\n".join(["```python", *lines, "```"])


def _made(made: Made) -> list[str]:
    """Metrics, data and recipe; folders of this machine are left out."""
    recipe = _PATH.sub("", yaml.safe_dump(dict(made.recipe), sort_keys=False, allow_unicode=True))
    data = _PATH.sub("", str(made.recipe.get("data", {}).get("pairs", "")))
    parts = [f"## Metrics\n\nData: `{data}`. Shares are in percent.\n\n{made.metrics}"] * bool(made.metrics)
    command = "`vacsr train recipe.yaml --out RUN` with this recipe made it:"
    return [*parts, *[f"## Training\n\n{command}\n\n```yaml\n{recipe}```"] * bool(made.recipe)]
