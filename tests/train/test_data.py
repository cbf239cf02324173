"""The batches of a step: the same photos whether they are kept or read batch by batch, on one rank or several."""

import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from vacsr.config import BackboneConfig, DataConfig, NoiseConfig
from vacsr.data import PhotoSet, load_pairs
from vacsr.errors import DataError
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.model import MatchingModel
from vacsr.train.data import PairLoader, build_loader, training_data
from vacsr.train.distributed import World

TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pairs() -> PhotoSet:
    return load_pairs("scenes:images=9,held_out=2,per_image=2,size=40", split="train")


@pytest.fixture(scope="module")
def model(pairs: PhotoSet) -> MatchingModel:
    return MatchingModel.build(SigmoidConfig(), TINY, fit=pairs)


ORDER = torch.tensor([[17, 3, 0, 9], [1, 1, 8, 16], [4, 5, 6, 7]])


@pytest.mark.parametrize("size", [0, 24, 48])
@pytest.mark.parametrize("world", [World(), World(0, 2), World(1, 2)])
def test_photos_read_by_batch_are_those_kept(model: MatchingModel, pairs: PhotoSet, size: int, world: World) -> None:
    def loader(cache: float) -> PairLoader:
        config = DataConfig(photo_size=size, cache_gb=cache, workers=3)
        return build_loader(model, pairs, config=config, device=CPU, world=world)

    kept, streamed = loader(1.0), loader(0.0)
    assert isinstance(kept.images, Tensor)
    assert not isinstance(streamed.images, Tensor)
    side = size or 32
    assert kept.images.shape == (9, 3, side, side)
    for batch, captions in zip(streamed.batches(ORDER), ORDER, strict=True):
        assert torch.equal(batch.captions, captions), "every rank knows the whole batch"
        mine = captions[world.rows(4)]
        assert batch.photos is not None
        assert torch.equal(batch.photos, kept.images[pairs.caption_image[mine]])
        assert torch.equal(streamed.images_of(captions), kept.images_of(captions)), "neighbours are read when needed"
    assert [batch.photos for batch in kept.batches(ORDER)] == [None] * 3


def test_the_cache_holds_what_fits_and_no_more(model: MatchingModel, pairs: PhotoSet) -> None:
    exactly = 9 * 3 * 32 * 32 / 2**30
    for cache, kept in ((exactly, True), (exactly * 0.999, False), (0.0, False)):
        loader = build_loader(model, pairs, config=DataConfig(cache_gb=cache), device=CPU, world=World())
        assert isinstance(loader.images, Tensor) == kept


def test_held_out_images_are_drawn_by_the_seed_of_the_data() -> None:
    def held_out(seed: int) -> set[str]:
        config = DataConfig(pairs="synthetic:images=40", dev_share=0.25, noise=NoiseConfig(seed=seed))
        train, dev, _ = training_data(config)
        assert dev is not None
        assert (len(dev.image_ids), set(dev.image_ids) & set(train.image_ids)) == (10, set())
        return set(dev.image_ids)

    assert held_out(1) == held_out(1) != held_out(2)


def test_features_are_looked_up() -> None:
    pairs = load_pairs("synthetic:images=5,per_image=2", split="train")
    model = MatchingModel.build(
        SigmoidConfig(), BackboneConfig(), image_dim=pairs.images.shape[1], text_dim=pairs.texts.shape[1]
    )
    loader = build_loader(model, pairs, config=DataConfig(), device=CPU, world=World())
    assert loader.images is pairs.images
    assert [batch.captions.tolist() for batch in loader.batches(torch.tensor([[3, 1]]))] == [[3, 1]]


def readers() -> set[threading.Thread]:
    """Threads that read photos; a run that an earlier test broke may still have some."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("photos")}


def test_a_photo_that_breaks_on_the_way_is_named(model: MatchingModel, tmp_path: Path) -> None:
    for number in range(6):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"thing {number}", encoding="utf-8")
    pairs, before = load_pairs(f"folder:{tmp_path}"), readers()
    loader = build_loader(model, pairs, config=DataConfig(cache_gb=0, workers=2), device=CPU, world=World())
    (tmp_path / "4.png").write_bytes(b"no photo")
    batches = loader.batches(torch.tensor([[0, 1], [4, 5], [2, 3]]))
    assert next(batches).captions.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"4\.png cannot be read as a photo"):
        next(batches)
    assert readers() <= before
