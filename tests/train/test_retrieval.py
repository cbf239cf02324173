"""What the loop offers methods: a second network, a look at the whole set between epochs, a trial step."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vacsr.config import DataConfig, HeadConfig, TowersConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.data.noise import apply_noise, make_noise
from vacsr.methods.base import Embedding, Method, MethodConfig, SetEmbeddings, TrainingView
from vacsr.model import MatchingModel
from vacsr.objective import LossTerms, PairBlock, same_image
from vacsr.scoring import PairScorer
from vacsr.train import fit
from vacsr.train.data import Batch
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.trainer import Trainer

from .conftest import FEATURES, NPC, assert_same_weights, make

METHODS = ["ncr", "bicro", "npc"]


# ------------------------------------------------------------------------------------------------- two networks


@pytest.mark.parametrize("method", ["ncr", "bicro"])
def test_a_score_is_the_mean_of_both_networks_cosines(pairs: PairSet, method: str) -> None:
    run = make(pairs, method, epochs=2).run(progress=False)
    first, second = run.model.networks
    apart = []
    for network in (first, second):
        backbone = network.backbone
        v, t = network(backbone.encode_images(pairs.images), backbone.encode_texts(pairs.texts))
        apart.append((v.mean @ t.mean.T).detach())
    assert float((apart[0] - apart[1]).abs().max()) > 0.05, "two networks"
    scores = PairScorer(run.model, device="cpu").score_set(pairs).score
    torch.testing.assert_close(scores, (apart[0] + apart[1]) / 2, atol=1e-5, rtol=0)


def test_runs_of_neighbouring_seeds_share_no_weights(pairs: PairSet) -> None:
    """Drawn from seed + 1, the second network of one run began as the first of the next."""
    initial = [
        {name: value for name, value in network.named_parameters() if not name.startswith("second.")}
        for seed in range(4)
        for network in make(pairs, "ncr", seed=seed).task.model.networks
    ]
    drawn = [name for name, value in initial[0].items() if value.ndim > 1]
    assert drawn
    for n, one in enumerate(initial):
        assert not any(torch.equal(one[name], other[name]) for other in initial[:n] for name in drawn)


def test_a_variance_head_begins_with_draws_of_its_own(pairs: PairSet) -> None:
    """And leaves those of the heads as they are without it."""
    plain, *initial = [
        dict(make(pairs, name, seed=seed).task.model.named_parameters())
        for name, seed in (("infonce", 0), *(("pcmepp", seed) for seed in range(4)))
    ]
    first = initial[0]
    assert all(torch.equal(first[name], value) for name, value in plain.items() if name in first)
    heads = [name for name in first if "variance" in name and first[name].ndim > 1]
    assert heads
    for weight in (one[name] for one in initial for name in heads):
        alike = [v for one in initial for v in one.values() if v.shape == weight.shape and torch.allclose(v, weight)]
        assert len(alike) == 1, "only the weight itself"


def test_both_networks_learn_and_freeze(photos: PhotoSet) -> None:
    trainer = make(photos, "ncr")
    model = trainer.task.model
    grouped = [id(p) for group in model.param_groups(TowersConfig()) for p in group.params]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    model.freeze(["image"])
    for network in model.networks:
        assert not any(p.requires_grad for p in network.backbone.image.parameters())
        assert all(p.requires_grad for p in network.backbone.text.parameters())


def test_the_set_is_embedded_without_compiled_blocks(photos: PhotoSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches have other sizes, and each would be compiled again."""
    compile_, compilations = torch.nn.Module.compile, []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(inputs)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_(self, backend=backend, **kw))
    task = make(photos, "ncr", compile=True).task
    task.embed_training_set()
    assert not compilations
    task.model.embed_images(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert compilations


def test_two_networks_start_from_one(pairs: PairSet, tmp_path: Path) -> None:
    make(pairs, "infonce", epochs=1).run(progress=False).model.save_pretrained(tmp_path)
    model = MatchingModel.build(
        method_config("ncr"), FEATURES.model_copy(update={"start": str(tmp_path)}), image_dim=64, text_dim=48
    )
    assert torch.equal(model.second.image_head.last.weight, model.image_head.last.weight)


# ------------------------------------------------------------------------------------------------- between epochs


def test_groups_hold_every_caption_and_change_with_the_epoch() -> None:
    image = torch.arange(50) // 2
    groups = [TrainingView(epoch, 5, 3, 8, image, lambda: SetEmbeddings(image, image)).groups() for epoch in (0, 0, 1)]
    assert groups[0].shape == (7, 8)
    assert set(groups[0].flatten().tolist()) == set(range(50))
    assert all(len(set(group)) == 8 for group in groups[0].tolist())
    assert torch.equal(groups[0], groups[1])
    assert not torch.equal(groups[0], groups[2])


@pytest.mark.parametrize(
    ("share", "epochs", "expected"), [(0.0, 20, 0), (0.1, 20, 2), (0.1, 4, 1), (0.1, 5, 1), (0.35, 20, 7), (1.0, 3, 3)]
)
def test_a_short_run_warms_up_too(share: float, epochs: int, expected: int) -> None:
    image = torch.arange(4)
    view = TrainingView(0, epochs, 0, 2, image, lambda: SetEmbeddings(image, image))
    assert view.first_epochs(share) == expected


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_called_noisy_before_there_is_anything_to_judge_by(pairs: PairSet, method: str) -> None:
    trainer = make(pairs, method, epochs=3)
    trainer.task.batches(0, 0)
    assert bool((trainer.task.model.method.clean == 1).all())  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["features", "photos", "streamed", "bf16"])
