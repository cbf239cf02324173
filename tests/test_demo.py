"""The demo on a small budget: its numbers against plain loops, its page, that it repeats itself, what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from vacsr.cli import app
from vacsr.config.io import merge
from vacsr.data.formats import parse_spec
from vacsr.data.scenes import EASY_BELOW, HARD_FROM, SceneTable, SceneWorld, load_scenes
from vacsr.demo import KIND_NAMES, METHODS, claim_folder, demo_table, kind_plot, run_demo
from vacsr.errors import EnvironmentProblem, UsageError, VacsrError
from vacsr.scoring import PairScorer

WORLD = "scenes:images=40,held_out=12,seed=3"
SHORT: dict[str, Any] = {
    "data": {"pairs": WORLD},
    "backbone": {"spec": "tiny:width=16,depth=1,text_depth=1,heads=2", "head": {"dim": 8}},
    "train": {"epochs": 2, "batch_size": 32, "lr": 5e-3, "warmup_steps": 2},
}
"""A small world, small towers and a few steps; everything else as in the real one."""


class Done(NamedTuple):
    out: Path
    text: str
    world: SceneWorld
    results: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("demo") / "with space"
    before = torch.get_num_threads()
    text = run_demo(out, seed=3, changes=SHORT)
    assert torch.get_num_threads() == before
    world = load_scenes(parse_spec(f"{WORLD},split=test"))
    return Done(out, text, world, json.loads((out / "results.json").read_text(encoding="utf-8")))


def plain_grades(world: SceneWorld) -> np.ndarray:
    """Fact by fact. [N, M]"""
    table = SceneTable(world.scenes)
    return np.stack([np.mean([table.true(fact) for fact in said.facts], axis=0) for said in world.statements], axis=1)


def plain_recalls(score: np.ndarray, right: np.ndarray) -> float:
    """R@1 + R@5 + R@10 of rows as queries, percent."""
    total = 0.0
    for line, truth in zip(score, right, strict=True):
        order = sorted(range(len(line)), key=lambda at: (-line[at], at))
        best = min(order.index(at) for at in np.flatnonzero(truth))
        total += sum(100.0 * (best < k) for k in (1, 5, 10))
    return total / len(score)


def plain_map(score: np.ndarray, right: np.ndarray) -> float:
    values = []
    for line, truth in zip(score, right, strict=True):
        order = sorted(range(len(line)), key=lambda at: (-line[at], at))[: int(truth.sum())]
        hits = [bool(truth[at]) for at in order]
        values.append(sum(hit * sum(hits[: n + 1]) / (n + 1) for n, hit in enumerate(hits)) / max(1, len(hits)))
    return 100.0 * float(np.mean([value for value, truth in zip(values, right, strict=True) if truth.any()]))


def plain_auroc(above: np.ndarray, below: np.ndarray) -> float:
    wins = (above[:, None] > below[None]).mean() + 0.5 * (above[:, None] == below[None]).mean()
    return 100.0 * float(wins)


def truth(done: Done) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grades, labels and completely true pairs. [N, M] each"""
    grades = plain_grades(done.world)
    return grades, np.arange(len(grades))[:, None] == done.world.pairs.caption_image.numpy(), grades > 1 - 1e-9


