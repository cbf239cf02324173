"""Tables: finished cells are kept, runs of another recipe are in the way, and the figures are those of the reports."""

import json
import re
import shutil
import signal
import statistics
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vacsr.compare import compare, list_cells, read_table, redraw
from vacsr.compare.formats import FILES, differences_to_markdown, to_markdown
from vacsr.errors import EnvironmentProblem, NonFiniteLoss, OtherRun, UsageError
from vacsr.files import read_tensors, write_tensors
from vacsr.train import Run, run_recipe
from vacsr.train.checkpoint import FILE

TABLE: dict[str, Any] = {
    "title": "Small world",
    "base": {
        "data": {"pairs": "synthetic:images=20,held_out=10,per_image=2"},
        "backbone": {"head": {"dim": 4}},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu", "log_every": 1},
    },
    "rows": [
        {"name": "infonce", "set": {"method": {"name": "infonce"}}},
        {"name": "ours", "set": {"method": {"name": "vacsr", "preset": "paper"}}},
    ],
    "settings": [{"name": "clean"}, {"name": "noise-50", "set": {"data": {"noise": {"ratio": 0.5}}}}],
    "seeds": [0, 1],
    "columns": [{"key": "test.rsum", "name": "RSUM"}, {"key": "test.uncertainty.corr_r1_i2t", "best": "low"}],
}
NAMES = [f"{s}/{r}/seed-{n}" for r in ("infonce", "ours") for s in ("clean", "noise-50") for n in (0, 1)]


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "table.yaml"
    path.write_text(yaml.safe_dump({**TABLE, **changes}), encoding="utf-8")
    return path