def test_the_set_is_embedded_as_a_scorer_would(pairs: PairSet, photos: PhotoSet, kind: str) -> None:
    data = pairs if kind == "features" else photos
    precision, reading = "bf16" if kind == "bf16" else "fp32", DataConfig(cache_gb=0.0 if kind == "streamed" else 4.0)
    trainer = make(data, "ncr", reading=reading, precision=precision)
    embedded = trainer.task.embed_training_set()
    assert trainer.task.model.training
    expected = PairScorer(trainer.task.model, device="cpu").score_set(data)
    rounded = {"bf16": 2e-2}.get(kind, 1e-6)
    close = 2e-2 if kind == "streamed" else rounded  # JPEGs and the like are read quicker for training
    torch.testing.assert_close(embedded.images, expected.images.mean, atol=close, rtol=0)
    torch.testing.assert_close(embedded.texts, expected.texts.mean, atol=rounded, rtol=0)


class Diary(Method):
    """A method that counts its epochs."""

    page: Tensor

    def __init__(self) -> None:
        super().__init__(MethodConfig(name="diary"), dim=8)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_training_state("page", torch.zeros((), dtype=torch.int64))
        self.seen: list[int] = []

    def start_epoch(self, view: TrainingView) -> None:
        self.seen.append(view.epoch)
        self.page += 1

    def loss(self, v: Embedding, t: Embedding, pairs: PairBlock) -> LossTerms:
        return LossTerms(self.scale * (v.mean - t.mean).square().mean(), {"page": self.page.float()})


def test_checkpoints_hold_the_training_state_of_a_method(pairs: PairSet, tmp_path: Path) -> None:
    config = TrainConfig(epochs=3, batch_size=8, device="cpu", checkpoint_every=3, log_every=1)
    whole = fit(Diary(), pairs, config, backbone=FEATURES, progress=False)
    assert whole.model.method.seen == [0, 1, 2]  # type: ignore[attr-defined]

    class Stop(Exception):
        pass

    trainer = Trainer(RetrievalTask(Diary(), pairs, config, backbone=FEATURES), config, tmp_path / "run")
    original = trainer.step.run

    def breaks(*args: Any, **fields: Any) -> Tensor:
        if trainer.state.step == 8:  # of 5 steps an epoch: in the second
            raise Stop
        return original(*args, **fields)

    trainer.step.run = breaks  # type: ignore[method-assign]
    with pytest.raises(Stop):
        trainer.run(progress=False)
    resumed = fit(Diary(), pairs, config, backbone=FEATURES, out=tmp_path / "run", resume=True, progress=False)
    assert resumed.state.step == whole.state.step
    diary = resumed.model.method
    assert diary.seen == [2], "not in the middle of the second epoch"  # type: ignore[attr-defined]
    assert diary.page.item() == 3  # type: ignore[attr-defined]


def auroc(score: Tensor, good: Tensor) -> float:
    """The share of (good, bad) pairs in which the good one scores more."""
    above = score[good].unsqueeze(1) - score[~good].unsqueeze(0)
    return float((above.sign() + 1).mean() / 2)


@pytest.mark.parametrize(("method", "least"), [("ncr", 0.8), ("bicro", 0.7), ("npc", 0.8)])
def test_half_of_the_captions_are_wrong_and_found_out(method: str, least: float) -> None:
    clean = load_pairs("synthetic:images=300,held_out=8,per_image=2,noise=0.1", split="train")
    noisy = apply_noise(clean, make_noise("derange-captions", clean.caption_image, ratio=0.5, seed=0))
    config = TrainConfig(epochs=8, batch_size=50, device="cpu", lr=3e-3)
    backbone = FEATURES.model_copy(update={"head": HeadConfig(dim=32)})
    run = fit({"name": method, "warmup": 0.5}, noisy, config, backbone=backbone, progress=False)
    good = (clean.texts == noisy.texts).all(dim=1) & (clean.caption_image == noisy.caption_image)
    assert 0.45 < float(good.float().mean()) < 0.55
    ledger: Tensor = run.model.method.clean  # type: ignore[attr-defined]
    for clean_probability in ledger.reshape(-1, len(good)):
        assert auroc(clean_probability, good) > least


