"""Train the small towers that `vacsr demo` starts from, and store them in src/vacsr/demo-towers.

They learn with InfoNCE from clean drawn scenes of a seed of their own; the demo keeps them frozen. Under three minutes
on an H200: `python tools/demo_towers.py --device cuda`; about 2.5 hours on one CPU core. Weights are stored in half
precision, the sha256 in README.md. On a CPU a second run gives the same bytes, on a GPU it does not.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import vacsr
from vacsr.config.io import parse

SEED = 90_000
RECIPE = {
    "data": {"pairs": f"scenes:images=50000,held_out=500,seed={SEED}"},
    "backbone": {
        "spec": "tiny:width=96,depth=3,text_depth=2",
        "image_output": "norm",
        "text_output": "norm",
        "pooling": "cls",
        "augment": {"crop": [1.0, 1.0], "flip": 0.0, "image_tokens": 0.0, "text_tokens": 0.0},
        "head": {"kind": "linear", "dim": 96},
    },
    "method": {"name": "infonce"},
    "train": {
        "epochs": 14,
        "batch_size": 512,
        "lr": 0.001,
        "towers": {"image_lr": 1.0, "text_lr": 1.0, "layer_decay": 1.0, "freeze_image": 0, "ramp": False},
        "schedule": "cosine",
        "warmup_steps": 200,
        "eval_every": 2,
        "checkpoint_every": 0,
        "checkpoint_epochs": 0,
        "seed": SEED,
    },
    "evaluate": {"splits": ["dev"]},
}


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=root / "src/vacsr/demo-towers")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    recipe = parse(vacsr.Recipe, RECIPE)
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"device": options.device})})
    with TemporaryDirectory() as scratch:
        run = vacsr.run_recipe(recipe, Path(scratch) / "run")
    print(run.report)
    readme = options.out / "README.md"
    card = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    run.model.cpu().half().save_pretrained(options.out)
    digest = hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest()
    readme.write_text(re.sub(r"[0-9a-f]{64}", digest, card) or f"sha256: {digest}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
