"""Part by part: what a part does by itself, one cut over all parts, and Ray with workers and a node that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import vacsr as library
from vacsr import scale
from vacsr.data import PairSet, load_pairs, write_shards
from vacsr.embed import embed_pairs, embedding_config
from vacsr.errors import DataError, NoSuchSplit, UsageError
from vacsr.files import read_tensors
from vacsr.scale import Part, Task, audit_task, cut_parts, do_part, embed_task, keep_task, parts_of, score_task
from vacsr.search.audit import AuditRows, audit
from vacsr.search.filter import choose_captions

CPU = ("--device", "cpu")
Command = Callable[..., Any]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six shards of four photos with two captions each; the photos of the last one are of the split test."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    train, test = (
        load_pairs("scenes:images=20,held_out=4,per_image=2,size=32", split=name) for name in ("train", "test")
    )
    write_shards(train, folder, per_shard=4)  # type: ignore[arg-type]
    [last] = write_shards(test, folder / "test", per_shard=4)  # type: ignore[arg-type]
    last.rename(folder / "00005.tar")
    return f"shards:{folder}/*.tar"


@pytest.fixture(scope="module")
def model(clip_checkpoint: Path) -> Path:
    """Encoders without training."""
    return Path(f"clip:{clip_checkpoint}")


@pytest.fixture(scope="module")
def make(model: Path) -> Callable[[], Task]:
    config = embedding_config(str(model))
    return partial(embed_task, config, None, "fail", "cpu", pooling="auto", dtype=torch.float32, workers=1)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file that is no stats, with the time it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("_stats.json")]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def pids(folder: Path) -> list[int]:
    return [json.loads(path.read_text())["process"] for path in sorted(folder.glob("*_stats.json"))]


# ------------------------------------------------------------------------------------------------------- one part


def test_a_part_is_done_once(shards: str, make: Any, tmp_path: Path) -> None:
    task, part = make(), parts_of(shards, tmp_path)[1]
    assert do_part(task, part, tmp_path) == {"images": 4, "captions": 8, "left out": 0, "parts": 1}
    first = contents(tmp_path)
    assert sorted(first) == ["00001-captions.jsonl", "00001.safetensors"]
    assert do_part(task, part, tmp_path)["done before"] == 1
    assert contents(tmp_path) == first, "nothing is written again"
    one = embed_pairs(make.args[0], part.spec, tmp_path / "one" / "x.safetensors", dtype=torch.float32, device="cpu")
    assert load_pairs(one.spec).digest() == load_pairs(f"features:{tmp_path}").digest()


@pytest.mark.parametrize("change", ["file lost", "file torn", "other options", "shard changed", "stats torn"])
def test_what_does_not_fit_is_done_again(change: str, shards: str, make: Any, tmp_path: Path) -> None:
    part = parts_of(shards, tmp_path)[0]
    shard = tmp_path / "copy" / "00000.tar"
    shard.parent.mkdir()
    shard.write_bytes(Path(part.files[0]).read_bytes())
    (part,) = parts_of(f"shards:{shard}", tmp_path)
    do_part(make(), part, tmp_path)
    features = tmp_path / "00000.safetensors"
    whole = read_tensors(features)[0]["image"].clone()  # the file is mapped
    if change == "file lost":
        features.unlink()
    elif change == "file torn":
        features.write_bytes(features.read_bytes()[:50])
    elif change == "shard changed":
        os.utime(shard, (0, 0))
    elif change == "stats torn":
        (tmp_path / "00000_stats.json").write_text("{")
    other = partial(make.func, *make.args, **{**make.keywords, "dtype": torch.float16})
    assert "done before" not in do_part((other if change == "other options" else make)(), part, tmp_path)
    assert torch.equal(read_tensors(features)[0]["image"], whole) == (change != "other options")


def test_a_part_that_kills_its_worker_is_given_up(shards: str, make: Callable[[], Task], tmp_path: Path) -> None:
    """Each try is counted before it starts; what it left is removed by the one that succeeds."""
    part, task = parts_of(shards, tmp_path)[0], make()
    stats, left = tmp_path / "00000_stats.json", tmp_path / ".00000.safetensors.99.tmp"

    def killed() -> None:
        def run(part: Part, out: Path) -> dict[str, float]:
            left.write_bytes(b"half")
            os._exit(9)

        if (child := os.fork()) == 0:
            do_part(task._replace(run=run), part, tmp_path)
        os.waitpid(child, 0)

    for tries in range(1, scale.TRIES + 1):
        killed()
        assert json.loads(stats.read_text()) == {"tries": tries}
    with pytest.raises(DataError, match="ended its worker"):
        do_part(task, part, tmp_path)
    do_part(task, part, tmp_path)  # of the next command
    assert sorted(contents(tmp_path)) == ["00000-captions.jsonl", "00000.safetensors"]


def test_an_error_does_not_count_as_a_kill(shards: str, make: Callable[[], Task], tmp_path: Path) -> None:
    def run(part: Part, out: Path) -> dict[str, float]:
        raise DataError("broken")

    part = parts_of(shards, tmp_path)[0]
    for _ in range(scale.TRIES + 1):
        with pytest.raises(DataError, match=r"^broken"):
            do_part(make()._replace(run=run), part, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_part_without_the_split(shards: str, model: Path, tmp_path: Path) -> None:
    task = score_task(model, "train", "fail", "cpu")
    counts = [do_part(task, part, tmp_path) for part in parts_of(shards, tmp_path)]
    assert [one.get("captions") for one in counts] == [8] * 5 + [None]
    assert sorted(contents(tmp_path)) == [f"0000{number}.parquet" for number in range(5)]


def test_scores_are_those_of_the_scorer(shards: str, model: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    part = parts_of(shards, tmp_path)[2]
    do_part(score_task(model, None, "fail", "cpu"), part, tmp_path)
    pairs, table = load_pairs(part.spec), pandas.read_parquet(tmp_path / "00002.parquet")
    scores = library.PairScorer(library.load_model(str(model)), device="cpu").score_set(pairs).score
    owner = pairs.caption_image
    assert table.columns.tolist() == ["image", "caption_id", "caption", "score"]  # cosines have neither grade nor σ
    assert table["image"].tolist() == [pairs.image_ids[row] for row in owner]
    assert tuple(table["caption_id"]) == pairs.caption_ids
    torch.testing.assert_close(
        torch.tensor(table["score"].tolist()), scores[owner, torch.arange(len(owner))], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("spec", "out", "words"),
    [
        ("csv:x.csv", "out", "no parts"),
        ("features:x.safetensors", "out", "no parts"),
        ("shards:DIR/**/*.tar", "out", "2 parts named 00000"),
        ("shards:DIR/*.tar", "DIR", "folder of the data"),
    ],
)
def test_parts_that_are_refused(spec: str, out: str, words: str, shards: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_shards(load_pairs(shards, split="test"), folder)  # type: ignore[arg-type]
    write_shards(load_pairs(shards, split="test"), folder / "more")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        parts_of(spec.replace("DIR", str(folder)), folder if out == "DIR" else tmp_path / "out")


def test_addresses_that_are_refused(shards: str, model: Path, tmp_path: Path, vacsr: Command) -> None:
    for where in ("auot", "0", "-1"):
        assert vacsr("score", model, "--pairs", shards, "--ray", where, "--out", tmp_path / "x").refused(2, "--ray")


def test_options_that_do_not_go_with_ray(model: Path, tmp_path: Path, vacsr: Command) -> None:
    where = ("--ray", 2, "--out", tmp_path / "x")
    assert vacsr("embed", "--backbone", model, "--captions", tmp_path / "c.txt", *where).refused(2, "--ray")
    assert vacsr("audit", model, "--pairs", "shards:x", "--photos", tmp_path, *where).refused(2, "--photos")
    assert vacsr("score", model, *where).refused(2, "--pairs")


# ---------------------------------------------------------------------------------------- a folder of embeddings


def features(folder: Path, shards: str, make: Callable[[], Task]) -> str:
    for part in parts_of(shards, folder):
        do_part(make(), part, folder)
    return f"features:{folder}"


def test_a_folder_of_embeddings_is_one_set(shards: str, make: Any, tmp_path: Path) -> None:
    whole = load_pairs(
        embed_pairs(make.args[0], shards, tmp_path / "w.safetensors", dtype=torch.float32, device="cpu").spec
    )
    (tmp_path / "parts").mkdir()
    joined = load_pairs(features(tmp_path / "parts", shards, make))
    assert isinstance(joined, PairSet)
    assert (joined.image_ids, joined.caption_ids, joined.captions) == (
        whole.image_ids,
        whole.caption_ids,
        whole.captions,
    )
    assert torch.equal(joined.caption_image, whole.caption_image)
    for name in ("images", "texts"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name), atol=1e-6, rtol=0)
    assert joined.provenance == whole.provenance
    test = load_pairs(f"features:{tmp_path}/parts,split=test")
    assert test.image_ids == load_pairs(shards, split="test").image_ids
    with pytest.raises(NoSuchSplit):
        load_pairs(f"features:{tmp_path}/parts", split="dev")


# ----------------------------------------------------------------------------------------------------------- filter


@pytest.mark.parametrize("limits", [{"keep": 0.4}, {"max_wrong": 0.3}])
@pytest.mark.parametrize("kind", ["shards", "features"])
def test_one_cut_over_all_parts(
    kind: str, limits: dict[str, float], shards: str, model: Path, make: Callable[[], Task], tmp_path: Path
) -> None:
    """What the command keeps on one machine, by the same scores; every photo and text is as before."""
    (tmp_path / "data").mkdir()
    spec = shards if kind == "shards" else features(tmp_path / "data", shards, make)
    out = tmp_path / "out"
    if kind == "features":
        heads = library.BackboneConfig(head=library.HeadConfig(dim=8))
        once = library.TrainConfig(epochs=1, batch_size=8, device="cpu")
        run = library.fit("infonce", load_pairs(spec), once, backbone=heads, progress=False)
        model = tmp_path / "model"
        run.model.save_pretrained(model)
    parts, scorer = parts_of(spec, out), library.PairScorer(library.load_model(str(model)), device="cpu")
    reports = [audit(scorer, load_pairs(part.spec), top=1) for part in parts]
    every = AuditRows(*(torch.cat(columns) for columns in zip(*(one.rows for one in reports), strict=True)))
    ids = [name for part in parts for name in load_pairs(part.spec).caption_ids]
    expected = [ids[row] for row in choose_captions(every, **limits).tolist()]
    task = audit_task(model, None, "fail", "cpu", top=1, min_grade=None)
    for part in parts:
        do_part(task, part, out / "audit")
    chosen = cut_parts(parts, out, keep=limits.get("keep"), max_wrong=limits.get("max_wrong"))
    counts = [do_part(keep_task(None, "fail"), part, out) for part in chosen]
    assert sum(one["captions"] for one in counts) == len(expected) > 0
    before, after = load_pairs(spec), load_pairs(f"features:{out}" if kind == "features" else f"shards:{out}/*.tar")
    assert list(after.caption_ids) == expected
    rows = [before.caption_ids.index(name) for name in expected]
    assert after.captions == tuple(before.captions[row] for row in rows)  # type: ignore[index]
    if isinstance(after, PairSet):
        assert torch.equal(after.texts, before.texts[rows])  # type: ignore[union-attr]
    else:
        names = {name: before.photos.items[row].read() for row, name in enumerate(before.image_ids)}  # type: ignore[union-attr]
        assert [item.read() for item in after.photos.items] == [names[name] for name in after.image_ids]  # type: ignore[attr-defined]
    again = cut_parts(parts, out, keep=0.03, max_wrong=None)
    for part in again:
        do_part(keep_task(None, "fail"), part, out)
    assert len(contents(out)) == len(contents(out / "audit")) + (1 if kind == "shards" else 2), (
        "nothing of an earlier cut is left"
    )


# ------------------------------------------------------------------------------------------------------------- Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with one CPU each, on loopback."""
    patch = pytest.MonkeyPatch()
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")):
        patch.setenv(name, value)
    ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'vacsr[ray]'")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 100 << 20}
    started = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    started.other = started.add_node(**options)
    ray.init(started.address, log_to_driver=False, logging_level="error")
    started.wait_for_nodes()
    yield started
    ray.shutdown()
    started.shutdown()
    patch.undo()


