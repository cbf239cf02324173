"""Embed, score, audit and filter part by part with Ray Data, on one machine or a cluster.

A part is a shard, or a file of a folder of embeddings. Its results are files named after it, each written atomically,
and last ``NAME_stats.json`` with their sizes, counts, and a fingerprint of model, options and part. A part whose stats
fit is skipped, any other is done again. So the output has every part once, whichever process was killed and when.
"""

import glob
import json
import logging
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vacsr import __version__
from vacsr.backbones.images import Progress
from vacsr.config import BackboneConfig
from vacsr.data import PhotoSet, parse_spec, read_named, write_shards
from vacsr.data.arrow import write_table
from vacsr.data.features import folder_specs
from vacsr.data.formats import OnError
from vacsr.data.photos import content_fingerprint
from vacsr.data.shards import shard_paths
from vacsr.embed import Pooling, embed_pairs, open_encoder
from vacsr.errors import DataError, EnvironmentProblem, MissingExtra, NoSuchSplit, UsageError, VacsrError
from vacsr.files import make_folder, read_json, write_json
from vacsr.model import choose_device
from vacsr.scoring import PairScorer
from vacsr.search.audit import AuditRows, audit
from vacsr.search.audit_page import DUPLICATES, MISSING, PAGE, ROWS, WRONG, write_audit
from vacsr.search.filter import choose_captions, write_pairs
from vacsr.search.index import model_digest

TRIES = 5  # a part that ends its worker so often counts as broken
_OBJECT_STORE = 1 << 27  # bytes: only names and counts travel


class Part(NamedTuple):
    """One shard, or one file of embeddings."""

    name: str
    spec: str
    files: tuple[str, ...]  # that its results depend on
    kept: int = -1  # captions that a filter leaves; −1 before that is known


class Task(NamedTuple):
    """Work on a part, with the model; every worker makes its own."""

    fingerprint: str  # of what results depend on beside the part
    outputs: tuple[str, ...]  # paths in the output folder, {} for the name of the part
    run: Callable[[Part, Path], dict[str, float]]  # writes them, and returns counts


def parts_of(spec: str, out: Path) -> list[Part]:
    """The parts of ``shards:PATTERN`` or ``features:FOLDER``; ``out`` must be another folder than theirs."""
    parsed = parse_spec(spec)
    if parsed.scheme == "shards":
        specs = [replace(parsed, path=str(path)).absolute() for path in shard_paths(parsed.path)]
    elif parsed.scheme == "features" and parsed.location.is_dir():
        specs = [one.absolute() for one in folder_specs(parsed)]
    else:
        raise UsageError(f"{spec} has no parts — with --ray give shards:PATTERN, or the features:FOLDER of vacsr embed")
    name, times = Counter(one.location.stem for one in specs).most_common(1)[0]
    if times > 1 or any(one.location.parent == out.resolve() for one in specs):
        problem = f"{spec} has {times} parts named {name}" if times > 1 else f"{out} is the folder of the data"
        raise UsageError(f"{problem} — give each folder of parts an --out of its own")
    return [
        Part(one.location.stem, str(one), (one.path, *filter(None, [one.options.get("captions")]))) for one in specs
    ]


def do_part(task: Task, part: Part, out: Path) -> dict[str, float]:
    """The counts of a part: read where its results are complete and still fit, else computed."""
    stats, files = out / f"{part.name}_stats.json", [out / name.format(part.name) for name in task.outputs]
    versions = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, part.files)]
    fingerprint = content_fingerprint(task.fingerprint, json.dumps([part.kept, versions]))
    try:
        known = read_json(stats)
    except DataError:  # missing
        known = {}
    if (known.get("fingerprint"), known.get("bytes")) == (fingerprint, [_size(path) for path in files]):
        return {**known["counts"], "parts": 1, "done before": 1}
    started, tries = (time.time(), time.process_time()), known.get("tries", 0) + 1
    for path in (stats, *files):
        path.unlink(missing_ok=True)
    if tries > TRIES:
        raise DataError(f"it ended its worker {TRIES} times — start fewer processes, or look at its photos")
    write_json(stats, {"tries": tries})
    try:
        counts = task.run(part, out)
    except NoSuchSplit:  # other parts may have it
        counts = {}
    except BaseException:
        stats.unlink(missing_ok=True)
        raise
    for path in files:  # of an attempt that was killed
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            left.unlink(missing_ok=True)
    facts = {"fingerprint": fingerprint, "bytes": [_size(path) for path in files], "counts": counts}
    spent = {"seconds": time.time() - started[0], "cpu_seconds": time.process_time() - started[1]}
    write_json(stats, {**facts, **{name: round(value, 3) for name, value in spent.items()}, "process": os.getpid()})
    return {**counts, "parts": 1}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _fingerprint(*settings: object) -> str:
    return content_fingerprint(json.dumps(settings, sort_keys=True, default=str))


