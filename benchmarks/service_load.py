"""Many clients at once against the service: errors, times, throughput, memory.

    python benchmarks/service_load.py --seconds 60 --clients 64 [--rest MS] [--json FILE]

It trains small towers on drawn pictures for a few steps, fills an exact index, starts `vacsr serve` as a process of its
own, and asks it from this one: three texts to one photo of the index and, now and then, a score or a similar photo. The
figures are the service's with a small model: what is measured is HTTP, queue and batches. Memory is the service's own
(anonymous pages: without the files that it maps), at ten moments of the load, and once more after a rest.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from _common import parser
from vacsr import BackboneConfig, TrainConfig, fit
from vacsr.data import load_pairs
from vacsr.files import write_json
from vacsr.scoring import PairScorer
from vacsr.search import embedding_provenance, open_index
from vacsr.search.fill import fill_index

LOOKS = 10
PHOTOS = "scenes:images=400,held_out=50,per_image=5,size=64"


class Ready(NamedTuple):
    """What the service needs."""

    model: Path
    index: str
    ids: tuple[str, ...]
    captions: tuple[str, ...]
    picture: str  # in base64


class Tally(NamedTuple):
    """What came back."""

    seconds: dict[str, list[float]]  # by path, of answers with status 200
    statuses: Counter[str]
    faults: Counter[str]  # connections that broke
    mib: list[float]  # of the service, as time goes on


def prepare(folder: Path) -> Ready:
    """A model and an index of its pictures."""
    photos = load_pairs(PHOTOS, split="all")
    run = fit(
        "vacsr", photos, TrainConfig(epochs=1, batch_size=64, device="cpu"), backbone=BackboneConfig(spec="tiny:")
    )
    run.model.save_pretrained(folder / "model")
    scorer, name = PairScorer(run.model, device="cpu"), f"exact:{folder / 'index'}"
    index = open_index(name, dim=run.model.dim, provenance=embedding_provenance(run.model), create=True)
    fill_index(index, scorer, photos, source=PHOTOS)
    index.close()
    png = io.BytesIO()
    photos.photos.open(0).save(png, "PNG")
    picture = base64.b64encode(png.getvalue()).decode()
    return Ready(folder / "model", name, photos.image_ids, photos.captions or (), picture)


def start(ready: Ready) -> tuple[subprocess.Popen[str], int]:
    """The service, and its port."""
    command = [sys.executable, "-c", "from vacsr.cli import main; main()", "serve", str(ready.model)]
    command += ["--index", ready.index, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = re.search(r":(\d+)\s*$", process.stdout.readline())
    if port is None:
        raise SystemExit("the service did not start")
    return process, int(port[1])


async def ask(port: int, streams: list, method: str, path: str, body: bytes) -> int:
    """One request over a connection that is kept; its status."""
    if not streams:
        streams.extend(await asyncio.open_connection("127.0.0.1", port))
    reader, writer = streams
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    await reader.readexactly(int(answer.partition("content-length: ")[2].split("\r")[0]))
    if "connection: close" in answer:
        writer.close()
        streams.clear()
    return int(answer.split()[1])


async def client(number: int, port: int, ready: Ready, tally: Tally, *, until: float, rest: float) -> None:
    """One after the other, until the time is over."""
    chance, streams = np.random.default_rng(number), []
    while time.perf_counter() < until:
        pick = chance.random()
        text = ready.captions[chance.integers(len(ready.captions))]
        name = ready.ids[chance.integers(len(ready.ids))]
        method, path, body = "POST", "/search", json.dumps({"text": text, "k": 10}).encode()
        if pick < 0.25:
            method, path, body = "GET", f"/photo/{name}", b""
        elif pick < 0.30:
            path, body = "/score", json.dumps({"texts": [text], "ids": [name]}).encode()
        elif pick < 0.35:
            body = json.dumps({"image": ready.picture, "k": 10}).encode()
        started = time.perf_counter()
        try:
            status = await asyncio.wait_for(ask(port, streams, method, path, body), 60)
        except (OSError, EOFError, TimeoutError) as error:
            tally.faults[type(error).__name__] += 1
            streams.clear()
            continue
        tally.statuses[str(status)] += 1
        if status == 200:
            tally.seconds.setdefault(path.partition("/photo/")[1] or path, []).append(time.perf_counter() - started)
        if rest:
            await asyncio.sleep(rest)


async def load(port: int, ready: Ready, *, clients: int, seconds: float, rest: float, pid: int) -> Tally:
    """All clients at once, while memory is looked at ten times."""
    tally = Tally({}, Counter(), Counter(), [])
    began = time.perf_counter()
    until = began + seconds

    async def watch() -> None:
        for moment in range(1, LOOKS + 1):
            await asyncio.sleep(max(0.0, began + seconds * moment / LOOKS - time.perf_counter()))
            tally.mib.append(memory(pid))

    asked = (client(number, port, ready, tally, until=until, rest=rest) for number in range(clients))
    await asyncio.gather(watch(), *asked)
    return tally


def memory(pid: int) -> float:
    """MiB that a process holds of its own, by Linux."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024


def summary(tally: Tally, *, seconds: float, clients: int, rest: float, memory: dict[str, object]) -> dict[str, object]:
    """Rates and times of the answers, and what went wrong."""
    total = sum(map(len, tally.seconds.values()))
    cuts = {path: np.percentile(times, [50, 95, 99]) * 1000 for path, times in tally.seconds.items()}
    ms = {path: dict(zip(("p50", "p95", "p99"), cut.round(1).tolist(), strict=True)) for path, cut in cuts.items()}
    return {
        "clients": clients, "rest_ms": rest * 1000, "seconds": seconds, "answers": total,
        "per_second": round(total / seconds, 1), "statuses": dict(tally.statuses), "faults": dict(tally.faults),
        "ms": ms, "mib": memory, "torch_threads": torch.get_num_threads(),
    }  # fmt: skip


def main() -> None:
    """Prepare, warm up, load, report."""
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--clients", type=int, default=64)
    options.add_argument("--rest", type=float, default=0, metavar="MS", help="a client's pause between two requests")
    args = options.parse_args()
    how = {"clients": args.clients, "rest": args.rest / 1000}
    with tempfile.TemporaryDirectory() as folder:
        ready = prepare(Path(folder))
        process, port = start(ready)
        try:
            asyncio.run(load(port, ready, **how, seconds=5, pid=process.pid))
            first = memory(process.pid)
            tally = asyncio.run(load(port, ready, **how, seconds=args.seconds, pid=process.pid))
            time.sleep(5)
            last = memory(process.pid)
        finally:
            process.terminate()
            code = process.wait(60)
    mib = {"warm": round(first, 1), "load": [round(value, 1) for value in tally.mib], "rested": round(last, 1)}
    result = summary(tally, seconds=args.seconds, **how, memory=mib)
    print(json.dumps({**result, "exit_code": code}, indent=2))
    if args.json:
        write_json(args.json, result)
    if tally.faults or set(tally.statuses) != {"200"}:
        raise SystemExit("there were errors")


if __name__ == "__main__":
    main()
