"""The demo on a smaller budget: what it writes, that it repeats itself, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vacsr import demo
from vacsr.cli import app
from vacsr.config import TrainConfig
from vacsr.errors import EnvironmentProblem, UsageError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small world and one epoch; everything else as in the real one."""
    monkeypatch.setattr(demo, "world_spec", lambda seed: f"synthetic:images=80,seed={seed}")
    monkeypatch.setattr(
        demo, "train_config", lambda seed: TrainConfig(epochs=1, batch_size=32, seed=seed, device="cpu")
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("short")
def test_it_leaves_models_and_figures_and_repeats_itself(tmp_path: Path) -> None:
    out = tmp_path / "made" / "demo"
    text = demo.run_demo(out)
    first = snapshot(out)
    assert {f"{name}/model/model.safetensors" for name in demo.METHODS} < set(first)
    assert {"table.md", "results.json"} < set(first)
    assert text.startswith((out / "table.md").read_text(encoding="utf-8").rstrip("\n"))
    assert demo.run_demo(out) == text
    assert snapshot(out) == first


@pytest.mark.usefixtures("short")
def test_the_table_shows_the_figures_as_they_are(tmp_path: Path) -> None:
    text = demo.run_demo(tmp_path, seed=1)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["seed"] == 1
    assert results["world"]["images"] == 20
    for name, figures in results["methods"].items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:4] == [f"{figures[key]:.1f}" for key in ("rsum", "map_at_r", "tau_b")]
        assert (cells[4] == "–") == (name != "vacsr")
        assert (figures["auroc_false_negative"] is None) == (name != "vacsr")


@pytest.mark.usefixtures("short")
def test_what_it_says_to_type_next_works(tmp_path: Path) -> None:
    text = demo.run_demo(tmp_path / "with space")
    program, *arguments = shlex.split(text.splitlines()[-1].partition("try: ")[2])
    assert program == "vacsr"
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "with space" / "results.json").read_text(encoding="utf-8"))
    assert f"{results['methods']['vacsr']['rsum']:.1f}" in done.stdout


@pytest.mark.usefixtures("short")
def test_threads_are_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    demo.run_demo(tmp_path)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["results.json", "table.md", "vacsr"])
def test_results_of_others_are_not_overwritten(tmp_path: Path, name: str) -> None:
    if name == "vacsr":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text('{"title": "a comparison"}')
    with pytest.raises(UsageError, match=f"holds {name}.*--out"):
        demo.run_demo(tmp_path)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="choose another --out"):
        demo.run_demo(tmp_path / "file")


def test_an_interrupt_stops_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(name: str, *, seed: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train_method", stopped)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(tmp_path)
    assert snapshot(tmp_path) == {}


def test_a_table_lines_up() -> None:
    lines = demo.markdown_table([["method", "σ ↑"], ["a", "1.0"], ["longer name", "–"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
