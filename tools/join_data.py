r"""Join data sets into one, split by split: Flickr8k and COCO photos as one training set, for example.

  python tools/join_data.py --out data/flickr8k-coco flickr8k:data/flickr8k coco:data/coco
  python tools/join_data.py --out data/flickr8k-coco features:A.safetensors,captions=a.json \
    features:B.safetensors,captions=b.json

Photos become shards, one folder per set and split: shards:OUT/*/*.tar. Cached embeddings, which must come from the same
towers, become OUT/features.safetensors and OUT/captions.json. Image ids must differ between the sets.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from vacsr.data import PairSet, PhotoSet, load_pairs, write_shards
from vacsr.data.features import write_features
from vacsr.files import write_json
from vacsr.provenance import UNKNOWN

SPLITS = ("train", "dev", "test")


def join(specs: list[str], out: Path) -> str:
    """Write the joined sets; the SPEC that reads them."""
    parts = [(number, load_pairs(spec, split=split)) for split in SPLITS for number, spec in enumerate(specs)]
    photos = [(number, pairs) for number, pairs in parts if isinstance(pairs, PhotoSet)]
    features = [pairs for _, pairs in parts if isinstance(pairs, PairSet)]
    if photos and features:
        raise SystemExit("photos and cached embeddings cannot be joined — give sets of one kind")
    out.mkdir(parents=True, exist_ok=True)
    for number, pairs in photos:
        write_shards(pairs, out / f"{number}-{pairs.split}")
    if photos:
        return f"shards:{out}/*/*.tar"
    first_rows = torch.tensor([0, *(len(pairs.image_ids) for pairs in features)]).cumsum(0).tolist()
    known = next((pairs.provenance for pairs in features if pairs.provenance.backbone), UNKNOWN)
    for pairs in features:
        known.check(pairs.provenance)
    names = [name for pairs in features for name in pairs.image_ids]
    if len(set(names)) < len(names):
        raise SystemExit("the sets share image ids — rename the images of one of them")
    write_features(
        out / "features.safetensors",
        image=torch.cat([pairs.images for pairs in features]),
        text=torch.cat([pairs.texts for pairs in features]),
        caption_image=torch.cat([pairs.caption_image + row for pairs, row in zip(features, first_rows, strict=False)]),
        provenance=known,
    )
    write_json(out / "captions.json", [entry for pairs in features for entry in entries(pairs)])
    return f"features:{out}/features.safetensors,captions={out}/captions.json"


def entries(pairs: PairSet) -> list[dict[str, Any]]:
    """One entry per image, as captions.json has them."""
    if pairs.captions is None:
        raise SystemExit("the embeddings have no caption texts — name them: features:FILE,captions=FILE")
    rows: list[dict[str, Any]] = [
        {"image": name, "split": pairs.split, "captions": [], "caption_ids": []} for name in pairs.image_ids
    ]
    for image, text, name in zip(pairs.caption_image.tolist(), pairs.captions, pairs.caption_ids, strict=True):
        rows[image]["captions"].append(text)
        rows[image]["caption_ids"].append(name)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    given = parser.parse_args()
    print(join(given.specs, given.out))
