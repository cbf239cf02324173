"""`vacsr index add` killed at any moment: all that was committed is there, whole, and the same command goes on."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from vacsr.data import PairSet, load_pairs
from vacsr.scoring import PairScorer
from vacsr.search import open_index

SPEC = "synthetic:images=120,per_image=1"
BATCH = 3

# The command itself, in a process of its own for each line of input; only, after each call that adds has returned, it
# says which ids are stored now. The processes are forks of one that has imported everything: a start takes seconds.
HOST = """
import json, os, sys
from vacsr import cli, search
from vacsr.data import load_pairs
from vacsr.scoring import PairScorer
from vacsr.search import fill
from vacsr.search.local import ExactIndex

def say(*words):  # in one write, so that a kill leaves no half of a line
    os.write(1, (" ".join(words) + "\\n").encode())

plain = ExactIndex.add
def add(self, ids, *rest, **options):
    say("begin", str(os.getpid()))
    result = plain(self, ids, *rest, **options)
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
    stored: list[str]
    code: int


@pytest.fixture(scope="module")
def host() -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # a fork has only one thread
    with subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env,
    ) as process:  # fmt: skip
        yield process
        process.kill()


def run(host: subprocess.Popen[str], command: list[str], *, kill_after: float | None = None) -> Ended:
    """``kill_after``: seconds from when it begins to write."""
    assert host.stdin is not None
    assert host.stdout is not None
    print(json.dumps(command), file=host.stdin, flush=True)
    stored: list[str] = []
    timer: threading.Timer | None = None
    for line in host.stdout:
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


def read_all(spec: str) -> tuple[list[str], torch.Tensor]:
    """Ids and vectors. Nobody has the index open afterwards, so SQLite's log is gone too."""
    with closing(open_index(spec)) as index:
        hits = index.search(torch.ones(1, index.dim), 16384)
        assert len(hits.ids[0]) == len(index)
        return list(hits.ids[0]), hits.vectors[0].clone()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.long)])
def test_kills(host: subprocess.Popen[str], models: dict[str, Path], tmp_path: Path, kills: int) -> None:
    """Kill after kill on the same index until it is full, then on a new one. The truth is kept beside it."""
    draw, spec, model = random.Random(kills), f"exact:{tmp_path / 'i'}", models["features"]
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
        ended = run(host, [*command, *again], kill_after=draw.uniform(0, 0.5))
        assert ended.code in (0, -signal.SIGKILL)
        killed += ended.code != 0
        stored |= set(ended.stored)
        ids, vectors = read_all(spec)
        assert len(ids) == len(set(ids)), "no id twice"
        assert stored <= set(ids), "nothing that was committed is lost"
        assert len(set(ids) - stored) in (0, BATCH), "of a batch that was being written all is there or nothing"
        torch.testing.assert_close(vectors, truth[[row_of[name] for name in ids]], atol=1e-6, rtol=0)
        stored = set(ids)
        if len(ids) == len(row_of):
            shutil.rmtree(tmp_path / "i")
            stored = set()
    assert run(host, command).code == 0
    assert set(read_all(spec)[0]) == set(row_of)
    left = sorted(path.name.partition("-")[0] for path in (tmp_path / "i").iterdir())
    assert left == ["items", "vectors", "writer.lock"], "nothing else is left over"