# --------------------------------------------------------------------------------------------------- look ahead


def test_weights_come_from_a_trial_step_that_leaves_no_trace(pairs: PairSet) -> None:
    """The same by hand: copy the model, step down the gradient of the heads, compare the neighbours' losses."""
    trainer = make(pairs, {"name": "npc", "look_ahead": 0.05})
    model, captions = trainer.task.model, torch.arange(3, 11)
    generator = torch.Generator().manual_seed(6)
    method: Any = model.method
    method.nearest.copy_(torch.randint(len(pairs), (2, len(pairs)), generator=generator))
    method.ready.fill_(1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gain = trainer.task.look_ahead[0](Batch(captions))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())

    def losses(of: MatchingModel, rows: Tensor) -> Tensor:
        image = pairs.caption_image[rows]
        v, t = of.embed_images(pairs.images[image]), of.embed_texts(pairs.texts[rows])
        return of.method.pair_losses(v, t, same_image(image, image))  # type: ignore[attr-defined,no-any-return]

    moved = copy.deepcopy(model)
    losses(moved, captions).mean().backward()  # type: ignore[no-untyped-call]
    heads = [p for _, p in moved.head_params()]
    length, slope = (torch.cat([x.flatten() for x in xs]).norm() for xs in (heads, [p.grad for p in heads]))  # type: ignore[misc]
    with torch.no_grad():
        for p in heads:
            assert p.grad is not None
            p -= 0.05 * length / slope * p.grad
    near = method.neighbours(captions)
    ratio = sum(losses(model, rows) / losses(moved, rows) for rows in near) / 2
    expected = torch.where(ratio < 1, ratio.tanh(), torch.ones(8))
    torch.testing.assert_close(method.weight[captions], expected.detach(), atol=1e-5, rtol=1e-5)
    assert 0 < int((expected < 1).sum()) < 8, "some help and some hurt"
    torch.testing.assert_close(gain, sum(losses(model, rows).mean() for rows in near), atol=1e-5, rtol=1e-5)
    assert bool((torch.cat((method.weight[:3], method.weight[11:])) == 1).all())


def test_the_banks_loss_is_trained_on(pairs: PairSet) -> None:
    """A step adds the bank's share to the loss: with it, other gradients."""
    grads = []
    for weight in (0.0, 1.0):
        trainer = make(pairs, {"name": "npc", "bank_weight": weight})
        trainer.task.model.method.ready.fill_(1.0)  # type: ignore[union-attr,operator]
        values = trainer.step.run(Batch(torch.arange(8)), torch.tensor(0), last=False)
        assert trainer.step.names[-1] == "bank"
        assert (values[-2] > 0) == (weight > 0)
        grads.append(trainer.task.model.image_head.last.weight.grad.clone())  # type: ignore[union-attr]
    assert not torch.allclose(grads[0], grads[1])


# ------------------------------------------------------------------------------------------------ streamed photos


@pytest.fixture(scope="module")
def noisy_photos(photos: PhotoSet) -> PhotoSet:
    return apply_noise(photos, make_noise("derange-captions", photos.caption_image, ratio=0.5, seed=0))


def npc_trainers(photos: PhotoSet, device: str) -> tuple[Trainer, Trainer]:
    """In memory and streamed: four epochs of four steps, the first to warm up; crops and flips from 40 pixels."""
    towers = {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 1}
    both = [
        make(photos, NPC, reading=DataConfig(cache_gb=cache, photo_size=40, workers=2), device=device, epochs=4,
             towers=towers, lr=3e-3)
        for cache in (1.0, 0.0)
    ]  # fmt: skip
    assert [isinstance(trainer.task.loader.images, torch.Tensor) for trainer in both] == [True, False]
    return both[0], both[1]


def test_streamed_neighbours_train_the_same_weights(noisy_photos: PhotoSet) -> None:
    kept, streamed = npc_trainers(noisy_photos, "cpu")
    one, other = kept.run(progress=False), streamed.run(progress=False)
    assert_same_weights(one.model, other.model)
    rows = [[{**row, "steps_per_second": 0} for row in run.history] for run in (one, other)]
    assert rows[0] == rows[1]
    assert torch.equal(one.model.method.weight, other.model.method.weight)
    assert bool((other.model.method.weight < 1).any()), "the neighbours made a difference"


@pytest.mark.gpu
def test_streamed_neighbours_train_the_same_on_a_gpu(noisy_photos: PhotoSet) -> None:
    """A GPU's sums differ in their last digits; the first epochs must agree, with neighbours in use from the second."""
    one, other = (
        [row["loss"] for row in trainer.run(progress=False).history if "loss" in row]
        for trainer in npc_trainers(noisy_photos, "cuda")
    )
    assert len(one) == 16
    assert one[:8] == pytest.approx(other[:8], rel=1e-3)
