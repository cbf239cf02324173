"""The loop around the steps: order, choice of weights, evaluation, and what is refused."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.config import TrainConfig
from vacsr.data import PairSet
from vacsr.errors import ConfigError, DataError, UsageError
from vacsr.evaluate.report import dev_rsum
from vacsr.files import read_tensors, write_tensors
from vacsr.methods.base import ParamGroup
from vacsr.methods.sigmoid import Sigmoid, SigmoidConfig
from vacsr.objective import LossTerms
from vacsr.train import Run, fit
from vacsr.train.callbacks import Callback
from vacsr.train.checkpoint import FILE
from vacsr.train.data import batch_order
from vacsr.train.optim import build_optimizer
from vacsr.train.trainer import Task, Trainer

from .conftest import FEATURES, assert_same_weights


def run(pairs: PairSet, dev: PairSet | None = None, *, method: Any = "sigmoid", **fields: Any) -> Run:
    config = TrainConfig(**{"batch_size": 8, "device": "cpu", "epochs": 4, "log_every": 1, "lr": 0.01, **fields})
    return fit(method, pairs, config, dev=dev, backbone=FEATURES, progress=False)


def test_the_order_of_an_epoch() -> None:
    """A permutation without the rest that fills no batch: a function of seed and epoch, for seeds of any size."""

    def order(seed: int, epoch: int, count: int = 40) -> list[int]:
        batches = list(batch_order(count, batch=8, seed=seed, epoch=epoch))
        assert [len(rows) for rows in batches] == [8] * 5
        return torch.cat(batches).tolist()

    state = torch.get_rng_state()
    assert sorted(order(3, 2)) == list(range(40))
    assert len(set(order(3, 2, count=43)) & set(range(43))) == 40
    for seeds in (range(4), (2**62, 2**62 + 1, 2**63 - 2, 2**63 - 1)):
        assert len({tuple(order(seed, epoch)) for seed in seeds for epoch in range(4)}) == 16
    assert order(1, 2) == order(1, 2)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"


@pytest.mark.parametrize(("every", "epochs"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (0, [])])
def test_how_often_dev_is_looked_at(pairs: PairSet, dev: PairSet, every: int, epochs: list[int]) -> None:
    """The last epoch always counts; training is the same as without."""
    done, without = (run(pairs, split, epochs=5, eval_every=every, select="last") for split in (dev, None))
    assert [row["epoch"] for row in done.history if "dev_rsum" in row] == epochs
    assert_same_weights(without.model, done.model)
    assert without.state.best is None


def test_the_rows_of_the_log(pairs: PairSet) -> None:
    """One every so many steps with the rate of the schedule, and one per epoch."""
    done = run(pairs, epochs=2, log_every=2, lr=0.01, schedule="step", decay_at=0.5, warmup_steps=4)
    steps = [row for row in done.history if "loss" in row]
    assert [row["step"] for row in steps] == [0, 2, 4, 6, 8]
    assert [row["epoch"] for row in steps] == [1, 1, 1, 2, 2]
    assert [row["lr"] for row in steps] == pytest.approx([0.0025, 0.0075, 0.01, 0.001, 0.001])
    ends = [row for row in done.history if "steps_per_second" in row]
    assert [(row["step"], row["epoch"]) for row in ends] == [(4, 1), (9, 2)]


def test_a_method_may_be_an_object_or_a_config(pairs: PairSet) -> None:
    by_name, by_config = run(pairs), run(pairs, method=SigmoidConfig())
    assert by_name.history[0]["loss"] == by_config.history[0]["loss"]
    assert run(pairs, method=Sigmoid(SigmoidConfig(), dim=8)).state.step == 20


def test_what_is_refused(pairs: PairSet) -> None:
    same = replace(pairs, caption_image=torch.full_like(pairs.caption_image, 3))
    with pytest.raises(DataError, match=rf"'{pairs.image_ids[3]}'.*give captions of at least two images"):
        run(same)
    with pytest.raises(DataError, match=r"set train\.batch_size=20"):
        run(pairs, batch_size=64)
    with pytest.raises(DataError, match=r"set train\.batch_size=2 "):
        run(pairs, accumulate=8)
    with pytest.raises(ConfigError, match="did you mean 'sigmoid'"):
        run(pairs, method="sigmid")
    with pytest.raises(UsageError, match="derive it from"):
        run(pairs, method=torch.nn.Linear(2, 2))


CONFIG = TrainConfig(batch_size=8, device="cpu", epochs=2, log_every=1)


def test_a_folder_with_a_run_is_refused_without_resume(pairs: PairSet, tmp_path: Path) -> None:
    fit("sigmoid", pairs, CONFIG, backbone=FEATURES, out=tmp_path, progress=False)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="resume=True"):
        fit("infonce", pairs, CONFIG, backbone=FEATURES, out=str(tmp_path), progress=False)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    again = fit("sigmoid", pairs, CONFIG, backbone=FEATURES, out=tmp_path, resume=True, progress=False)
    assert (again.state.step, again.history) == (10, [])


@pytest.mark.parametrize(("precision", "inside"), [("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")])
def test_the_precision_of_products_is_the_runs_own(
    pairs: PairSet, dev: PairSet, monkeypatch: pytest.MonkeyPatch, precision: str, inside: str
) -> None:
    """Also while it evaluates; afterwards, even after an error, torch's setting is what it was."""
    seen: list[str] = []

    def evaluate(*args: Any) -> float:
        seen.append(torch.get_float32_matmul_precision())
        if len(seen) == 3:
            raise RuntimeError("broken")
        return dev_rsum(*args)

    monkeypatch.setattr("vacsr.train.retrieval.dev_rsum", evaluate)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(RuntimeError, match="broken"):
            run(pairs, dev, precision=precision)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == [inside] * 3


