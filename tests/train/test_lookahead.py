"""Looking ahead at photos that are read batch by batch: the same run as with all of them in memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import BackboneConfig, DataConfig, HeadConfig, TowersConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PhotoSet, load_pairs
from vacsr.data.noise import apply_noise, make_noise
from vacsr.methods.base import Neighbours
from vacsr.methods.sigmoid import SigmoidConfig
from vacsr.model import MatchingModel
from vacsr.train.data import Batch, PairLoader, build_loader
from vacsr.train.distributed import ALONE, World
from vacsr.train.retrieval import retrieval_task
from vacsr.train.trainer import Trainer

TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
SPEC = "scenes:images=16,held_out=6,per_image=2,size=32"
NPC = {"name": "npc", "warmup": 0.25, "threshold": 0.6, "look_ahead": 0.1}
CPU = torch.device("cpu")
CHANGES: dict[str, Any] = {
    "data.pairs": SPEC,
    "data.noise.ratio": 0.5,
    "backbone.spec": TINY.spec,
    "method": NPC,
    "train.epochs": 4,
    "train.towers": {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 1},
    "train.checkpoint_every": 5,
}
STREAMED = ["--set", "data.cache_gb=0", "--set", "data.workers=2"]


@pytest.fixture(scope="module")
def noisy() -> PhotoSet:
    clean = load_pairs(SPEC, split="train")
    return apply_noise(clean, make_noise("derange-captions", clean.caption_image, ratio=0.5, seed=0))


def make(pairs: PhotoSet, *, cache: float, device: str = "cpu") -> Trainer:
    """Four epochs of four steps, the first of them to warm up; photos are cropped and flipped from 40 pixels."""
    towers = TowersConfig(image_lr=0.5, text_lr=0.5, freeze_image=1)
    config = TrainConfig(batch_size=8, device=device, epochs=4, log_every=1, towers=towers, lr=3e-3)
    reading = DataConfig(cache_gb=cache, photo_size=40, workers=2)
    return Trainer(retrieval_task(method_config(NPC), pairs, config, backbone=TINY, reading=reading), config)


def watched(trainer: Trainer) -> list[Batch]:
    """Collects the batches of a run."""
    seen: list[Batch] = []
    original = trainer.task.batches

    def batches(epoch: int, start: int) -> Iterator[Batch]:
        for batch in original(epoch, start):
            seen.append(batch)
            yield batch

    trainer.task.batches = batches  # type: ignore[method-assign]
    return seen


def test_streamed_photos_train_the_same_weights(noisy: PhotoSet) -> None:
    kept, streamed = make(noisy, cache=1.0), make(noisy, cache=0.0)
    assert kept.task.loader.reader is None
    assert streamed.task.loader.reader is not None
    batches = watched(streamed)
    one, other = kept.run(progress=False), streamed.run(progress=False)
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    rows = [[{**row, "steps_per_second": 0} for row in run.history] for run in (one, other)]
    assert rows[0] == rows[1]
    assert torch.equal(one.model.method.weight, other.model.method.weight)  # type: ignore[arg-type]
    assert bool((other.model.method.weight < 1).any()), "the neighbours made a difference"  # type: ignore[operator]
    apart = [
        {row for captions, _ in batch.near for row in captions.tolist()} - set(batch.captions.tolist())
        for batch in batches
        if batch.near
    ]
    assert len(apart) == 16
    assert sum(map(bool, apart[4:])) >= 2, "neighbours of other batches"
    assert not any(apart[:4]), "while it warms up, each pair is its own neighbour"


@pytest.mark.gpu
def test_streamed_photos_train_the_same_on_a_gpu(noisy: PhotoSet) -> None:
    """A GPU's sums differ in their last digits; the first epochs must agree, with neighbours in use from the second."""
    kept, streamed = (make(noisy, cache=cache, device="cuda") for cache in (1.0, 0.0))
    assert kept.task.loader.reader is None
    assert streamed.task.loader.reader is not None
    one, other = (
        [row["loss"] for row in trainer.run(progress=False).history if "loss" in row] for trainer in (kept, streamed)
    )
    assert len(one) == 16
    assert one[:8] == pytest.approx(other[:8], rel=1e-3)