def scored(done: Done, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Scores and uncertainties of all pairs by the saved model. [N, M] each"""
    scores = PairScorer.from_pretrained(done.out / name, device="cpu").score_set(done.world.pairs)
    rows, cols = torch.ones_like(scores.score).nonzero().unbind(1)
    sigma = scores.uncertainty(rows, cols)
    return scores.score.numpy(), None if sigma is None else sigma.view_as(scores.score).numpy()


@pytest.mark.parametrize("name", METHODS)
def test_every_metric_equals_its_plain_form(done: Done, name: str) -> None:
    grades, labelled, true = truth(done)
    score, sigma = scored(done, name)
    found = {key.rpartition(".")[2]: value for key, value in done.results["methods"][name].items()}
    assert found["rsum"] == pytest.approx(plain_recalls(score, labelled) + plain_recalls(score.T, labelled.T))
    assert found["map_at_r"] == pytest.approx((plain_map(score, true) + plain_map(score.T, true.T)) / 2)
    assert found["tau_b"] == pytest.approx(100 * stats.kendalltau(score.ravel(), grades.ravel()).statistic)
    missed, wrong = true & ~labelled, ~true
    assert found["auroc_false_negative_score"] == pytest.approx(plain_auroc(score[missed], score[wrong]))
    row = next(line for line in done.text.splitlines() if line.startswith(f"| {name}"))
    cells = [cell.strip().strip("*") for cell in row.strip("| ").split("|")]
    shown = ("rsum", "map_at_r", "tau_b", "auroc_false_negative_score")
    assert cells[1:5] == [f"{found[key]:.1f}" for key in shown]
    page = (done.out / "index.html").read_text(encoding="utf-8")
    assert all(f">{found[key]:.1f}<" in page for key in shown)
    if sigma is None:
        assert name != "vacsr"
        assert found["auroc_false_negative"] is found["corr_r1_t2i"] is None
        assert cells[5] == "–"
        return
    assert found["auroc_false_negative"] == pytest.approx(plain_auroc(sigma[missed], sigma[wrong]))
    best = score.argmax(axis=0)
    order = np.argsort(sigma[best, range(len(best))], kind="stable")
    bins = np.array_split(labelled[best, range(len(best))][order], 10)
    expected = np.corrcoef(range(10), [part.mean() for part in bins])[0, 1]
    assert found["corr_r1_t2i"] == pytest.approx(expected)


def test_sigma_by_kind_equals_its_plain_form(done: Done) -> None:
    grades, labelled, true = truth(done)
    masks = {
        "positives": labelled,
        "false_negatives": true & ~labelled,
        "hard": (grades >= 0.5) & ~true,
        "easy": grades < 0.25,
    }
    _, sigma = scored(done, "vacsr")
    assert sigma is not None
    assert (HARD_FROM, EASY_BELOW) == (0.5, 0.25)  # as the page says
    for kind, mask in masks.items():
        found = done.results["kinds"]["vacsr"][kind]
        assert found["pairs"] == mask.sum()
        assert found["sigma"]["median"] == pytest.approx(np.median(sigma[mask]))
        assert found["sigma"]["mean"] == pytest.approx(sigma[mask].mean())
        assert f"{np.median(sigma[mask]):.3f}" in done.text
        if kind != "false_negatives":
            expected = plain_auroc(sigma[masks["false_negatives"]], sigma[mask])
            assert found["false_negatives_above"]["sigma"] == pytest.approx(expected)
            assert f"{expected:.1f}%" in done.text


def test_the_text_counts_what_labels_leave_out(done: Done) -> None:
    _, labelled, true = truth(done)
    world = done.results["world"]
    assert world["false_negatives"] == (true & ~labelled).sum()
    assert world["images_per_caption"] == pytest.approx(true.sum() / true.shape[1])
    assert f"{world['images_per_caption']:.1f} images" in done.text
    assert f"{world['false_negatives']:,} false negatives" in done.text
    assert done.text.startswith((done.out / "table.md").read_text(encoding="utf-8").rstrip("\n"))


def test_the_page_stands_alone(done: Done) -> None:
    page = (done.out / "index.html").read_text(encoding="utf-8")
    assert len(page) < 3_000_000
    assert not any(part in page for part in ("http:", "https:", "@import", "<script"))
    assert page.count('<img src="data:image/') >= 8 + 6 * 5 * 3 + 4
    for query in done.results["queries"]:
        assert all(f">{answer['uncertainty']:.3f}<" in page for answer in query["answers"]["vacsr"])


def test_queries_are_chosen_by_the_truth(done: Done) -> None:
    _, labelled, true = truth(done)
    ids = done.world.pairs.caption_ids
    queries = [query for query in done.results["queries"] if query["direction"] == "t2i"]
    owners = [int(done.world.pairs.caption_image[ids.index(query["query"])]) for query in queries]
    assert len(queries) == len(set(owners)) == 6
    for query in queries:
        assert query["unlabelled"] == (true & ~labelled)[:, ids.index(query["query"])].sum()
    assert [queries[at]["unlabelled"] for at in (0, 1, 2)] == [0, 1, 2]


def test_the_commands_it_names_work(done: Done) -> None:
    program, *arguments = shlex.split(done.text.splitlines()[-1].partition("try: ")[2])
    assert program == "vacsr"
    evaluated = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert evaluated.exit_code == 0, evaluated.output
    assert f"{done.results['methods']['vacsr']['test.rsum']:.1f}" in evaluated.stdout
    words = ["score", str(done.out / "vacsr"), "--image", str(done.out / "scene.png"), "--text", "a red star"]
    graded = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert graded.exit_code == 0, graded.output


def test_it_writes_what_it_says(done: Done) -> None:
    names = {path.name for path in done.out.iterdir()}
    assert names == {"results.json", "table.md", "index.html", "scene.png", *METHODS}
    assert "vacsr-demo-" not in json.dumps(done.results)  # folders that are gone


@pytest.mark.slow
@pytest.mark.long
def test_it_repeats_itself_to_the_byte(done: Done) -> None:
    before = {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}
    assert run_demo(done.out, seed=3, changes=SHORT) == done.text
    assert {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["results.json", "table.md", "index.html", "vacsr"])
def test_results_of_others_are_not_overwritten(tmp_path: Path, name: str) -> None:
    if name == "vacsr":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text('{"title": "a comparison"}')
    with pytest.raises(UsageError, match="--out"):
        run_demo(tmp_path)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="--out"):
        run_demo(tmp_path / "file")


def test_its_own_folder_is_taken_again(done: Done) -> None:
    claim_folder(done.out)


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_callers(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())  # those of other tests
    with pytest.raises(VacsrError, match="batch"):
        run_demo(tmp_path, changes=merge(SHORT, {"train": {"batch_size": 4096}}))
    assert list(tmp_path.iterdir()) == []
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.slow
@pytest.mark.long
def test_control_c_at_the_terminal_ends_all_with_130(tmp_path: Path) -> None:
    code = "import sys; from vacsr.cli import main; sys.argv[0] = 'vacsr'; main()"
    command = [sys.executable, "-c", code, "demo", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
    )
    time.sleep(12)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and workers alike
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err.decode()
    assert out == b""
    assert b"Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []


def test_all_methods_share_everything_but_the_method(tmp_path: Path) -> None:
    table = demo_table(5, start=tmp_path)
    recipes = [table.recipe(row, table.settings[0], seed=5) for row in table.rows]
    assert tuple(recipe.method.name for recipe in recipes) == METHODS
    assert len({recipe.model_dump_json(exclude={"method"}) for recipe in recipes}) == 1
    assert (recipes[0].train.seed, recipes[0].backbone.start) == (5, str(tmp_path))


def test_a_kind_without_pairs_has_no_histogram() -> None:
    values = {kind: torch.rand(50 if kind == "easy" else 0) for kind in KIND_NAMES}
    picture = kind_plot(values, label="σ", title="t")
    assert picture.count("no pair") == 3 * 2  # shown and spoken
    assert "nan" not in picture