# ------------------------------------------------------------------------------------------------ tasks and callbacks


class LineTask(Task):
    """The smallest task: fit a slope to four points, one per batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.device = torch.device("cpu")
        self.steps_per_epoch = 4
        self.description = {"points": 4}

    def build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(
            [ParamGroup("all", list(self.model.parameters()))], "sgd", lr=0.1, weight_decay=0.0, momentum=0.9
        )

    def learning_rate(self, step: int) -> float:
        return 0.1 / (step + 1)

    def batches(self, epoch: int, start: int) -> Iterator[float]:
        return iter([float(number + epoch) for number in range(start, 4)])

    def loss(self, batch: float, step: torch.Tensor) -> LossTerms:
        error = (self.model(torch.tensor([batch])) - 2 * batch).square().sum()
        return LossTerms(error, {"error": error})

    def batch_ids(self, step: int) -> list[str]:
        return [f"point {step}"]


class MovingAverage(Callback):
    """Of the weights, as an example of a callback with state."""

    name = "average"

    def __init__(self) -> None:
        self.mean = torch.zeros(1, 1)
        self.calls: list[str] = []

    def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
        self.calls.append(f"epoch {epoch}")

    def on_step(self, trainer: Trainer, step: int) -> None:
        self.calls.append(f"step {step}")
        self.mean.lerp_(trainer.task.model.weight.detach(), 0.1)  # type: ignore[operator]

    def on_train_end(self, trainer: Trainer) -> None:
        self.calls.append("end")

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        if state:
            self.mean.copy_(state["mean"])


LINE = TrainConfig(epochs=3, batch_size=2, device="cpu", log_every=1, checkpoint_every=2, clip_norm=0.0)


def test_any_task_trains_and_callbacks_are_resumed_with_it(tmp_path: Path) -> None:
    average = MovingAverage()
    whole = Trainer(LineTask(), LINE, callbacks=[average])
    whole.run(progress=False)
    assert average.calls[:6] == ["epoch 0", "step 0", "step 1", "step 2", "step 3", "epoch 1"]
    assert average.calls[-1] == "end"

    class Stop(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(LineTask(), LINE, tmp_path, callbacks=[MovingAverage(), Stop()]).run(progress=False)
    again = MovingAverage()
    resumed = Trainer(LineTask(), LINE, tmp_path, callbacks=[again])
    resumed.resume()
    assert resumed.state.step == 6
    resumed.run(progress=False)
    assert again.calls[:2] == ["epoch 1", "step 6"]
    assert torch.equal(again.mean, average.mean)
    assert torch.equal(resumed.task.model.weight, whole.task.model.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["state", "rng", "model", "optimizer", "shape"])
def test_a_damaged_checkpoint_is_a_data_error(tmp_path: Path, damage: str) -> None:
    Trainer(LineTask(), LINE, tmp_path).run(progress=False)
    path = tmp_path / "checkpoint" / FILE
    tensors, metadata = read_tensors(path)
    if damage == "state":
        metadata["state"] = '{"step": 1, "extra": 2}'
    elif damage == "shape":
        tensors = {name: x.flatten()[:0] if name.startswith("model.") else x for name, x in tensors.items()}
    else:
        tensors = {name.replace(f"{damage}.", f"{damage}.x."): x for name, x in tensors.items()}
    write_tensors(path, tensors, metadata=metadata)
    with pytest.raises(DataError, match="start the run again"):
        Trainer(LineTask(), LINE, tmp_path).resume()


@pytest.mark.parametrize(("metrics", "best"), [((1.0, 3.0, 3.0), 2), ((2.0, 2.0, 2.0), 1), ((1.0, 2.0, 3.0), 3)])
@pytest.mark.parametrize("select", [True, False])
def test_of_equally_good_epochs_the_first_is_kept(metrics: tuple[float, ...], best: int, select: bool) -> None:
    class Judged(LineTask):
        metric, eval_every, select_best = "score", 1, select

        def evaluate(self) -> dict[str, float]:
            weights.append(self.model.weight.detach().clone())  # type: ignore[union-attr,operator]
            return {"score": metrics[len(weights) - 1]}

    weights: list[torch.Tensor] = []
    run = Trainer(Judged(), LINE).run(progress=False)
    assert (run.state.best, run.state.best_step) == (max(metrics), 4 * best)
    assert torch.equal(run.model.weight, weights[best - 1 if select else 2])
    assert not torch.equal(weights[0], weights[1])


def test_progress_says_one_line_per_epoch(capfd: pytest.CaptureFixture[str]) -> None:
    Trainer(LineTask(), LINE).run(progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"train: epoch {epoch}/3" for epoch in (1, 2, 3)]
