"""The demo on a small budget: its numbers against the saved models, its page, what it repeats and refuses."""

import hashlib
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from vacsr.cli import app
from vacsr.data.formats import parse_spec
from vacsr.data.scenes import SceneWorld, load_scenes
from vacsr.demo import (
    ALBUM,
    METHODS,
    METRICS,
    PAGE,
    PICTURE,
    RESULTS,
    TABLE,
    DemoConfig,
    claim_folder,
    load_towers,
    run_demo,
)
from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.evaluate.report import evaluate_retrieval
from vacsr.evaluate.truth import scene_truth
from vacsr.scoring import PairScorer

SMALL = DemoConfig(images=80, held_out=40, epochs=2)


class Done(NamedTuple):
    out: Path
    text: str
    world: SceneWorld
    results: dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("demo") / "with space"
    text = run_demo(out, seed=3, config=SMALL, progress=False)
    world = load_scenes(parse_spec(f"{SMALL.pairs(3)},split=test"))
    return Done(out, text, world, json.loads((out / "results.json").read_text(encoding="utf-8")))


def test_the_page_stands_alone(done: Done) -> None:
    page = (done.out / "index.html").read_text(encoding="utf-8")
    assert {path.name for path in done.out.iterdir()} == {RESULTS, TABLE, PAGE, PICTURE, ALBUM, *METHODS}
    assert len(page) < 3_000_000
    assert not any(part in page for part in ("http:", "https:", "@import", "<script"))
    assert page.count('<img src="data:image/') == 3 * 2 * 5 + 2 * 6 * 2
    parts = [page.index(f'<section id="{name}"') for name in ("search", "wrong", "missing", "risk", "table")]
    assert parts == sorted(parts)


def test_the_commands_it_names_work(done: Done) -> None:
    program, *arguments = shlex.split(done.text.splitlines()[-1].partition("try: ")[2])
    assert program == "vacsr"
    evaluated = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert evaluated.exit_code == 0, evaluated.output
    words = ["score", str(done.out / "vacsr"), "--image", str(done.out / "scene.png"), "--text", "a red star"]
    graded = CliRunner().invoke(app, [*words, "--device", "cpu"])
    assert graded.exit_code == 0, graded.output


def test_its_album_can_be_searched_with_a_calibrated_model(done: Done, tmp_path: Path) -> None:
    run, index, found = str(done.out / "vacsr"), f"exact:{tmp_path / 'index'}", tmp_path / "found.json"
    for command in (
        ["index", "add", index, "--run", run, "--pairs", str(done.out / ALBUM)],
        ["search", run, "--index", index, "--text", "a red heart", "--json", str(found)],
    ):
        result = CliRunner().invoke(app, [*command, "--device", "cpu"])
        assert result.exit_code == 0, result.output
    results = json.loads(found.read_text(encoding="utf-8"))
    assert results["index_size"] == SMALL.held_out
    assert results["precision"] == 0.9
    assert results["confident"] is not None
    assert not results["note"]


def test_table_page_and_json_agree_with_the_saved_models(done: Done) -> None:
    """The saved models read photos; the demo measured their heads on features of the same towers."""
    assert done.text.startswith((done.out / "table.md").read_text(encoding="utf-8").rstrip("\n"))
    page, truth = (
        (done.out / "index.html").read_text(encoding="utf-8"),
        scene_truth(done.results["pairs"], done.world.pairs),
    )
    assert truth is not None
    for name in METHODS:
        scorer = PairScorer.from_pretrained(done.out / name, device="cpu")
        best = scorer.score_set(done.world.pairs).topk(5, direction="t2i").index
        right = truth.relevant[best, torch.arange(len(best))[:, None]].double()
        (result,) = evaluate_retrieval(scorer, done.world.pairs, truth=truth).results
        values = done.results["methods"][name]
        assert list(values) == list(METRICS)
        assert values["precision_at_1"] == pytest.approx(100 * float(right[:, 0].mean()))
        assert values["precision_at_5"] == pytest.approx(100 * float(right.mean()))
        assert values["map_at_r"] == pytest.approx(result["exact"]["map_at_r"], abs=0.01)
        assert all(f"{value:.1f}" in page and f"{value:.1f}" in done.text for value in values.values())
    counts = done.results["captions"]
    assert sum(counts.values()) == len(done.world.pairs)
    assert done.results["labels"] == {"captions": 400, "wrong": pytest.approx(133, abs=20)}


def test_the_stored_towers_are_those_of_the_script() -> None:
    folder = Path(__file__).parents[1] / "src/vacsr/demo-towers"
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 5_000_000
    assert load_towers().has_towers


@pytest.mark.slow
@pytest.mark.long
def test_it_repeats_itself_to_the_byte(done: Done) -> None:
    before = {path: path.read_bytes() for path in done.out.rglob("*") if path.is_file()}
    assert run_demo(done.out, seed=3, config=SMALL, progress=False) == done.text
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
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_said_and_has_its_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "vacsr", "demo", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "demo: step 1 of 7, drawing scenes\n"
        process.send_signal(number)
        assert process.stderr.read().splitlines()[-1] == "stopped"
    assert process.returncode == 130
