"""The demo on a small budget: its figures against plain loops, its page, that it repeats itself, what it refuses."""

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
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from vacsr.cli import app
from vacsr.config import Recipe
from vacsr.data.scenes import SceneWorld, holds, load_scenes
from vacsr.data.spec import parse_spec
from vacsr.demo import METHODS, demo_recipes, run_demo, start_recipe
from vacsr.demo.folder import claim_folder
from vacsr.demo.gallery import TRUE_OF, choose_captions
from vacsr.demo.text import markdown_table
from vacsr.demo.training import Progress, starting_from, train_in_worker, train_methods
from vacsr.demo.workers import Job, run_jobs
from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.evaluate.exact import exact_truth
from vacsr.scoring import PairScorer

WORLD = "scenes:images=40,held_out=12,seed=3"


def short_recipes(epochs: int = 2) -> dict[str, Recipe]:
    """A small world, small towers and a few steps; everything else as in the real one."""
    return {name: shortened(recipe, WORLD, epochs=epochs) for name, recipe in demo_recipes(3).items()}


def short_start() -> Recipe:
    """The same for the towers' first training."""
    return shortened(start_recipe(3), f"{WORLD}1", epochs=1)


def shortened(recipe: Recipe, world: str, *, epochs: int) -> Recipe:
    fields = recipe.model_dump()
    fields["data"]["pairs"] = world
    fields["backbone"] |= {"spec": "tiny:width=16,depth=1,text_depth=1,heads=2"}
    fields["backbone"]["head"]["dim"] = 8
    fields["train"] |= {"epochs": epochs, "batch_size": 32, "lr": 5e-3, "warmup_steps": 2}
    return Recipe.model_validate(fields)


class Done(NamedTuple):
    out: Path
    text: str
    world: SceneWorld
    results: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("demo") / "with space"
    before = torch.get_num_threads()
    text = run_demo(out, recipes=short_recipes(), start=short_start())
    assert torch.get_num_threads() == before
    world = load_scenes(parse_spec(f"{WORLD},split=test"))
    return Done(out, text, world, json.loads((out / "results.json").read_text(encoding="utf-8")))


def plain_grades(world: SceneWorld) -> np.ndarray:
    """Fact by fact. [N, M]"""
    return np.array(
        [[np.mean([holds(fact, scene) for fact in said.facts]) for said in world.statements] for scene in world.scenes]
    )


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


