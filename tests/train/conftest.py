"""Small data, models and recipes; trainers on them, and processes that train and may be killed."""

from __future__ import annotations

import json
import multiprocessing
import runpy
import socket
import time
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from vacsr.config import BackboneConfig, DataConfig, HeadConfig, Recipe, TrainConfig
from vacsr.config.io import method_config, recipe_from
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.files import read_tensors
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.trainer import Trainer

FEATURES = BackboneConfig(head=HeadConfig(dim=8))
TINY = BackboneConfig(spec="tiny:width=16,depth=2,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
DRIVER = Path(__file__).with_name("driver.py")
BASE: dict[str, Any] = {
    "data": {"pairs": "synthetic:images=29,held_out=12,per_image=2"},  # 58 captions: 7 batches and a rest
    "backbone": {"head": {"dim": 8}},
    "train": {"epochs": 3, "batch_size": 8, "log_every": 1, "checkpoint_every": 3, "device": "cpu"},
}
NPC = {"name": "npc", "warmup": 0.25, "threshold": 0.6, "look_ahead": 0.1}
NPC_ON_PHOTOS: dict[str, Any] = {
    "data.pairs": "scenes:images=16,held_out=6,per_image=2,size=32",
    "data.noise.ratio": 0.5,
    "backbone.spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
    "method": NPC,
    "train.epochs": 4,
    "train.towers": {"image_lr": 0.5, "text_lr": 0.5, "freeze_image": 1},
    "train.checkpoint_every": 5,
}


@pytest.fixture(scope="session")
def pairs() -> PairSet:
    """40 captions of 20 images, as features."""
    return load_pairs("synthetic:images=20,held_out=15,per_image=2", split="train")


@pytest.fixture(scope="session")
def dev() -> PairSet:
    return load_pairs("synthetic:images=20,held_out=15,per_image=2", split="dev")


@pytest.fixture(scope="session")
def photos() -> PhotoSet:
    """32 captions of 16 pictures."""
    return load_pairs("scenes:images=16,held_out=6,per_image=2,size=32", split="train")


@pytest.fixture(scope="session")
def dev_photos() -> PhotoSet:
    return load_pairs("scenes:images=16,held_out=6,per_image=2,size=32", split="dev")


def make(
    pairs: PairSet | PhotoSet,
    method: Any = "vacsr",
    *,
    backbone: BackboneConfig | None = None,
    reading: DataConfig | None = None,
    **fields: Any,
) -> Trainer:
    """A trainer of batches of eight on the processor."""
    config = TrainConfig.model_validate({"batch_size": 8, "device": "cpu", "epochs": 2, "log_every": 1, **fields})
    chosen = method_config(method) if isinstance(method, str | dict) else method
    backbone = backbone or (FEATURES if isinstance(pairs, PairSet) else TINY)
    return Trainer(RetrievalTask(chosen, pairs, config, backbone=backbone, reading=reading), config)


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """To the last bit."""
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


class Finished(NamedTuple):
    """A process that has ended."""

    code: int | None
    out: str
    err: str


class Started(NamedTuple):
    """A process that runs."""

    process: ForkServerProcess
    output: Path

    def wait(self) -> Finished:
        self.process.join(120)
        assert self.process.exitcode is not None, "the process hangs"
        out, err = (Path(f"{self.output}.{number}").read_text(encoding="utf-8") for number in (1, 2))
        return Finished(self.process.exitcode, out, err)


class Launcher:
    """Starts driver.py in processes that have vacsr imported already."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["vacsr.cli", "vacsr.train", "vacsr.compare", "torch._dynamo"])

    def start(self, *argv: object, **job: Any) -> Started:
        self.count += 1
        output = self.folder / f"output-{self.count}"
        settings = {**job, "output": str(output)} | ({"argv": [str(part) for part in argv]} if argv else {})
        options = {"init_globals": {"JOB": settings}, "run_name": "__main__"}
        process = self.context.Process(target=runpy.run_path, args=(str(DRIVER),), kwargs=options)
        process.start()
        return Started(process, output)

    def __call__(self, *argv: object, **job: Any) -> Finished:
        return self.start(*argv, **job).wait()

    def until_rows(self, path: Path, count: int, *argv: object) -> Started:
        """Start a command and return when its log has this many rows."""
        started = self.start(*argv)
        self.wait_for_rows(path, count)
        return started

    @staticmethod
    def wait_for_rows(path: Path, count: int) -> None:
        deadline = time.monotonic() + 60
        while not path.is_file() or len(path.read_text(encoding="utf-8").splitlines()) < count:
            assert time.monotonic() < deadline, "no rows come"
            time.sleep(0.01)

    def ranks(self, argvs: list[list[object]], **job: Any) -> list[Finished]:
        """One process a command line, all in one world; ``jobs`` adds to single ranks."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        each = job.pop("each", [{}] * len(argvs))
        started = []
        for rank, argv in enumerate(argvs):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(argvs))}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(self.start(*argv, env=env, **job, **each[rank]))
        return [one.wait() for one in started]

    def results(self, task: str, one: Path, two: Path, folder: Path) -> list[dict[str, Any]]:
        """What a task gives with recipe ``one`` in one process, then on each of two ranks with recipe ``two``."""
        whole, split = folder / "one", folder / "two"
        whole.mkdir()
        split.mkdir()
        done = [self(task=task, recipe=str(one), result=str(whole))]
        done += self.ranks([[], []], task=task, recipe=str(two), result=str(split))
        assert [part.code for part in done] == [0, 0, 0], done
        files = (whole / "rank-0.pt", split / "rank-0.pt", split / "rank-1.pt")
        return [torch.load(file, weights_only=True) for file in files]

    def assert_same_gradients(self, one: Path, two: Path, folder: Path, *, within: float) -> list[dict[str, Any]]:
        """Loss terms, and gradients within a share of the largest entry of their tensor."""
        whole, *ranks = self.results("gradients", one, two, folder)
        for rank in ranks:
            torch.testing.assert_close(rank["values"], whole["values"], rtol=1e-5, atol=1e-6)
            assert rank["grad"].keys() == whole["grad"].keys()
            for name, expected in whole["grad"].items():
                error = (rank["grad"][name] - expected).abs().max()
                assert error <= within * expected.abs().max().clamp_min(1e-3), name
                assert torch.equal(rank["grad"][name], ranks[0]["grad"][name]), name
        return [whole, *ranks]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("processes"))


