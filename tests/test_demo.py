"""The demo on a small budget: its numbers against the saved models, its page, what it repeats and refuses."""

from __future__ import annotations

import json
import multiprocessing
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vacsr.cli import app
from vacsr.compare.results import look_up
from vacsr.config.io import merge
from vacsr.data.formats import parse_spec
from vacsr.data.scenes import SceneWorld, load_scenes
from vacsr.demo import (
    KIND_NAMES,
    METHODS,
    PAGE,
    PICTURE,
    RESULTS,
    TABLE,
    claim_folder,
    demo_table,
    kind_plot,
    run_demo,
)
from vacsr.errors import EnvironmentProblem, UsageError, VacsrError
from vacsr.evaluate.report import evaluate_retrieval
from vacsr.evaluate.truth import scene_truth
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


def test_the_page_stands_alone(done: Done) -> None:
    page = (done.out / "index.html").read_text(encoding="utf-8")
    assert {path.name for path in done.out.iterdir()} == {RESULTS, TABLE, PAGE, PICTURE, *METHODS}
    assert "vacsr-demo-" not in json.dumps(done.results)  # folders that are gone
    assert len(page) < 3_000_000
    assert not any(part in page for part in ("http:", "https:", "@import", "<script"))
    assert page.count('<img src="data:image/') >= 8 + 6 * 5 * 3 + 4
    for query in done.results["queries"]:
        assert all(f">{answer['uncertainty']:.3f}<" in page for answer in query["answers"]["vacsr"])


def test_the_commands_it_names_work(done: Done) -> None:
    program, *arguments = shlex.split(done.text.splitlines()[-1].partition("try: ")[2])
    assert program == "vacsr"
    evaluated = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert evaluated.exit_code == 0, evaluated.output
    assert f"{done.results['methods']['vacsr']['test.rsum']:.1f}" in evaluated.stdout
    words = ["score", str(done.out / "vacsr"), "--image", str(done.out / "scene.png"), "--text", "a red star"]
    graded = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert graded.exit_code == 0, graded.output


def test_table_page_and_json_agree_with_the_saved_models(done: Done) -> None:
    assert done.text.startswith((done.out / "table.md").read_text(encoding="utf-8").rstrip("\n"))
    page, truth = (done.out / "index.html").read_text(encoding="utf-8"), scene_truth(WORLD, done.world.pairs)
    assert truth is not None
    for name in METHODS:
        scorer = PairScorer.from_pretrained(done.out / name, device="cpu")
        (result,) = evaluate_retrieval(scorer, done.world.pairs, truth=truth).results
        found = done.results["methods"][name]
        assert found == pytest.approx({key: look_up({"test": result}, key) for key in found})
        row = next(line for line in done.text.splitlines() if line.startswith(f"| {name}"))
        cells = [cell.strip().strip("*") for cell in row.strip("| ").split("|")]
        numbers = list(found.values())
        assert cells[1:5] == [f"{number:.1f}" for number in numbers[:4]]
        assert all(f">{number:.1f}<" in page for number in numbers[:4])
        assert (cells[5] == "–") == (numbers[4] is None) == (name != "vacsr")


def test_sigma_by_kind_of_pair(done: Done) -> None:
    truth, kinds = scene_truth(WORLD, done.world.pairs), done.results["kinds"]["vacsr"]
    assert truth is not None
    grades, free = truth.grades, ~truth.labelled
    hard = (grades >= 0.5) & ~truth.relevant  # as the page says
    masks = {"positives": truth.labelled, "false_negatives": truth.false_negative, "hard": hard, "easy": grades < 0.25}
    scores = PairScorer.from_pretrained(done.out / "vacsr", device="cpu").score_set(done.world.pairs)
    for kind, mask in masks.items():
        sigma = scores.uncertainty(*mask.nonzero().unbind(1))
        assert sigma is not None
        assert kinds[kind]["pairs"] == int(mask.sum())
        assert kinds[kind]["sigma"]["median"] == pytest.approx(float(np.median(sigma.numpy())))
        assert f"{np.median(sigma.numpy()):.3f}" in done.text
    world = done.results["world"]
    assert world["false_negatives"] == int((truth.relevant & free).sum())
    assert f"{world['images_per_caption']:.1f} images" in done.text
    assert f"{world['false_negatives']:,} false negatives" in done.text


@pytest.mark.slow
@pytest.mark.long
def test_it_repeats_itself_to_the_byte(done: Done) -> None:
    before = {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}
    assert run_demo(done.out, seed=3, changes=SHORT) == done.text
    assert {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()} == before


def test_only_its_own_results_are_overwritten(done: Done, tmp_path: Path) -> None:
    claim_folder(done.out)
    for name in (RESULTS, TABLE, PAGE, "vacsr"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).mkdir() if name == "vacsr" else (tmp_path / name / name).write_text('{"title": "x"}')
        with pytest.raises(UsageError, match="--out"):
            run_demo(tmp_path / name)
    with pytest.raises(EnvironmentProblem):
        run_demo(tmp_path / TABLE / TABLE)


@pytest.mark.slow
def test_an_error_in_a_worker_is_the_callers(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())  # those of other tests
    with pytest.raises(VacsrError, match="batch"):
        run_demo(tmp_path, changes=merge(SHORT, {"train": {"batch_size": 4096}}))
    assert list(tmp_path.iterdir()) == []
    assert set(multiprocessing.active_children()) <= before


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