@pytest.mark.parametrize("moment", [("after step", 6), ("ctrl-c", 11)], ids=["kill", "ctrl-c"])
def test_a_streamed_run_resumes_exactly(
    launch: Any, reference: Any, outcome: Any, tmp_path: Path, moment: tuple[str, int]
) -> None:
    """In the middle of an epoch, with the bank of its beginning; the reference has its photos in memory."""
    file, expected = reference(CHANGES)
    command = ["train", file, "--out", tmp_path / "run", "--resume", *STREAMED]
    done = launch(*command, kill=moment)
    assert done.code == (-signal.SIGKILL if moment[0] == "after step" else 130), done
    assert launch(*command).code == 0
    assert outcome.of(tmp_path / "run").same(expected)


def test_two_ranks_that_stream_are_one_run(launch: Any, reference: Any, outcome: Any, tmp_path: Path) -> None:
    file, expected = reference(CHANGES)
    commands = [["train", file, "--out", tmp_path / f"rank-{rank}", *STREAMED] for rank in (0, 1)]
    first, second = launch.ranks(commands)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    for name, tensor in outcome.of(tmp_path / "rank-0").weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], rtol=0, atol=1e-4, msg=name)


class Fixed:
    """A method whose neighbours are given."""

    look_ahead = 0.1

    def __init__(self, by_image: Tensor, by_text: Tensor) -> None:
        self.near, self.asked = Neighbours(by_image, by_text), 0

    def neighbours(self, captions: Tensor) -> Neighbours:
        self.asked += 1
        return Neighbours(*(kind[captions] for kind in self.near))

    def pair_losses(self, v: Any, t: Any, relevance: Tensor) -> Tensor:
        raise AssertionError("a loader computes no losses")

    def weigh(self, captions: Tensor, before: Neighbours, after: Neighbours) -> Tensor:
        raise AssertionError("a loader weighs nothing")


class Numbered:
    """A reader whose photo of row n is full of n."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def stream(self, batches: Any, *, ahead: int = 2) -> Iterator[Tensor]:
        for rows in batches:
            self.asked.append(list(rows))
            yield torch.tensor(rows, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)


@pytest.mark.parametrize("world", [ALONE, World(0, 2), World(1, 2)])
def test_a_batch_brings_its_neighbours_and_reads_each_photo_once(world: World) -> None:
    generator = torch.Generator().manual_seed(3)
    image = torch.arange(20) // 2
    method = Fixed(*(torch.randint(20, (20,), generator=generator) for _ in range(2)))
    reader = Numbered()
    loader = PairLoader(None, torch.zeros(20, 4, dtype=torch.int32), image, reader, world, method)
    order = [torch.randperm(20, generator=generator)[:8] for _ in range(3)]
    found = list(loader.batches(order))
    assert method.asked == 1, "once an epoch"
    for batch, captions, asked in zip(found, order, reader.asked, strict=True):
        assert batch.photos is not None
        assert torch.equal(batch.captions, captions)
        needed = set()
        kinds = [(captions, batch.photos), *batch.near]
        for kind, (rows, photos) in enumerate(kinds):
            assert torch.equal(rows, captions if kind == 0 else method.near[kind - 1][captions])
            mine = image[rows[world.rows(8)]]
            assert torch.equal(photos[:, 0, 0, 0].long(), mine)
            needed |= set(mine.tolist())
        assert sorted(asked) == sorted(needed)


def test_other_methods_read_their_batches_alone(noisy: PhotoSet) -> None:
    model = MatchingModel.build(SigmoidConfig(), TINY, fit=noisy)
    loader = build_loader(model, noisy, config=DataConfig(cache_gb=0), device=CPU, world=ALONE)
    assert loader.looks is None
    assert [batch.near for batch in loader.batches([torch.arange(4)])] == [None]