def overlay(base: Mapping[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in dotted.items():
        section, _, rest = key.partition(".")
        result[section] = overlay(result.get(section, {}), {rest: value}) if rest else value
    return result


class Recipes:
    """Makes recipe files and recipes from dotted changes of BASE."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def file(self, changes: Mapping[str, Any] | None = None) -> Path:
        self.count += 1
        path = self.folder / f"recipe-{self.count}.yaml"
        path.write_text(yaml.safe_dump(overlay(BASE, changes or {})), encoding="utf-8")
        return path

    def recipe(self, changes: Mapping[str, Any] | None = None) -> Recipe:
        return recipe_from(overlay(BASE, changes or {}))


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Recipes:
    return Recipes(tmp_path_factory.mktemp("recipes"))


class Outcome(NamedTuple):
    """What a finished run must share with its uninterrupted twin."""

    weights: dict[str, torch.Tensor]
    rows: list[dict[str, Any]]
    report: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Outcome:
        weights, _ = read_tensors(folder / "model" / "model.safetensors")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row.pop("steps_per_second", None)
        return cls(weights, rows, json.loads((folder / "report.json").read_text(encoding="utf-8")))

    def close(self, other: Outcome, *, weights: float, rows: float) -> bool:
        """Weights within an absolute tolerance, rows within a relative one."""
        for name, tensor in other.weights.items():
            torch.testing.assert_close(self.weights[name], tensor, rtol=0, atol=weights, msg=name)
        assert [row.keys() for row in self.rows] == [row.keys() for row in other.rows]
        for row, expected in zip(self.rows, other.rows, strict=True):
            assert row == pytest.approx(expected, rel=rows, abs=1e-6)
        return True

    def same(self, other: Outcome) -> bool:
        """Weights bit for bit, rows number for number."""
        assert self.weights.keys() == other.weights.keys()
        for name, tensor in self.weights.items():
            assert torch.equal(tensor, other.weights[name]), name
        assert self.rows == other.rows
        assert self.report == other.report
        return True


class References:
    """Uninterrupted runs, one per recipe."""

    def __init__(self, launch: Launcher, recipes: Recipes, folder: Path) -> None:
        self.launch, self.recipes, self.folder = launch, recipes, folder
        self.known: dict[str, tuple[Path, Outcome]] = {}

    def __call__(self, changes: Mapping[str, Any]) -> tuple[Path, Outcome]:
        """The recipe file and what comes of it."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self.known:
            file, out = self.recipes.file(changes), self.folder / f"run-{len(self.known)}"
            done = self.launch("train", file, "--out", out)
            assert done.code == 0, done.err
            self.known[key] = file, Outcome.of(out)
        return self.known[key]


@pytest.fixture(scope="session")
def reference(launch: Launcher, recipes: Recipes, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(launch, recipes, tmp_path_factory.mktemp("references"))