def scored(done: Done, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Scores and uncertainties of all pairs by the saved model. [N, M] each"""
    scores = PairScorer.from_pretrained(done.out / name, device="cpu").score_set(done.world.pairs)
    rows, cols = torch.ones_like(scores.score).nonzero().unbind(1)
    sigma = scores.uncertainty(rows, cols)
    return scores.score.numpy(), None if sigma is None else sigma.view_as(scores.score).numpy()


@pytest.mark.parametrize("name", METHODS)
def test_every_figure_equals_its_plain_form(done: Done, name: str) -> None:
    grades = plain_grades(done.world)
    labelled = np.arange(len(grades))[:, None] == done.world.pairs.caption_image.numpy()
    true = grades > 1 - 1e-9
    score, sigma = scored(done, name)
    found = done.results["methods"][name]
    assert found["rsum"] == pytest.approx(plain_recalls(score, labelled) + plain_recalls(score.T, labelled.T))
    assert found["map_at_r"] == pytest.approx((plain_map(score, true) + plain_map(score.T, true.T)) / 2)
    assert found["tau_b"] == pytest.approx(100 * stats.kendalltau(score.ravel(), grades.ravel()).statistic)
    missed, wrong = true & ~labelled, ~true
    assert found["auroc_false_negative_score"] == pytest.approx(plain_auroc(score[missed], score[wrong]))
    if sigma is None:
        assert name != "vacsr"
        assert found["auroc_false_negative"] is found["corr_r1_t2i"] is None
        return
    assert found["auroc_false_negative"] == pytest.approx(plain_auroc(sigma[missed], sigma[wrong]))
    best = score.argmax(axis=0)
    order = np.argsort(sigma[best, range(len(best))], kind="stable")
    bins = np.array_split(labelled[best, range(len(best))][order], 10)
    expected = np.corrcoef(range(10), [part.mean() for part in bins])[0, 1]
    shown = found["corr_r1_t2i"]
    assert (shown is None and np.isnan(expected)) or shown == pytest.approx(expected)


def test_sigma_by_kind_equals_its_plain_form(done: Done) -> None:
    grades = plain_grades(done.world)
    labelled = np.arange(len(grades))[:, None] == done.world.pairs.caption_image.numpy()
    true = grades > 1 - 1e-9
    masks = {
        "positives": labelled,
        "false_negatives": true & ~labelled,
        "hard": (grades >= 0.5) & ~true,
        "easy": grades < 0.25,
    }
    _, sigma = scored(done, "vacsr")
    assert sigma is not None
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


def test_the_text_shows_figures_and_statistics(done: Done) -> None:
    assert done.text.startswith((done.out / "table.md").read_text(encoding="utf-8").rstrip("\n"))
    for name, found in done.results["methods"].items():
        row = next(line for line in done.text.splitlines() if line.startswith(f"| {name}"))
        cells = [cell.strip().strip("*") for cell in row.strip("|").split("|")]
        keys = ("rsum", "map_at_r", "tau_b", "auroc_false_negative_score")
        assert cells[1:5] == [f"{found[key]:.1f}" for key in keys]
        assert (cells[5] == "–") == (name != "vacsr")
    true = plain_grades(done.world) > 1 - 1e-9
    captions = true.shape[1]
    assert done.results["seed"] == 3
    assert f"true of {true.sum() / captions:.1f} images on average" in done.text
    assert f"{100 * (true.sum() - captions) / true.sum():.0f}% of the true pairs carry no label" in done.text
    assert f"These {true.sum() - captions:,} false negatives" in done.text


class Page(HTMLParser):
    """Collects tags; refuses what is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone(done: Done) -> None:
    whole = (done.out / "index.html").read_text(encoding="utf-8")
    assert len(whole) < 3_000_000
    assert "http:" not in whole
    assert "https:" not in whole
    assert "@import" not in whole
    page = Page()
    page.feed(whole)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert {"title", "main", "table", "caption", "svg", "figure"} < names
    assert "script" not in names
    assert ("html", {"lang": "en"}) in page.tags
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) >= 8 + 6 * 5 * 3 + 4
    assert all((image["src"] or "").startswith("data:image/") and image["alt"] for image in images)
    assert all(attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg")
    links = [(attributes.get("href") or "")[1:] for tag, attributes in page.tags if tag == "a"]
    assert set(links) <= {attributes.get("id") for _, attributes in page.tags}
    assert all(attributes.get("scope") for tag, attributes in page.tags if tag == "th")


def test_the_page_shows_the_figures(done: Done) -> None:
    whole = (done.out / "index.html").read_text(encoding="utf-8")
    for found in done.results["methods"].values():
        for key in ("rsum", "map_at_r", "tau_b"):
            assert f">{found[key]:.1f}<" in whole
    for query in done.results["queries"]:
        for answer in query["answers"]["vacsr"]:
            assert f">{answer['uncertainty']:.3f}<" in whole


def test_queries_are_chosen_by_the_world_and_answered_by_the_score(done: Done) -> None:
    grades = plain_grades(done.world)
    true = grades > 1 - 1e-9
    counts = true.sum(axis=0).tolist()
    chosen = choose_captions(exact_truth(torch.tensor(grades), done.world.pairs.caption_image))
    for number, column in zip(TRUE_OF, chosen, strict=True):
        if number in counts:
            assert column == counts.index(number)
    queries = [query for query in done.results["queries"] if query["direction"] == "t2i"]
    assert [query["query"] for query in queries] == [done.world.pairs.caption_ids[column] for column in chosen]
    score, sigma = scored(done, "vacsr")
    assert sigma is not None
    for query, column in zip(queries, chosen, strict=True):
        order = sorted(range(len(score)), key=lambda row: (-score[row, column], row))
        own = int(done.world.pairs.caption_image[column])
        assert query["official_rank"]["vacsr"] == order.index(own) + 1
        for answer, row in zip(query["answers"]["vacsr"], order, strict=False):
            assert answer["place"] == done.world.pairs.image_ids[row]
            assert answer["share"] == pytest.approx(grades[row, column])
            assert answer["uncertainty"] == pytest.approx(sigma[row, column])
            assert answer["grade"] == pytest.approx(1 / (1 + np.exp(-score[row, column])), abs=1e-6)
            expected = "unlabelled" if true[row, column] else "partly" if grades[row, column] >= 0.25 else "wrong"
            assert answer["verdict"] == ("official" if row == own else expected)


def test_what_it_says_to_type_next_works(done: Done) -> None:
    program, *arguments = shlex.split(done.text.splitlines()[-1].partition("try: ")[2])
    assert program == "vacsr"
    evaluated = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert evaluated.exit_code == 0, evaluated.output
    assert f"{done.results['methods']['vacsr']['rsum']:.1f}" in evaluated.stdout
    words = ["score", str(done.out / "vacsr"), "--image", str(done.out / "scene.png"), "--text", "a red star"]
    graded = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert graded.exit_code == 0, graded.output


def test_a_worker_trains_what_this_process_would(done: Done, tmp_path: Path) -> None:
    """Same seed, same weights, whichever process does it; and every tenth step is told."""
    told: list[Progress] = []
    torch.set_num_threads(min(2, os.cpu_count() or 1))  # as the first job has; more threads may round otherwise
    train_in_worker(short_start(), tmp_path / "start", tell=lambda _: None)
    torch.set_num_threads(1)
    recipe = starting_from(tmp_path / "start", short_recipes()["vacsr"])
    train_in_worker(recipe, tmp_path / "model", tell=told.append)
    here, there = (
        (folder / "model.safetensors").read_bytes() for folder in (tmp_path / "model", done.out / "vacsr/model")
    )
    assert here == there
    assert [progress.step for progress in told if progress.rate] == [6, 12]
    assert all(progress.steps == 12 and progress.epochs == 2 for progress in told)


@pytest.mark.slow
@pytest.mark.long
def test_it_repeats_itself_to_the_byte(done: Done) -> None:
    before = {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}
    assert run_demo(done.out, recipes=short_recipes(), start=short_start()) == done.text
    assert {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["results.json", "table.md", "index.html", "vacsr"])
def test_results_of_others_are_not_overwritten(tmp_path: Path, name: str) -> None:
    if name == "vacsr":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text('{"title": "a comparison"}')
    with pytest.raises(UsageError, match=f"holds {name}.*--out"):
        run_demo(tmp_path)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="choose another --out"):
        run_demo(tmp_path / "file")


