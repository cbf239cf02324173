"""Small recipes, and processes that train and may be killed."""

from __future__ import annotations

import json
import multiprocessing
import runpy
import socket
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from vacsr.config import Recipe
from vacsr.config.io import recipe_from
from vacsr.files import read_tensors

DRIVER = Path(__file__).with_name("driver.py")
BASE: dict[str, Any] = {
    "data": {"pairs": "synthetic:images=29,held_out=12,per_image=2"},  # 58 captions: 7 batches and a rest
    "backbone": {"head": {"dim": 8}},
    "train": {"epochs": 3, "batch_size": 8, "log_every": 1, "checkpoint_every": 3, "device": "cpu"},
}


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
        given = {**job, "output": str(output)} | ({"argv": [str(part) for part in argv]} if argv else {})
        options = {"init_globals": {"JOB": given}, "run_name": "__main__"}
        process = self.context.Process(target=runpy.run_path, args=(str(DRIVER),), kwargs=options)
        process.start()
        return Started(process, output)

    def __call__(self, *argv: object, **job: Any) -> Finished:
        return self.start(*argv, **job).wait()

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

    def same(self, other: Outcome) -> bool:
        """Weights bit for bit, rows figure for figure."""
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


@pytest.fixture(scope="session")
def outcome() -> type[Outcome]:
    """Outcome, for test files that cannot import this one."""
    return Outcome