def once(make: Callable[[], Task], mark: Path, act: Callable[[], None]) -> Callable[[], Task]:
    """The same task; in the middle of part 00002, the first time, with half a file written, this happens."""

    def made() -> Task:
        task = make()

        def run(part: Any, out: Path) -> dict[str, float]:
            if part.name == "00002" and not mark.exists():
                mark.touch()
                (out / f".00002.safetensors.{os.getpid()}.tmp").write_bytes(b"half")
                act()
            return task.run(part, out)

        return task._replace(run=run)

    return made


def expected(spec: str, make: Any, folder: Path) -> PairSet:
    whole = embed_pairs(make.args[0], spec, folder / "whole.safetensors", dtype=torch.float32, device="cpu")
    return load_pairs(whole.spec)  # type: ignore[return-value]


def check(out: Path, whole: PairSet) -> None:
    """Every item once, as the command on one machine embeds it, and no other file."""
    joined = load_pairs(f"features:{out}")
    assert isinstance(joined, PairSet)
    assert (joined.image_ids, joined.caption_ids) == (whole.image_ids, whole.caption_ids)
    for name in ("images", "texts"):
        torch.testing.assert_close(getattr(joined, name), getattr(whole, name), atol=1e-6, rtol=0)
    ends = (".safetensors", "-captions.jsonl", "_stats.json")
    assert sorted(path.name for path in out.iterdir()) == sorted(f"0000{n}{end}" for n in range(6) for end in ends)