def times(out: Path) -> dict[str, int]:
    """When each cell's weights were last written."""
    return {name: (out / name / "model" / "model.safetensors").stat().st_mtime_ns for name in NAMES}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished table; tests copy it or leave it as it is."""
    folder = tmp_path_factory.mktemp("whole")
    compare(read_table(write(folder)), folder / "out")
    return folder / "out"


def copy(whole: Path, to: Path) -> Path:
    return Path(shutil.copytree(whole, to))


def test_every_cell_is_a_run_folder(whole: Path) -> None:
    assert sorted(str(path.parent.relative_to(whole)) for path in whole.rglob("report.json")) == sorted(NAMES)
    config = yaml.safe_load((whole / "noise-50/ours/seed-1/config.yaml").read_text(encoding="utf-8"))
    assert config["train"]["seed"] == config["data"]["noise"]["seed"] == 1
    assert config["data"]["noise"]["ratio"] == 0.5
    assert config["method"]["name"] == "vacsr"
    assert config["method"]["adapter"]["residual"] == "none", "the preset"
    assert (whole / "noise-50/ours/seed-1/noise.safetensors").is_file()
    heads = [read_tensors(whole / name / "model/model.safetensors")[0]["image_head.last.weight"] for name in NAMES]
    assert not any(torch.equal(one, two) for one, two in combinations(heads, 2)), "seeds and settings differ"


def test_the_table_is_what_the_reports_say(whole: Path) -> None:
    reports = {name: json.loads((whole / name / "report.json").read_text(encoding="utf-8")) for name in NAMES}
    rsum = {
        name: next(r["rsum"] for r in report["results"] if r["split"] == "test") for name, report in reports.items()
    }
    lines = (whole / "table.md").read_text(encoding="utf-8").splitlines()
    for setting in ("clean", "noise-50"):
        start = lines.index(f"## {setting}")
        values = {row: [rsum[f"{setting}/{row}/seed-{n}"] for n in (0, 1)] for row in ("infonce", "ours")}
        means = {row: sum(both) / 2 for row, both in values.items()}
        for row, line in zip(("infonce", "ours"), lines[start + 4 : start + 6], strict=True):
            mean = f"{means[row]:.1f}"
            bold = f"**{mean}**" if row == max(means, key=lambda name: means[name]) else mean
            assert line.startswith(f"| {row} | 2 | {bold} ± {statistics.stdev(values[row]):.1f} |")
        assert lines[start + 4].endswith("| – |"), "a cosine has no uncertainty"
    results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    found = {f"{c['setting']}/{c['row']}/seed-{c['seed']}": c["values"]["test.rsum"] for c in results["cells"]}
    assert found == rsum


@pytest.mark.parametrize("form", FILES)
def test_every_format_is_printed_without_the_differences_that_only_people_read(
    whole: Path, tmp_path: Path, vacsr: Callable[..., Any], form: str
) -> None:
    stored = whole / "results.json"
    shown = vacsr("compare", write(tmp_path), "--from", stored, "--against", "infonce", "--format", form)
    table = (whole / FILES[form]).read_text(encoding="utf-8")
    told = differences_to_markdown(redraw(read_table(write(tmp_path)), stored), "infonce")
    assert "| ours | " in told
    expected = (f"{table}\n{told}", "") if form == "md" else (table, told)
    assert (shown.code, shown.out, shown.err) == (0, *expected)


def test_rows_are_tested_by_the_outcomes_of_their_runs(whole: Path) -> None:
    results = json.loads((whole / "results.json").read_text(encoding="utf-8"))
    assert results["baselines"] == ["infonce"]
    assert [(c["setting"], c["row"], c["key"], c["against"]) for c in results["comparisons"]] == [
        (setting, "ours", "test.rsum", "infonce") for setting in ("clean", "noise-50")
    ]
    for found in results["comparisons"]:
        both = [results["summaries"][found["setting"]][row]["test.rsum"]["mean"] for row in ("ours", "infonce")]
        assert found["difference"] == pytest.approx(both[0] - both[1])
        assert found["low"] <= found["difference"] <= found["high"]
        assert 0 < found["p"] <= 1


def test_only_what_is_finished_is_collected(whole: Path, tmp_path: Path, vacsr: Callable[..., Any]) -> None:
    out, file = copy(whole, tmp_path / "out"), write(tmp_path)
    for name in NAMES[2:]:
        shutil.rmtree(out / name)
    shown = vacsr("compare", file, "--out", out, "--only-collect")
    assert "| infonce | 2 |" in shown.out
    assert "| ours |" not in shown.out
    assert sorted(str(path.parent.relative_to(out)) for path in out.rglob("report.json")) == NAMES[:2]


def test_what_cannot_be_collected(whole: Path, tmp_path: Path, vacsr: Callable[..., Any]) -> None:
    out, file = copy(whole, tmp_path / "out"), write(tmp_path)
    answer = vacsr("compare", file, "--out", tmp_path / "none", "--only-collect")
    assert answer.refused(4, "no cell of the table is finished in", "leave --only-collect out")
    assert not (tmp_path / "none").exists()
    for option in (
        ["--row", "ours"],
        ["--setting", "clean"],
        ["--jobs", "2"],
        ["--fresh"],
        ["--seeds", "0"],
        ["--only-collect"],
    ):
        assert vacsr("compare", file, "--from", whole / "results.json", *option).refused(2, "--from only reads stored")
    assert vacsr("compare", file, "--out", out, "--format", "pdf").refused(2, "choose one of: md, csv, latex, html")
    slip = write(tmp_path, columns=[{"key": "test.rsum"}, {"key": "test.rsun", "name": "slip"}])
    assert "warning: no run has a number for: slip (test.rsun)" in vacsr("compare", slip, "--out", out).err


def test_the_table_is_drawn_again_from_its_data(whole: Path, tmp_path: Path, vacsr: Callable[..., Any]) -> None:
    file, again = write(tmp_path), tmp_path / "again"
    shown = vacsr("compare", file, "--from", whole / "results.json", "--out", again)
    assert shown.out == (whole / "table.md").read_text(encoding="utf-8")
    for name in ("table.md", "table.csv", "table.tex", "table.html", "results.json"):
        assert (again / name).read_text(encoding="utf-8") == (whole / name).read_text(encoding="utf-8")
    stored_only = write(tmp_path, rows=[{**row, "seeds": []} for row in TABLE["rows"]])
    assert vacsr("compare", stored_only, "--from", whole / "results.json").out == shown.out
    assert not list(list_cells(read_table(stored_only), tmp_path, seeds=[0]))
    assert vacsr("compare", stored_only, "--row", "ours").refused(2, "no row 'ours' to run")
    assert vacsr("compare", stored_only, "--setting", "other").refused(2, "no setting 'other' to run")
    other = write(tmp_path, rows=[{"name": "other"}])
    assert vacsr("compare", other, "--from", whole / "results.json").refused(4, "has no cell of this table's rows")


def test_tables_may_share_their_runs(whole: Path, tmp_path: Path) -> None:
    runs, out = copy(whole, tmp_path / "runs"), tmp_path / "table"
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("report.json")}
    compare(read_table(write(tmp_path, rows=TABLE["rows"][1:])), out, runs=runs)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("report.json")} == before
    assert sorted(path.name for path in out.iterdir()) == [
        "results.json", "table.csv", "table.html", "table.md", "table.tex",
    ]  # fmt: skip


def test_a_failed_cell_does_not_stop_the_others(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, file = tmp_path / "out", write(tmp_path)

    def failing(recipe: Any, folder: Path, **options: Any) -> Run:
        if folder == out / NAMES[2]:
            raise NonFiniteLoss("'kl' is not finite")
        return run_recipe(recipe, folder, **options)

    monkeypatch.setattr("vacsr.compare.cells.run_recipe", failing)
    with pytest.raises(NonFiniteLoss, match=r"noise-50 / infonce / seed 0: 'kl' is not finite"):
        compare(read_table(file), out)
    assert len(json.loads((out / "results.json").read_text(encoding="utf-8"))["cells"]) == 7
    assert "| infonce | 1 |" in (out / "table.md").read_text(encoding="utf-8")
    monkeypatch.undo()
    done = {name: (out / name / "report.json").stat().st_mtime_ns for name in NAMES if name != NAMES[2]}
    compare(read_table(file), out)
    assert {name: (out / name / "report.json").stat().st_mtime_ns for name in done} == done
    for name in ("table.md", "results.json"):
        assert (out / name).read_text(encoding="utf-8") == (whole / name).read_text(encoding="utf-8")


def test_a_checkpoint_of_other_data_is_refused_or_with_fresh_forgotten(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vacsr.train.step import TrainStep

    original, file, out = TrainStep.__call__, write(tmp_path, seeds=[0]), tmp_path / "out"

    def interrupting(self: TrainStep, batch: Any, step: int, **options: Any) -> torch.Tensor:
        if step == 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, batch, step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", interrupting)
        with pytest.raises(KeyboardInterrupt):
            compare(read_table(file), out)
    assert [path.parent.name for path in out.rglob("config.yaml")] == ["seed-0"], "one Ctrl-C stops the whole table"
    (path,) = out.rglob(FILE)
    tensors, metadata = read_tensors(path)
    other = {**json.loads(metadata["description"]), "training data": "of yesterday"}
    write_tensors(path, tensors, metadata={**metadata, "description": json.dumps(other)})
    with pytest.raises(OtherRun, match=r"belongs to a run with another .*: training data was .* add --fresh"):
        compare(read_table(file), out)
    assert read_tensors(path)[1]["description"] == json.dumps(other), "left as it is"
    compare(read_table(file), out, fresh=True)
    for name in (name for name in NAMES if name.endswith("seed-0")):
        found, expected = (read_tensors(root / name / "model/model.safetensors")[0] for root in (out, whole))
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"torchrun has started 2 ranks — start it without torchrun"):
        compare(read_table(write(tmp_path)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_in_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentProblem, match=r"clean / infonce / seed 0: wandb is not installed") as caught:
        compare(read_table(write(tmp_path, seeds=[0]), ["train.trackers=[wandb]"]), tmp_path / "out")
    assert caught.value.exit_code == 3


def test_one_row_or_setting_at_a_time(whole: Path, tmp_path: Path) -> None:
    table, out = read_table(write(tmp_path)), tmp_path / "out"
    compare(table, out, rows=["ours"], settings=["clean"])
    assert sorted(str(path.parent.parent.relative_to(out)) for path in out.rglob("report.json")) == ["clean/ours"] * 2
    compare(table, out, rows=["ours"])
    compare(table, out, rows=["infonce"])
    assert (out / "table.md").read_text(encoding="utf-8") == (whole / "table.md").read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="no row 'our' to run — the table has: infonce, ours"):
        compare(table, out, rows=["ours", "our"])


def test_other_seeds(whole: Path, tmp_path: Path) -> None:
    out = copy(whole, tmp_path / "out")
    result = compare(read_table(write(tmp_path)), out, seeds=[1, 1])
    assert [value.seed for value in result.values] == [1] * 4, "a seed given twice counts once"


def test_a_setting_may_have_seeds_of_its_own(whole: Path, tmp_path: Path) -> None:
    """They come before a row's, a row's before the table's, and the command line's before all."""
    rows = [{**TABLE["rows"][0], "seeds": [5]}, TABLE["rows"][1]]
    settings = [TABLE["settings"][0], {**TABLE["settings"][1], "seeds": [1]}]
    table, out = read_table(write(tmp_path, rows=rows, settings=settings)), tmp_path / "out"
    listed = [(cell.row, cell.setting, cell.seed) for cell in list_cells(table, out)]
    assert listed == [
        ("infonce", "clean", 5),
        ("infonce", "noise-50", 1),
        ("ours", "clean", 0),
        ("ours", "clean", 1),
        ("ours", "noise-50", 1),
    ]
    assert {cell.seed for cell in list_cells(table, out, seeds=[7])} == {7}
    noisy = [cell for cell in list_cells(table, out) if cell.setting == "noise-50"]
    assert {cell.recipe.data.noise.seed for cell in noisy} == {1}, "the noise has the cell's seed too"
    own = read_table(write(tmp_path, settings=settings))
    lines = to_markdown(compare(own, copy(whole, out))).splitlines()
    counts = {name: lines[lines.index(f"## {name}") + 4].split(" | ")[1] for name in ("clean", "noise-50")}
    assert counts == {"clean": "2", "noise-50": "1"}


def test_with_fresh_a_changed_row_runs_again_from_its_start(whole: Path, tmp_path: Path) -> None:
    out, fresh = copy(whole, tmp_path / "out"), tmp_path / "fresh"
    before = times(out)
    rows = [TABLE["rows"][0], {"name": "ours", "set": {"method": {"name": "vacsr"}, "train": {"lr": 0.01}}}]
    table = read_table(write(tmp_path, rows=rows))
    compare(table, out, fresh=True)
    compare(table, fresh)
    after = times(out)
    assert {name for name in NAMES if after[name] != before[name]} == {name for name in NAMES if "ours" in name}
    for name in ("table.md", "results.json"):
        assert (out / name).read_text(encoding="utf-8") == (fresh / name).read_text(encoding="utf-8")
    for name in NAMES:
        found, expected = (read_tensors(root / name / "model/model.safetensors")[0] for root in (out, fresh))
        assert all(torch.equal(found[key], expected[key]) for key in expected), name


def test_a_changed_table_is_refused_before_anything_runs(
    whole: Path, tmp_path: Path, vacsr: Callable[..., Any]
) -> None:
    out, file = copy(whole, tmp_path / "out"), write(tmp_path)
    (out / NAMES[0] / "report.json").unlink()  # a checkpoint alone is a run, too
    shutil.rmtree(out / NAMES[1])  # this one could run
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    shown = vacsr("compare", file, "--out", out, "--set", "train.epochs=3")
    message = f"{out / NAMES[0]} holds a run of another recipe: train.epochs was 1 and is now 3 (and 6 more"
    assert shown.refused(2, message, "choose another --out, or add --fresh to start those cells again")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_only_the_chosen_rows_are_in_the_way(whole: Path, tmp_path: Path) -> None:
    out = copy(whole, tmp_path / "out")
    rows = [TABLE["rows"][0], {"name": "ours", "set": {"method": {"name": "vacsr"}, "train": {"lr": 0.01}}}]
    table = read_table(write(tmp_path, rows=rows))
    assert {value.row for value in compare(table, out, rows=["infonce"]).values} == {"infonce"}
    with pytest.raises(UsageError, match=r"ours/seed-0 holds a run of another recipe: .* was .* and is now "):
        compare(table, out)


def test_fields_without_effect_keep_a_cell_finished(whole: Path, tmp_path: Path) -> None:
    changes = ["log_every=7", "checkpoint_every=2", "trackers=[jsonl, tensorboard]", "device=auto"]
    table = read_table(write(tmp_path), [f"train.{change}" for change in changes])
    assert all(cell.finished() and cell.outdated() is None for cell in list_cells(table, whole))


def test_how_a_loss_is_walked_keeps_a_cell_finished(whole: Path, tmp_path: Path) -> None:
    out = copy(whole, tmp_path / "out")
    for config in out.rglob("config.yaml"):
        raw = yaml.safe_load(config.read_text(encoding="utf-8"))
        raw["train"]["tile"] = 0
        if raw["method"]["name"] == "vacsr":
            raw["method"]["objective"]["fused"] = False
        config.write_text(yaml.safe_dump(raw), encoding="utf-8")
    assert any("fused: false" in config.read_text(encoding="utf-8") for config in out.rglob("config.yaml"))
    table = read_table(write(tmp_path))
    assert all(cell.finished() and cell.outdated() is None for cell in list_cells(table, out))
    for report in out.rglob("report.json"):
        report.unlink()
    unfinished = [cell for cell in list_cells(table, out) if (cell.folder / "checkpoint/state.safetensors").is_file()]
    assert unfinished
    assert {cell.outdated() for cell in unfinished} == {"train.tile was 0 and is now 'auto'"} | {
        "method.objective.fused was False and is now 'auto'"
        for cell in unfinished
        if cell.recipe.method.name == "vacsr"
    }


def test_a_recipe_of_an_older_release_has_the_defaults_of_new_fields(whole: Path, tmp_path: Path) -> None:
    out = copy(whole, tmp_path / "out")
    for config in out.rglob("config.yaml"):
        raw = yaml.safe_load(config.read_text(encoding="utf-8"))
        del raw["train"]["decay_at"], raw["evaluate"]["bins"]
        config.write_text(yaml.safe_dump(raw), encoding="utf-8")
    table = read_table(write(tmp_path))
    assert all(cell.finished() and cell.outdated() is None for cell in list_cells(table, out))
    (first, *_) = list_cells(read_table(write(tmp_path), ["train.decay_at=0.5"]), out)
    assert first.outdated() == "train.decay_at was 0.6 and is now 0.5"


@pytest.mark.parametrize("text", ["train: {epochs: 1, of_the_past: 2}", None])
def test_a_recipe_that_cannot_be_read_is_another(whole: Path, tmp_path: Path, text: str | None) -> None:
    out = copy(whole, tmp_path / "out")
    config = out / NAMES[2] / "config.yaml"
    config.unlink()
    if text is not None:
        config.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"noise-50/infonce/seed-0 holds a run .*: its recipe cannot be read: "):
        compare(read_table(write(tmp_path)), out)
    compare(read_table(write(tmp_path)), out, fresh=True)
    assert (out / "table.md").read_text(encoding="utf-8") == (whole / "table.md").read_text(encoding="utf-8")


def test_what_never_got_far_is_not_in_the_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    left = out / NAMES[0] / "config.yaml"
    left.parent.mkdir(parents=True)
    left.write_text("train: {epochs: 77}", encoding="utf-8")
    assert [cell.outdated() for cell in list_cells(read_table(write(tmp_path)), out)] == [None] * 8


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match=r"out/deep cannot be a folder: .*/out is a file — choose another --out"):
        compare(read_table(write(tmp_path)), tmp_path / "out" / "deep")


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, seeds=[0]))
    with pytest.raises(EnvironmentProblem, match="cannot make the folder"):
        compare(table, tmp_path / ("x" * 300), runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_changed_cell_that_is_killed_is_not_taken_for_finished(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy(whole, tmp_path / "out")
    table = read_table(write(tmp_path), ["train.lr=0.01"])

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vacsr.evaluate.report.evaluate_retrieval", killed)
    with pytest.raises(KeyboardInterrupt):
        compare(table, out, rows=["ours"], fresh=True)
    monkeypatch.undo()
    assert not next(cell for cell in list_cells(table, out) if cell.row == "ours").finished()


def test_a_changed_report_does_not_train_again(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = copy(whole, tmp_path / "out")
    monkeypatch.setattr("vacsr.train.step.TrainStep.__call__", lambda *_: pytest.fail("trains"))
    result = compare(read_table(write(tmp_path), ["evaluate.splits=[test]"]), out)
    assert len(result.values) == 8
    assert all(value.report.keys() == {"test", "test/flickr"} for value in result.values)


def test_the_page_is_drawn_with_and_without_the_runs(whole: Path, tmp_path: Path, vacsr: Callable[..., Any]) -> None:
    out, again = copy(whole, tmp_path / "out"), tmp_path / "again"
    gallery = {"setting": "clean", "rows": ["ours", "infonce"]}
    file = write(tmp_path, page={"drawn": ["ours"], "gallery": gallery})
    assert vacsr("compare", file, "--out", out, "--page", "--only-collect").code == 0
    page = (out / "page.html").read_text(encoding="utf-8")
    sections = re.findall(r'<section id="(.*?)"', page)
    assert sections == ["tables", "sigma", "scores", "training", "answers", "intervals", "model"]
    assert page.count('<article class="query') == 8
    options = ("compare", file, "--from", out / "results.json", "--page")
    assert vacsr(*options).refused(2, "add --out")
    assert vacsr(*options, "--out", again).code == 0
    drawn = (again / "page.html").read_text(encoding="utf-8")
    assert 'id="training"' in drawn
    assert "need the trained models" in drawn, "which are not part of the data"
    assert (again / "records.json").read_bytes() == (out / "records.json").read_bytes()
    third = tmp_path / "third"
    assert vacsr("compare", file, "--from", again / "results.json", "--page", "--out", third).code == 0
    assert (third / "page.html").read_text(encoding="utf-8") == drawn
    (out / "records.json").write_text("{", encoding="utf-8")
    assert vacsr(*options, "--out", again).refused(4, "does not hold records of runs")
