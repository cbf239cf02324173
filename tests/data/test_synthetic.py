import pytest
import torch

from vacsr.data import load_pairs
from vacsr.data.synthetic import ATTRIBUTES, GROUPS, SyntheticOptions, synthetic_world
from vacsr.errors import NoSuchSplit, UsageError


def test_the_world_stays_what_it_was() -> None:
    captions = load_pairs("synthetic:images=3,per_image=1", split="train").captions
    assert captions == ("a car and a boat in a forest", "a black horse in the fog", "a white boat on a hill")


def test_features_without_noise_vary_by_about_one() -> None:
    """It is what ``noise`` is measured against."""
    pairs = load_pairs("synthetic:noise=0")
    assert [float(pairs.images.std()), float(pairs.texts.std())] == pytest.approx([1, 1], abs=0.2)


def test_images_and_captions_have_their_attributes() -> None:
    world = synthetic_world(split="train")
    start = 0
    for names, low, high in GROUPS.values():
        count = world.present[:, start : start + len(names)].sum(dim=1)
        assert (int(count.min()), int(count.max())) == (low, high)
        start += len(names)
    assert start == len(ATTRIBUTES) == 24
    assert float(world.present.sum(dim=1).float().mean()) == pytest.approx(6, abs=0.2)
    assert set(world.mentioned.sum(dim=1).tolist()) == {2, 3, 4}
    for text, row in zip(world.pairs.captions or (), world.mentioned.tolist(), strict=True):
        assert {name for name in ATTRIBUTES if name in text} == {ATTRIBUTES[k] for k, said in enumerate(row) if said}
        assert "  " not in text


def test_the_same_seed_gives_the_same_world() -> None:
    before = torch.get_rng_state()
    first, second = (load_pairs("synthetic:seed=3") for _ in range(2))
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.texts, second.texts)
    assert first.captions == second.captions
    assert not torch.equal(first.images, load_pairs("synthetic:seed=4").images)
    assert torch.get_rng_state().equal(before)


def test_splits_are_parts_of_the_whole_and_differ() -> None:
    whole = load_pairs("synthetic:images=60,held_out=20")
    parts = [load_pairs("synthetic:images=60,held_out=20", split=split) for split in ("train", "dev", "test")]
    assert [len(part.image_ids) for part in parts] == [60, 20, 20]
    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert whole.caption_ids == tuple(name for part in parts for name in part.caption_ids)
    assert not torch.equal(parts[1].images, parts[2].images)


def test_splits_share_the_maps() -> None:
    """Without noise, images with the same attributes have the same features, whatever their split."""
    train, test = (synthetic_world(SyntheticOptions(images=2000, noise=0), split=split) for split in ("train", "test"))
    same = (train.present.float() @ test.present.float().T) == train.present.float().sum(1, keepdim=True)
    same &= train.present.sum(1, keepdim=True) == test.present.sum(1)
    left, right = same.nonzero(as_tuple=True)
    assert len(left) > 10
    assert torch.allclose(train.pairs.images[left], test.pairs.images[right], atol=1e-5)


@pytest.mark.parametrize("option", ["images=many", "noise=x", "held_out=0", "per_image=-1", "noise=-1", "noise=nan"])
def test_options_that_make_no_world(option: str) -> None:
    with pytest.raises(UsageError, match=f"synthetic:{option}: {option.partition('=')[0]}: .* — "):
        load_pairs(f"synthetic:{option}")
    with pytest.raises(NoSuchSplit, match=r"no split 'val'; it has train \(800 images\), dev \(200 images\)"):
        load_pairs("synthetic:", split="val")