def embed_task(
    config: BackboneConfig, split: str | None, on_error: OnError, device: str, *, pooling: Pooling, dtype: torch.dtype,
    workers: int,
) -> Task:  # fmt: skip
    """``NAME.safetensors`` with its captions file, as ``vacsr embed`` writes them."""
    encoder = open_encoder(config, pooling).to(choose_device(device))

    def run(part: Part, out: Path) -> dict[str, float]:
        done = embed_pairs(
            config, part.spec, out / f"{part.name}.safetensors", split=split, pooling=pooling, dtype=dtype,
            device=device, workers=workers, on_error=on_error, encoder=encoder,
        )  # fmt: skip
        return {"images": done.images, "captions": done.captions, "left out": len(done.skipped)}

    fingerprint = _fingerprint("embed", encoder.provenance().as_metadata(), split, on_error, pooling, dtype)
    return Task(fingerprint, ("{}.safetensors", "{}-captions.jsonl"), run)


def score_task(model: Path, split: str | None, on_error: OnError, device: str) -> Task:
    """``NAME.parquet``: score, grade and uncertainty of each caption with its own image."""
    scorer = PairScorer.from_pretrained(model, device=device)

    def run(part: Part, out: Path) -> dict[str, float]:
        pairs = read_named(part.spec, split, default="all", on_error=on_error)
        own = scorer.score_set(pairs).at(pairs.caption_image, torch.arange(len(pairs)))
        images = [pairs.image_ids[row] for row in pairs.caption_image.tolist()]
        columns = {"image": images, "caption_id": pairs.caption_ids, "caption": pairs.captions, **own.to_dict()}
        write_table(out / f"{part.name}.parquet", {name: cells for name, cells in columns.items() if cells is not None})
        return {"images": len(pairs.image_ids), "captions": len(pairs)}

    return Task(_fingerprint("score", model_digest(scorer.model), split, on_error), ("{}.parquet",), run)


def audit_task(
    model: Path, split: str | None, on_error: OnError, device: str, *, top: int, min_grade: float | None
) -> Task:
    """A folder ``NAME`` with the lists and the page of the part's own audit."""
    scorer = PairScorer.from_pretrained(model, device=device)

    def run(part: Part, out: Path) -> dict[str, float]:
        pairs = read_named(part.spec, split, default="all", on_error=on_error)
        report = audit(scorer, pairs, top=top, min_grade=min_grade)
        title, maker = f"{part.name}, {pairs.split}", f"{model.name}, vacsr {__version__}"
        write_audit(out / part.name, report, pairs, title=title, model=maker, table="parquet")
        lists = {name: len(getattr(report, name)) for name in ("wrong", "missing", "duplicates")}
        return {"captions": len(pairs), **lists, **(report.wrong_count._asdict() if report.wrong_count else {})}

    outputs = tuple(f"{{}}/{name}" for name in (WRONG, MISSING, DUPLICATES, ROWS, PAGE))
    fingerprint = _fingerprint("audit", model_digest(scorer.model), split, on_error, top, min_grade)
    return Task(fingerprint, outputs, run)


def keep_task(split: str | None, on_error: OnError) -> Task:
    """The part without its most suspected captions: ``NAME.tar``, or ``NAME.safetensors`` with ``NAME.csv``."""

    def run(part: Part, out: Path) -> dict[str, float]:
        rows = _audited(part, out)
        kept = rows.suspicion.argsort(stable=True)[: part.kept].sort().values
        if part.kept:
            pairs = read_named(part.spec, split, default="all", on_error=on_error).subset_captions(kept)
            if isinstance(pairs, PhotoSet):
                shutil.rmtree(out / part.name, ignore_errors=True)
                [shard] = write_shards(pairs, out / part.name, per_shard=len(pairs.image_ids))
                shard.replace(out / f"{part.name}.tar")
                shard.parent.rmdir()
            else:
                write_pairs(pairs, out / f"{part.name}.safetensors")
        return {"captions": part.kept, "wrong": float(rows.wrong_probability[kept].sum())}

    return Task(_fingerprint("keep", split, on_error), ("{}.tar", "{}.safetensors", "{}.csv"), run)


