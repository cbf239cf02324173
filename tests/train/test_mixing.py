"""Mixed images and labels, and losses that stay one graph for the compiler."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import MixConfig
from vacsr.data import PairSet
from vacsr.errors import UsageError
from vacsr.objective import PairBlock
from vacsr.train.data import Batch, Mixer, PairLoader, batch_order
from vacsr.train.distributed import World
from vacsr.train.trainer import Trainer

from .conftest import make


def seen(trainer: Trainer, rows: Tensor, step: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, PairBlock]:
    """The image features that reach the head in one step, and the block that reaches the loss."""
    captured: list[Any] = []
    scaling = trainer.task.model.backbone.image.forward
    monkeypatch.setattr(trainer.task.model.backbone.image, "forward", lambda x: captured.append(x) or scaling(x))
    loss = trainer.task.pair_loss
    trainer.task.pair_loss = lambda v, t, block: captured.append(block) or loss(v, t, block)  # type: ignore[func-returns-value]
    trainer.task.loss(Batch(rows), torch.tensor(step))
    return captured[0], captured[1]


def test_the_step_mixes_images_and_labels_alike(pairs: PairSet, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(pairs, {"name": "pcmepp", "mix": {"share": 0.7}})
    rows = next(iter(batch_order(len(pairs), batch=8, seed=0, epoch=0)))
    images, block = seen(trainer, rows, 5, monkeypatch)
    image = pairs.caption_image[rows]
    plain = pairs.images[image]
    mixed = 0
    for i in range(8):
        partner = plain[7 - i]
        share = ((images[i] - partner) @ (plain[i] - partner) / (plain[i] - partner).square().sum()).item()
        torch.testing.assert_close(images[i], share * plain[i] + (1 - share) * partner, rtol=1e-4, atol=1e-5)
        for j in range(8):
            label = share * float(image[i] == image[j]) + (1 - share) * float(image[7 - i] == image[j])
            assert block.targets[i, j].item() == pytest.approx(label, abs=1e-4)
        mixed += share < 0.999
    assert 2 <= mixed < 8


def test_labels_may_be_the_diagonals(pairs: PairSet, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])  # two captions of each of four images
    for labels, matches in (("ids", 16), ("diagonal", 8)):
        trainer = make(pairs, {"name": "pcmepp", "mix": {"share": 1.0, "labels": labels}})
        _, block = seen(trainer, rows, 0, monkeypatch)
        assert block.targets.sum().item() == pytest.approx(matches, abs=1e-4)
        assert int(block.relevance.sum()) == 16


def test_without_a_share_nothing_is_mixed(pairs: PairSet, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ({"name": "pcmepp", "mix": {"share": 0.0}}, "sigmoid"):
        trainer = make(pairs, method)
        images, block = seen(trainer, torch.arange(8), 0, monkeypatch)
        assert block.targets is None
        assert torch.equal(images, pairs.images[pairs.caption_image[:8]])


def test_ranks_that_decode_their_own_photos_cannot_mix(pairs: PairSet) -> None:
    trainer = make(pairs, "pcmepp")
    with pytest.raises(UsageError, match=r"method\.mix.*data\.cache_gb") as caught:
        Mixer(MixConfig(), trainer.task.model, PairLoader(None, pairs.texts, pairs.caption_image, world=World(0, 2)))
    assert caught.value.exit_code == 2
    Mixer(MixConfig(), trainer.task.model, PairLoader(None, pairs.texts, pairs.caption_image, World()))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vse", "pcme", "pcmepp", "daa"])
def test_the_loss_is_one_graph_for_the_compiler(pairs: PairSet, method: str) -> None:
    """Nothing in it waits for a number or leaves the graph, which a captured step could not repeat."""
    trainer = make(pairs, method)
    compiled = torch.compile(trainer.task.loss, backend="eager", fullgraph=True, dynamic=False)
    batch, step = Batch(torch.arange(8)), torch.tensor(3)
    torch.testing.assert_close(compiled(batch, step).total, trainer.task.loss(batch, step).total)
