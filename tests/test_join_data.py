"""tools/join_data.py: two data sets as one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.data import PairSet, load_pairs
from vacsr.data.features import write_features
from vacsr.files import write_json

from .conftest import load_script


@pytest.fixture(scope="module")
def tool() -> Any:
    return load_script("tools/join_data.py")


def features(folder: Path, name: str, *, captions: int) -> str:
    """Two images in each split."""
    folder.mkdir(exist_ok=True)
    draw = torch.Generator().manual_seed(captions)
    image, text = torch.randn(6, 4, generator=draw), torch.randn(6, captions, 3, generator=draw)
    write_features(folder / f"{name}.safetensors", image=image, text=text)
    splits = ("train", "dev", "test")
    entries = [{"image": f"{name}{row}", "split": splits[row % 3], "captions": ["a b"] * captions} for row in range(6)]
    write_json(folder / f"{name}.json", entries)
    return f"features:{folder}/{name}.safetensors,captions={folder}/{name}.json"


def test_embeddings_are_joined_split_by_split(tool: Any, tmp_path: Path) -> None:
    specs = [features(tmp_path, "x", captions=2), features(tmp_path, "y", captions=3)]
    joined = tool.join(specs, tmp_path / "out")
    for split in ("train", "dev", "test"):
        both, parts = load_pairs(joined, split=split), [load_pairs(spec, split=split) for spec in specs]
        assert both.image_ids == parts[0].image_ids + parts[1].image_ids
        assert both.caption_ids == parts[0].caption_ids + parts[1].caption_ids
        owners = [part.image_ids[row] for part in parts for row in part.caption_image.tolist()]
        assert [both.image_ids[row] for row in both.caption_image.tolist()] == owners
        assert isinstance(both, PairSet)
        for name in ("images", "texts"):
            assert torch.equal(getattr(both, name), torch.cat([getattr(part, name) for part in parts]))


def test_photos_are_joined_as_shards(tool: Any, tmp_path: Path) -> None:
    folders = []
    for number in range(2):
        spec = f"scenes:images=4,held_out=2,size=16,seed={number}"
        for split in ("train", "dev", "test"):
            pairs = load_pairs(spec, split=split)
            folder = tmp_path / f"set{number}" / split
            folder.mkdir(parents=True)
            for row in range(2):
                pairs.photos.open(row).save(folder / f"{number}{row}.png")  # type: ignore[union-attr]
                (folder / f"{number}{row}.txt").write_text("one\ntwo")
        folders.append(f"folder:{tmp_path}/set{number}")
    joined = tool.join(folders, tmp_path / "out")
    assert load_pairs(joined, split="dev").image_ids == ("dev/00.png", "dev/01.png", "dev/10.png", "dev/11.png")
    with pytest.raises(SystemExit, match="one kind"):
        tool.join([folders[0], features(tmp_path, "x", captions=1)], tmp_path / "mixed")