def _audited(part: Part, out: Path) -> AuditRows:
    """The two columns that a filter chooses by, from the audit in the folder ``audit``; empty without the split."""
    from pyarrow import parquet

    rows, path = AuditRows(*[torch.empty(0)] * 7), out / "audit" / part.name / ROWS
    if not path.is_file():
        return rows
    columns = parquet.read_table(path, columns=["suspicion", "wrong_probability"])
    return rows._replace(**{name: torch.tensor(columns[name].to_numpy()).float() for name in columns.column_names})


def cut_parts(parts: Sequence[Part], out: Path, *, keep: float | None, max_wrong: float | None) -> list[Part]:
    """One cut over all parts, from their audits: the parts with the number of captions that each keeps."""
    rows = [_audited(part, out) for part in parts]
    kept = torch.zeros(sum(len(each.suspicion) for each in rows), dtype=torch.int64)
    every = AuditRows(*(torch.cat(columns) for columns in zip(*rows, strict=True)))
    kept[choose_captions(every, keep=keep, max_wrong=max_wrong)] = 1
    counts = [int(some.sum()) for some in torch.split(kept, [len(each.suspicion) for each in rows])]
    audits = [str(out.resolve() / "audit" / f"{part.name}_stats.json") for part in parts]
    columns = zip(parts, counts, audits, strict=True)
    return [part._replace(kept=count, files=(*part.files, path)) for part, count, path in columns]


class _Worker:
    """One process of Ray with its task. What goes wrong with a part is a result, so that the others go on."""

    def __init__(self, make: Callable[[], Task], out: str, folder: str) -> None:
        self.make, self.out = cache(make), Path(out)
        os.chdir(folder)  # for relative paths of models

    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        part = Part(*json.loads(row["part"]))
        try:
            return {"counts": json.dumps(do_part(self.make(), part, self.out)), "problem": ""}
        except (VacsrError, OSError) as error:
            return {"counts": "{}", "problem": f"{part.name}: {error}"}


def run_parts(
    make: Callable[[], Task], parts: Sequence[Part], out: Path, *, ray: str, device: str = "auto",
    progress: Progress | None = None,
) -> Counter[str]:  # fmt: skip
    """Do all parts and return the sums of their counts; ``make`` builds the task in each worker.

    ``ray``: a number of processes on this machine; or auto or HOST:PORT of a cluster, where every GPU, or without any
    every CPU, has a process. A part that fails does not keep the others from being done.
    """
    make_folder(out)
    sums, problems, items = Counter[str](), list[str](), [{"part": json.dumps(part)} for part in parts]
    with connected(ray) as module:
        nodes = [node["Resources"] for node in module.nodes() if node["Alive"]]
        kind = "GPU" if device != "cpu" and any(node.get("GPU") for node in nodes) else "CPU"
        nodes = [node for node in nodes if node.get(kind)]
        units = sum(node[kind] for node in nodes)
        count = min(int(ray if ray.isdecimal() else units), len(items))
        cpus = min(node.get("CPU", 1) for node in nodes) / math.ceil(count / len(nodes))
        rows = module.data.from_items(items, override_num_blocks=len(items)).map(
            _Worker, fn_constructor_args=(make, str(out.resolve()), os.getcwd()),
            compute=module.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=1),
            num_cpus=int(cpus) or cpus, num_gpus=1 / math.ceil(count / units) if kind == "GPU" else 0,
        ).iter_rows()  # fmt: skip
        for number, row in enumerate(rows, start=1):
            sums.update(json.loads(row["counts"]))
            problems += filter(None, [row["problem"]])
            if progress is not None:
                progress(number, len(items))
    if problems:
        raise DataError(f"{len(problems):,} of {len(items):,} parts failed, the others are done; first {problems[0]}")
    return sums


@contextmanager
def connected(where: str) -> Iterator[Any]:
    """The module ``ray``, started or joined while the context is open; one that this process runs already is left."""
    if not re.fullmatch(r"[1-9]\d*|auto|.+:\d+", where):
        raise UsageError(f"--ray {where} — write a number of processes, or auto or HOST:PORT of a cluster")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent unless you ask for it
    if local := where.isdecimal():
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on every system: listen on loopback only
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # Ray Data's own actors log errors that are none
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtra("ray", "ray") from error
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel("ERROR")
    if ray.is_initialized():
        yield ray
        return
    own: Any = {"object_store_memory": _OBJECT_STORE, "include_dashboard": False} if local else {}
    try:
        ray.init("local" if local else where, log_to_driver=False, logging_level="error", **own)
        yield ray
    except (ray.exceptions.RayError, ConnectionError) as error:
        message = f"--ray {where}: {str(error).splitlines()[0]}"
        raise EnvironmentProblem(f"{message} — check the cluster, then run the same command again") from error
    finally:
        ray.shutdown()