@pytest.mark.long
def test_two_workers_and_one_command_give_the_same(cluster: Any, shards: str, make: Any, tmp_path: Path) -> None:
    """Then a part is lost, and the same command does only that one."""
    whole, out, parts = expected(shards, make, tmp_path), tmp_path / "out", parts_of(shards, tmp_path / "out")
    seen: list[tuple[int, int]] = []
    done = scale.run_parts(make, parts, out, ray="2", device="cpu", progress=lambda *step: seen.append(step))
    assert done == Counter({"parts": 6, "images": 24, "captions": 48, "left out": 0})
    assert seen == [(number, 6) for number in range(1, 7)]
    assert len(set(pids(out))) == 2, "both workers had a part"
    check(out, whole)
    before = contents(out)
    (out / "00003.safetensors").unlink()
    assert scale.run_parts(make, parts, out, ray="2", device="cpu")["done before"] == 5
    check(out, whole)
    assert {name for name, file in contents(out).items() if file != before[name]} <= {
        "00003.safetensors",
        "00003-captions.jsonl",
    }


@pytest.mark.long
def test_a_worker_is_killed_in_the_middle(cluster: Any, shards: str, make: Any, tmp_path: Path) -> None:
    whole, out, mark = expected(shards, make, tmp_path), tmp_path / "out", tmp_path / "killed"
    dying = once(make, mark, lambda: os.kill(os.getpid(), signal.SIGKILL))
    done = scale.run_parts(dying, parts_of(shards, out), out, ray="2", device="cpu")
    assert mark.exists()
    assert (done["parts"], done["images"]) == (6, 24)
    check(out, whole)


