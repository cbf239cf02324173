"""The paper's recipe on a COCO of 46 photos in the real layout and a small CLIP of the real architecture.

The recipe's own paths are relative, so a folder that holds ``data/coco`` and ``openai/clip-vit-base-patch32`` needs no
override at all; the test changes two fields that cost time: the epochs, and d.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from vacsr.files import read_tensors

from ..conftest import byte_tokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "coco-vitb32.yaml"
COUNTS = {"train": 20, "restval": 6, "val": 10, "test": 10}  # 26 to train on: 130 captions, a batch of 128
COLOURS = {"red": (200, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 200), "yellow": (220, 210, 60)}


def images() -> list[dict[str, Any]]:
    """Entries of dataset_coco.json, splits mixed as Karpathy has them; some photos have six captions."""
    rng = np.random.default_rng(0)
    splits = rng.permutation([name for name, count in COUNTS.items() for _ in range(count)]).tolist()
    entries = []
    for row, split in enumerate(splits):
        cocoid, part = 1000 + 37 * row, "train2014" if split == "train" else "val2014"
        colour = list(COLOURS)[row % 4]
        sentences = [
            {"raw": f"A {colour} thing, number {row}, said in way {way}.", "imgid": row, "sentid": 100 * row + way}
            for way in range(6 if row % 9 == 0 else 5)
        ]
        entries.append(
            {
                "filepath": part, "filename": f"COCO_{part}_{cocoid:012d}.jpg", "imgid": row, "split": split,
                "cocoid": cocoid, "sentids": [sentence["sentid"] for sentence in sentences], "sentences": sentences,
            }
        )  # fmt: skip
    return entries


def write_coco(root: Path) -> None:
    entries = images()
    for name in ("annotations", "train2014", "val2014"):
        (root / name).mkdir(parents=True)
    (root / "annotations" / "dataset_coco.json").write_text(json.dumps({"images": entries, "dataset": "coco"}))
    for entry in entries:
        rng = np.random.default_rng(entry["cocoid"])
        colour = np.array(list(COLOURS.values())[entry["imgid"] % 4])
        pixels = np.clip(colour + rng.normal(0, 25, (90, 120, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).resize((160, 120)).save(root / entry["filepath"] / entry["filename"], quality=90)


def write_clip(folder: Path) -> None:
    """CLIP's architecture with two narrow blocks a side, CLIP's context and photo size, and its tokenizer's class."""
    transformers = pytest.importorskip("transformers")
    side = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        vision_config={**side, "hidden_size": 32, "image_size": 224, "patch_size": 32},
        text_config={
            **side, "hidden_size": 24, "vocab_size": 600, "max_position_embeddings": 77,
            "bos_token_id": 512, "eos_token_id": 513,
        },
        projection_dim=16,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.CLIPModel(config).save_pretrained(folder)
    byte_tokenizer(transformers).save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipe's own paths lead to."""
    root = tmp_path_factory.mktemp("place")
    write_coco(root / "data" / "coco")
    write_clip(root / "openai" / "clip-vit-base-patch32")
    return root


@pytest.mark.slow
def test_the_recipe_with_two_overrides(
    vacsr: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three epochs: two in which the image tower is frozen, and the one that unfreezes it."""
    out = tmp_path / "run"
    monkeypatch.chdir(place)
    quick = ["--set", "train.epochs=3", "--set", "backbone.head.dim=16"]
    done = vacsr("train", RECIPE, "--out", out, *quick)
    assert done.code == 0, done.err
    assert "| flickr | test |" in done.out
    (result,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["results"]
    assert 0 <= result["rsum"] <= 600
    last, _ = read_tensors(out / "checkpoint" / "state.safetensors")  # model/ holds the best epoch's weights
    start, _ = read_tensors(place / "openai" / "clip-vit-base-patch32" / "model.safetensors")
    name = "encoder.layers.1.mlp.fc1.weight"
    assert not torch.equal(last[f"model.backbone.image.model.{name}"], start[f"vision_model.{name}"]), "it was unfrozen"
    config = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    assert (config["data"]["photo_size"], config["train"]["optimizer"]) == (384, "adamp")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["epoch"] for row in rows if "dev_rsum" in row] == [1, 2, 3]
    again = vacsr("evaluate", out, "--json", tmp_path / "again.json")
    assert again.code == 0, again.err
    assert again.out.splitlines()[2] == done.out.splitlines()[2]
    photo = next((place / "data" / "coco" / "val2014").iterdir())
    scored = vacsr("score", out, "--image", photo, "--text", "a red thing", "--text", "a blue thing")
    assert scored.code == 0, scored.err
    assert len(scored.out.splitlines()) == 3
