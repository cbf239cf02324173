"""`vacsr index add` killed at any moment: all that was committed is there, whole, and the same command goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import PairSet, load_pairs
from vacsr.scoring import PairScorer
from vacsr.search import open_index
from vacsr.search.manifest import read_manifest

SPEC = "synthetic:images=120,per_image=1"
BATCH = 3

# The command itself, in a process of its own for each line of input; only, after each call that adds has returned, it
# says which ids are stored now. The processes are forks of one that has imported everything: a start takes seconds.
HOST = """
import json, os, sys
from vacsr import cli, search
from vacsr.data import load_pairs
from vacsr.scoring import PairScorer
from vacsr.search import filling, progress
from vacsr.search.exact import ExactIndex

def say(*words):  # in one write, so that a kill leaves no half of a line
    os.write(1, (" ".join(words) + "\\n").encode())

plain = ExactIndex.add
def add(self, ids, vectors, metadata=None):
    say("begin", str(os.getpid()))
    result = plain(self, ids, vectors, metadata)
    say("stored", *ids)
    return result
ExactIndex.add = add
for line in sys.stdin:
    sys.argv = ["vacsr", *json.loads(line)]
    child = os.fork()
    if not child:
        try:
            cli.main()
        except SystemExit as left:
            sys.stdout.flush()
            os._exit(left.code or 0)
    say("\\nended", str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


class Ended(NamedTuple):
    """What a command had said when it ended."""

    stored: list[str]
    code: int


class Host:
    """Runs commands, and kills them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def run(self, command: Sequence[str], *, kill_after: float | None = None) -> Ended:
        """``kill_after``: seconds from when it begins to write."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(list(command)), file=self.process.stdin, flush=True)
        stored: list[str] = []
        timer: threading.Timer | None = None
        for line in self.process.stdout:
            word, *rest = line.split() or [""]
            if word == "ended":
                if timer is not None:
                    timer.cancel()
                return Ended(stored, int(rest[0]))
            if word == "stored":
                stored += rest
            if word == "begin" and timer is None and kill_after is not None:
                timer = threading.Timer(kill_after, os.kill, (int(rest[0]), signal.SIGKILL))
                timer.start()
        raise AssertionError("the host ended")


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # a fork has only one thread
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as process:
        yield Host(process)
        process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = BackboneConfig(head=HeadConfig(dim=8))
    run = fit(
        "vacsr", load_pairs(SPEC, split="train"), TrainConfig(epochs=1, batch_size=64, device="cpu"), backbone=small
    )
    folder = tmp_path_factory.mktemp("model") / "m"
    run.model.save_pretrained(folder)
    return folder


def check_kills(host: Host, model: Path, folder: Path, *, kills: int, seed: int) -> None:
    """Kill after kill on the same index until it is full, then on a new one. The truth is kept beside it."""
    draw, spec = random.Random(seed), f"exact:{folder / 'i'}"
    pairs = load_pairs(SPEC, split="train")
    assert isinstance(pairs, PairSet)
    truth = PairScorer.from_pretrained(model, device="cpu").embed_images(pairs.images).mean
    row_of = {name: row for row, name in enumerate(pairs.image_ids)}
    command = ["index", "add", spec, "--run", str(model), "--pairs", SPEC, "--split", "train", "--device", "cpu"]
    command += ["--batch", str(BATCH)]
    stored: set[str] = set()
    killed = 0
    while killed < kills:
        again = ["--replace"] if draw.random() < 0.3 else []
        ended = host.run([*command, *again], kill_after=draw.uniform(0, 1.0))
        assert ended.code in (0, -signal.SIGKILL)
        killed += ended.code != 0
        stored |= set(ended.stored)
        index = open_index(spec)
        hits = index.search(torch.ones(1, 8), 16384)
        found = set(hits.ids[0])
        assert len(hits.ids[0]) == len(found) == len(index), "no id twice"
        assert stored <= found, "nothing that was committed is lost"
        assert len(found - stored) in (0, BATCH), "of a batch that was being written all is there or nothing"
        torch.testing.assert_close(hits.vectors[0], truth[[row_of[name] for name in hits.ids[0]]], atol=1e-6, rtol=0)
        stored = found
        if len(found) == len(row_of):
            shutil.rmtree(folder / "i")
            stored = set()
    assert host.run(command).code == 0
    assert open_index(spec).known(pairs.image_ids) == [True] * len(row_of)
    files = {path.name for path in (folder / "i").iterdir()}
    assert files - {"manifest.json", "writer.lock"} == read_manifest(folder / "i").files(), "nothing is left over"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_kills(host: Host, model: Path, tmp_path: Path) -> None:
    check_kills(host, model, tmp_path, kills=5, seed=0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_kills(host: Host, model: Path, tmp_path: Path) -> None:
    check_kills(host, model, tmp_path, kills=50, seed=1)