@pytest.mark.long
def test_a_broken_shard_does_not_stop_the_others(cluster: Any, shards: str, make: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for part in parts_of(shards, tmp_path):
        (data / f"{part.name}.tar").write_bytes(Path(part.files[0]).read_bytes())
    torn = (data / "00001.tar").read_bytes()
    (data / "00001.tar").write_bytes(torn[:700])
    parts, out = parts_of(f"shards:{data}/*.tar", tmp_path / "out"), tmp_path / "out"
    with pytest.raises(DataError, match=r"1 of 6 parts failed.*00001"):
        scale.run_parts(make, parts, out, ray="2", device="cpu")
    assert len(list(out.glob("*.safetensors"))) == 5
    (data / "00001.tar").write_bytes(torn)
    assert scale.run_parts(make, parts, out, ray="2", device="cpu")["done before"] == 5
    check(out, expected(shards, make, tmp_path))


@pytest.mark.long
def test_the_commands(cluster: Any, shards: str, model: Path, tmp_path: Path, vacsr: Command) -> None:
    where = ("--pairs", shards, "--ray", 2, *CPU, "--out")
    answer = vacsr("embed", "--backbone", model, *where, tmp_path / "e")
    assert (answer.code, answer.out) == (0, f"features:{tmp_path}/e\n"), answer.err
    assert load_pairs(answer.out.strip(), split="test").image_ids == load_pairs(shards, split="test").image_ids
    answer = vacsr("score", model, *where, tmp_path / "s", "--split", "train")
    assert (answer.code, len(list((tmp_path / "s").glob("*.parquet")))) == (0, 5), answer.err
    answer = vacsr("audit", model, *where, tmp_path / "a", "--top", 3)
    assert answer.code == 0, answer.err
    assert next(line.split("\t")[:2] for line in answer.out.splitlines()) == ["wrong", "18"]
    assert (tmp_path / "a" / "00004" / "index.html").is_file()
    assert "wrong captions of 48" in answer.err
    parts = [json.loads(path.read_text())["counts"] for path in (tmp_path / "a").glob("*_stats.json")]
    assert not any(part["at_least"] for part in parts)
    assert "at least" not in answer.err
    answer = vacsr("filter", model, *where, tmp_path / "f", "--keep", 0.5)
    name, count, spec = answer.out.strip().split("\t")
    assert (answer.code, name, count, len(load_pairs(spec))) == (0, "kept", "24", 24), answer.err
    assert "6 parts with 24 captions" in answer.err
    assert "6 of them before" in vacsr("filter", model, *where, tmp_path / "f", "--keep", 0.25).err
    assert vacsr("score", model, *where, tmp_path / "x", "--split", "dev").refused(4, "--split")
    assert vacsr("score", model, "--pairs", "synthetic:", "--ray", 2, "--out", tmp_path / "x").refused(2, "shards:")


@pytest.mark.long
@pytest.mark.parametrize("where", ["auto", "HOST:PORT"])
def test_a_command_joins_a_cluster(where: str, cluster: Any, shards: str, model: Path, tmp_path: Path) -> None:
    """As on a machine of a cluster that `ray start` made: in a process of its own, which starts no Ray."""
    asked = where if where == "auto" else cluster.address
    command = [
        sys.executable,
        "-m",
        "vacsr",
        "score",
        model,
        "--pairs",
        shards,
        "--ray",
        asked,
        *CPU,
        "--out",
        tmp_path,
    ]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, len(list(tmp_path.glob("*.parquet")))) == (0, 6), done.stderr


@pytest.mark.long
def test_a_node_is_lost(cluster: Any, shards: str, make: Any, tmp_path: Path) -> None:
    """The last test: the node does not come back, so the one that is left does the rest."""
    import threading

    whole, out, mark = expected(shards, make, tmp_path), tmp_path / "out", tmp_path / "slow"
    slow = once(make, mark, lambda: time.sleep(3))

    def lose() -> None:
        while not mark.exists():
            time.sleep(0.05)
        cluster.remove_node(cluster.other, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    scale.run_parts(slow, parts_of(shards, out), out, ray="2", device="cpu")
    thread.join()
    for left in out.glob(".00002.*.tmp"):  # of a node that is gone
        left.unlink()
    check(out, whole)