def test_its_own_folder_is_taken_again(done: Done) -> None:
    before = {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}
    claim_folder(done.out)
    assert {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_callers(tmp_path: Path) -> None:
    recipe = short_recipes()["sigmoid"]
    broken = recipe.model_copy(update={"train": recipe.train.model_copy(update={"batch_size": 4096})})
    with pytest.raises(Exception, match="batch") as caught:
        run_demo(tmp_path, recipes={"sigmoid": broken}, start=short_start())
    assert caught.type.__module__ == "vacsr.errors"
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_an_interrupt_stops_the_workers() -> None:
    """It does not wait for the 30,000 steps that are left."""

    def pressed(name: str, progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_methods({"sigmoid": short_recipes(epochs=5000)["sigmoid"]}, listen=pressed)
    assert multiprocessing.active_children() == []


class Dies:
    """Unpickled in the worker, it ends the process."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (7,)


@pytest.mark.slow
def test_a_worker_that_dies_and_one_that_breaks_are_named() -> None:
    with pytest.raises(EnvironmentProblem, match=r"x: its worker process ended.*7"):
        run_jobs([Job("x", dict, (Dies(),))], listen=lambda name, message: None)
    with pytest.raises(RuntimeError, match=r"(?s)x failed.*TypeError"):
        run_jobs([Job("x", dict, (5,))], listen=lambda name, message: None)


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


def test_all_methods_share_everything_but_the_method() -> None:
    recipes = demo_recipes(5)
    assert tuple(recipes) == METHODS
    assert len({recipe.model_dump_json(exclude={"method"}) for recipe in recipes.values()}) == 1
    assert {recipe.train.seed for recipe in recipes.values()} == {5}


def test_a_table_lines_up() -> None:
    lines = markdown_table([["method", "σ ↑"], ["a", "1.0"], ["longer name", "–"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
