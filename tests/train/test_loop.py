"""The loop around the steps: order, choice of weights, evaluation, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.config import BackboneConfig, HeadConfig, SigmoidConfig, TrainConfig
from vacsr.data import PairSet, load_pairs
from vacsr.errors import ConfigError, DataError, UsageError
from vacsr.evaluate.retrieval import dev_rsum
from vacsr.methods.sigmoid import Sigmoid
from vacsr.scoring import PairScorer
from vacsr.train import Run, fit
from vacsr.train.loop import batch_order

BACKBONE = BackboneConfig(head=HeadConfig(dim=8))
SPEC = "synthetic:images=20,held_out=15,per_image=2"


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    return load_pairs(SPEC, split="train")


@pytest.fixture(scope="module")
def dev() -> PairSet:
    return load_pairs(SPEC, split="dev")


def run(pairs: PairSet, dev: PairSet | None = None, *, method: Any = "sigmoid", **fields: Any) -> Run:
    config = TrainConfig(**{"batch_size": 8, "device": "cpu", "epochs": 4, "log_every": 1, "lr": 0.01, **fields})
    return fit(method, pairs, config, dev=dev, backbone=BACKBONE, progress=False)


def test_an_epoch_is_a_permutation_less_its_rest() -> None:
    order = list(batch_order(43, batch=8, seed=3, epoch=2))
    assert [len(rows) for rows in order] == [8] * 5
    seen = torch.cat(order).tolist()
    assert len(set(seen)) == 40
    assert set(seen) <= set(range(43))
    assert torch.cat(list(batch_order(40, batch=8, seed=3, epoch=2))).sort().values.tolist() == list(range(40))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def whole(seed: int, epoch: int) -> list[int]:
        return torch.cat(list(batch_order(40, batch=8, seed=seed, epoch=epoch))).tolist()

    state = torch.get_rng_state()
    assert whole(0, 1) == whole(0, 1)
    assert len({tuple(whole(seed, epoch)) for seed in range(3) for epoch in range(4)}) == 12
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"


def test_the_rest_of_one_epoch_comes_round_in_others() -> None:
    left_out = [
        set(range(43)) - set(torch.cat(list(batch_order(43, batch=8, seed=0, epoch=e))).tolist()) for e in (0, 1)
    ]
    assert left_out[0] != left_out[1]


def test_the_same_seed_gives_the_same_run(pairs: PairSet) -> None:
    torch.manual_seed(1)
    first = run(pairs)
    torch.manual_seed(2)
    second, other = run(pairs), run(pairs, seed=1)
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert [r.get("loss") for r in first.history] == [r.get("loss") for r in second.history]
    assert first.history[0]["loss"] != other.history[0]["loss"]


def test_training_learns(pairs: PairSet) -> None:
    losses = [row["loss"] for row in run(pairs, epochs=10).history if "loss" in row]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_best_keeps_the_best_dev_weights_and_last_the_last(pairs: PairSet, dev: PairSet) -> None:
    best, last = run(pairs, dev, epochs=8), run(pairs, dev, epochs=8, select="last")
    curve = [row["dev_rsum"] for row in best.history if "dev_rsum" in row]
    assert curve == [row["dev_rsum"] for row in last.history if "dev_rsum" in row]
    assert len(curve) == 8
    assert curve[-1] < max(curve), "the example needs a best epoch before the last"
    assert best.state.best == max(curve)
    assert best.state.best_step == 5 * (curve.index(max(curve)) + 1), "the first of equals"
    for done, expected in ((best, max(curve)), (last, curve[-1])):
        assert dev_rsum(PairScorer(done.model, device="cpu").score_set(dev), dev) == expected


def test_how_often_dev_is_looked_at(pairs: PairSet, dev: PairSet) -> None:
    def epochs(every: int) -> list[int]:
        done = run(pairs, dev, epochs=5, eval_every=every)
        assert sum("steps_per_second" in row for row in done.history) == 5
        return [row["epoch"] for row in done.history if "dev_rsum" in row]

    assert epochs(1) == [1, 2, 3, 4, 5]
    assert epochs(2) == [2, 4, 5], "the last epoch always counts"
    assert epochs(0) == []


def test_evaluating_does_not_change_training(pairs: PairSet, dev: PairSet) -> None:
    with_dev, without = run(pairs, dev, select="last", method="vacsr"), run(pairs, method="vacsr")
    for name, tensor in without.model.state_dict().items():
        assert torch.equal(tensor, with_dev.model.state_dict()[name]), name
    assert without.state.best is None


def test_a_log_row_every_so_often(pairs: PairSet) -> None:
    done = run(pairs, epochs=3, log_every=4)
    assert [row["step"] for row in done.history if "loss" in row] == [0, 4, 8, 12]
    assert [row["step"] for row in done.history if "loss" not in row] == [4, 9, 14]


def test_the_logged_learning_rate_follows_the_schedule(pairs: PairSet) -> None:
    done = run(pairs, epochs=2, lr=0.01, schedule="step", decay_at=0.5, warmup_steps=2)
    rates = [row["lr"] for row in done.history if "lr" in row]
    assert rates == pytest.approx([0.005] + [0.01] * 4 + [0.001] * 5)


def test_a_finished_run_is_ready_to_score(pairs: PairSet) -> None:
    done = run(pairs)
    assert done.method is done.model
    assert not done.model.training
    assert not done.interrupted
    assert done.folder is None


def test_a_method_may_be_an_object_or_a_config(pairs: PairSet) -> None:
    by_name, by_config = run(pairs), run(pairs, method=SigmoidConfig())
    assert by_name.history[0]["loss"] == by_config.history[0]["loss"]
    assert run(pairs, method=Sigmoid(SigmoidConfig())).state.step == 20


def test_what_is_refused(pairs: PairSet) -> None:
    with pytest.raises(DataError, match=r"40 captions do not fill one batch of 64 — set train\.batch_size=20"):
        run(pairs, batch_size=64)
    with pytest.raises(DataError, match=r"one optimiser step of 8 batches of 8 — set train\.batch_size=2 "):
        run(pairs, accumulate=8)
    with pytest.raises(ConfigError, match=r"unknown method 'sigmid' \(did you mean 'sigmoid'"):
        run(pairs, method="sigmid")
    with pytest.raises(UsageError, match="Linear is not a method"):
        run(pairs, method=torch.nn.Linear(2, 2))


def test_a_fresh_run_in_an_old_folder_logs_afresh(pairs: PairSet, tmp_path: Path) -> None:
    config = TrainConfig(batch_size=8, device="cpu", epochs=1, log_every=1)
    for _ in range(2):
        fit("sigmoid", pairs, config, backbone=BACKBONE, out=tmp_path, progress=False)
        assert len((tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 6
