"""Few-shot tables: the start is trained once, cells are kept, data sets are averaged by both rules, rows are tested."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from vacsr.compare import Cell, compare, list_cells, read_table
from vacsr.compare.formats import FILES
from vacsr.errors import UsageError
from vacsr.evaluate.fewshot import averaged_metrics, harmonic_mean, joint_metrics
from vacsr.fewshot.config import FewshotRecipe
from vacsr.fewshot.model import FewshotTask
from vacsr.files import read_tensors

START: dict[str, Any] = {
    "data": {"pairs": "scenes:images=64,held_out=4,per_image=1,size=32,subject=1"},
    "backbone": {
        "spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
        "image_output": "norm",
        "text_output": "norm",
        "pooling": "cls",
        "head": {"kind": "linear", "dim": 8},
    },
    "method": {"name": "infonce"},
    "train": {"epochs": 2, "batch_size": 32, "lr": 0.003, "device": "cpu"},
    "evaluate": {"splits": ["dev"]},
}
RECIPE: dict[str, Any] = {
    "task": "fewshot",
    "data": {"spec": "scenes:classes=6,train=3,test=5,size=32", "shots": 2},
    "train": {"epochs": 2, "batch_size": 3, "device": "cpu", "workers": 1, "crop": [0.8, 1.0]},
}
TABLE: dict[str, Any] = {
    "title": "Drawn classes",
    "recipe": "recipe.yaml",
    "base": {"data": {"spec": "scenes:classes=6,train=3,test=5,size=32,seed={setting}"}},
    "rows": [
        {"name": "zeroshot", "set": {"method": {"name": "zeroshot"}}},
        {"name": "coop", "set": {"method": {"name": "coop", "context": "a picture of a"}, "train": {"lr": 0.5}}},
        {"name": "ours", "set": {"method": {"name": "vacsr"}, "train": {"lr": 0.005}}},
    ],
    "settings": [{"name": "4"}, {"name": "7"}],
    "average": "average",
    "seeds": [1, 2],
    "draws": 1000,
    "columns": [
        {"key": "base.accuracy", "name": "base"},
        {"key": "new.accuracy", "name": "new"},
        {"key": "hm", "name": "HM", "digits": 2},
        {"key": "mean_hm", "name": "mean of HMs", "digits": 2, "settings": ["average"]},
        {"key": "base.ece", "name": "ECE", "best": "low", "settings": ["4", "7"]},
    ],
}
TARGETS = {name: f"scenes:classes=6,train=1,test=5,size=32,domain={name}" for name in ("blur", "texture")}
DOMAIN: dict[str, Any] = {
    "base": {"data": {"protocol": "domain", "targets": TARGETS}},
    "rows": TABLE["rows"][:2],
    "settings": [{"name": "domain"}],
    "average": "",
    "seeds": [1],
    "columns": [{"key": "source.accuracy"}, {"key": "blur.accuracy"}, {"key": "mean_target"}, {"key": "trainable"}],
}


def write(folder: Path, *, begin: dict[str, Any] = START, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "start.yaml").write_text(yaml.safe_dump(begin), encoding="utf-8")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    given = {**TABLE, "start": {"recipe": "start.yaml", "folder": str(folder / "start")}, **changes}
    path = folder / "table.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished table in `out`, and the start beside it; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("whole")
    compare(read_table(write(folder)), folder / "out")
    return folder


def written(root: Path, name: str = "model.safetensors") -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(root.rglob(name))}


def reports(out: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    found = {}
    for path in out.rglob("report.json"):
        setting, row, seed = path.parent.relative_to(out).parts
        found[setting, row, int(seed.removeprefix("seed-"))] = json.loads(path.read_text(encoding="utf-8"))
    return found


def accuracy(report: dict[str, Any], split: str) -> float:
    return float(next(result["accuracy"] for result in report["results"] if result["split"] == split))


def test_cells_start_from_one_model_and_have_their_seed(whole: Path) -> None:
    found = list(list_cells(read_table(whole / "table.yaml"), whole / "out"))
    assert len(found) == 3 * 2 * 2
    assert (whole / "start/report.json").is_file()
    for cell in found:
        config = yaml.safe_load((cell.folder / "config.yaml").read_text(encoding="utf-8"))
        assert config["data"]["seed"] == config["train"]["seed"] == cell.seed
        assert config["data"]["spec"].endswith(f"seed={cell.setting}")
        assert config["backbone"]["start"] == str(whole / "start")
    hashes = {(setting, seed): report["shots_hash"] for (setting, _, seed), report in reports(whole / "out").items()}
    assert len(set(hashes.values())) == 4, "every setting and seed has its shots, the same for all rows"


def test_figures_are_those_of_the_reports_and_averages_follow_both_rules(whole: Path) -> None:
    found = reports(whole / "out")
    results = json.loads((whole / "out/results.json").read_text(encoding="utf-8"))
    shown = {(c["setting"], c["row"], c["seed"]): c["values"] for c in results["cells"]}
    assert len(shown) == 12 + 6
    for row in ("zeroshot", "coop", "ours"):
        for seed in (1, 2):
            scores = []
            for setting in ("4", "7"):
                report = found[setting, row, seed]
                score = (accuracy(report, "base"), accuracy(report, "new"))
                values = shown[setting, row, seed]
                assert (values["base.accuracy"], values["new.accuracy"], values["hm"]) == (*score, report["hm"])
                scores.append(score)
            values = shown["average", row, seed]
            base, new = (statistics.fmean(column) for column in zip(*scores, strict=True))
            assert (values["base.accuracy"], values["new.accuracy"]) == (pytest.approx(base), pytest.approx(new))
            assert values["hm"] == pytest.approx(harmonic_mean(base, new))
            assert values["mean_hm"] == pytest.approx(statistics.fmean(harmonic_mean(*score) for score in scores))


def test_every_format_has_the_columns_of_its_setting(whole: Path) -> None:
    text = {name: (whole / "out" / file).read_text(encoding="utf-8") for name, file in FILES.items()}
    first, *others = text["md"].split("\n## ")[1:]
    assert first.startswith("average\n\n| method | seeds | base | new | HM | mean of HMs |\n")
    assert [part.splitlines()[2] for part in others] == ["| method | seeds | base | new | HM | ECE |"] * 2
    assert all(part.count(" **") >= 4 and " ± " in part for part in (first, *others)), "best in bold, with deviations"
    assert text["latex"].count(r"\begin{tabular}{lrrrrr}") == 3
    assert text["csv"].splitlines()[0].endswith("HM,HM std,mean of HMs,mean of HMs std,ECE,ECE std")


def test_nothing_is_repeated(whole: Path) -> None:
    before = written(whole)
    compare(read_table(whole / "table.yaml", ["train.workers=2", "train.log_every=1"]), whole / "out")
    assert written(whole) == before


def test_a_changed_plan_is_refused_and_a_changed_report_is_not(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole / "out", tmp_path / "out"))
    with pytest.raises(UsageError, match=r"coop/seed-1 holds a run of another recipe: train.epochs was 2 and is now 3"):
        compare(read_table(whole / "table.yaml", ["train.epochs=3"]), out, rows=["coop"])
    models = written(out)
    compare(read_table(whole / "table.yaml", ["evaluate.bins=3"]), out, rows=["coop"], seeds=[1])
    found = {(s, r, n): report for (s, r, n), report in reports(out).items() if (r, n) == ("coop", 1)}
    assert len(found) == 2
    for place, report in found.items():
        assert accuracy(report, "base") == accuracy(reports(whole / "out")[place], "base"), "trained as before"
    assert written(out).keys() == models.keys()


def test_another_start_is_refused_or_trained_with_all_that_stands_on_it(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"settings": [{"name": "4"}], "rows": TABLE["rows"][:1]}
    shutil.copytree(whole / "start", tmp_path / "start")
    out, other = tmp_path / "out", {**START, "train": {**START["train"], "lr": 0.1}}
    compare(read_table(write(tmp_path, **small, seeds=[1])), out)
    table = read_table(write(tmp_path, begin=other, **small, seeds=[1, 2]))
    before = written(tmp_path)
    with pytest.raises(UsageError, match=r"start holds a run of another recipe: train.lr was .* and is now 0.1"):
        compare(table, out)
    assert written(tmp_path) == before
    compare(table, out, fresh=True)
    assert str(tmp_path / "start") in capsys.readouterr().err.replace("\n", "")
    after = written(tmp_path)
    assert (len(before), len(after)) == (2, 3)
    assert not {path for path, time in before.items() if after[path] == time}, "also the cell that was finished"


def test_a_start_that_no_cell_needs_is_not_trained(whole: Path, tmp_path: Path) -> None:
    table = read_table(write(tmp_path, settings=[{"name": "4"}]), [f"backbone.start={whole / 'start'}"])
    compare(table, tmp_path / "out", rows=["zeroshot"], seeds=[1])
    assert not (tmp_path / "start").exists()


@pytest.fixture(scope="module")
def domains(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("domains")
    table = read_table(write(folder, **DOMAIN), [f"backbone.start={whole / 'start'}"])
    compare(table, folder / "out")
    return folder


def test_domains_and_their_mean(domains: Path) -> None:
    results = json.loads((domains / "out/results.json").read_text(encoding="utf-8"))
    found = reports(domains / "out")
    for cell in results["cells"]:
        report, values = found[cell["setting"], cell["row"], cell["seed"]], cell["values"]
        assert [result["split"] for result in report["results"]] == ["source", "blur", "texture"]
        assert values["mean_target"] == pytest.approx((accuracy(report, "blur") + accuracy(report, "texture")) / 2)
        assert values["trainable"] == report["trainable"]
        assert (cell["row"] == "zeroshot") == (values["trainable"] == 0)


def test_another_target_tests_again_and_trains_nothing(
    whole: Path, domains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(domains / "out", tmp_path / "out"))
    changes = {**DOMAIN, "base": {"data": {"protocol": "domain", "targets": {"blur": TARGETS["blur"]}}}}
    monkeypatch.setattr(FewshotTask, "loss", lambda *_: pytest.fail("trains"))
    table = read_table(write(tmp_path, **changes), [f"backbone.start={whole / 'start'}"])
    compare(table, out, rows=["coop"])
    report = reports(out)["domain", "coop", 1]
    assert [result["split"] for result in report["results"]] == ["source", "blur"]
    assert accuracy(report, "blur") == accuracy(reports(domains / "out")["domain", "coop", 1], "blur")


# ----------------------------------------------------------------------------------------------------------- tests


def answers(out: Path, setting: str, row: str, seed: int) -> dict[str, list[bool]]:
    tensors, _ = read_tensors(out / setting / row / f"seed-{seed}" / "answers.safetensors")
    splits = [name.removesuffix(".label") for name in tensors if name.endswith(".label")]
    return {split: (tensors[f"{split}.label"] == tensors[f"{split}.predicted"]).tolist() for split in splits}


def test_rows_are_tested_against_the_best_baseline(whole: Path) -> None:
    results = json.loads((whole / "out/results.json").read_text(encoding="utf-8"))
    tested = {(c["setting"], c["key"]): c for c in results["comparisons"]}
    keys = ["base.accuracy", "new.accuracy", "hm"]
    expected = {(s, key) for s in ("4", "7", "average") for key in keys} | {("average", "mean_hm")}
    assert set(tested) == expected, "a calibration error is no mean over photos"
    for (setting, key), one in tested.items():
        means = {row: found[key]["mean"] for row, found in results["summaries"][setting].items() if key in found}
        assert one["row"] == "ours"
        assert means[one["against"]] == max(means["zeroshot"], means["coop"])
        assert one["difference"] == pytest.approx(means["ours"] - means[one["against"]])
        assert one["low"] <= one["difference"] <= one["high"]


@pytest.mark.parametrize("setting", ["4", "average"])
def test_an_interval_against_a_plain_bootstrap(whole: Path, setting: str) -> None:
    """The harmonic mean: photos drawn anew for each test set, all figures worked out again for every seed."""
    results = json.loads((whole / "out/results.json").read_text(encoding="utf-8"))
    one = next(c for c in results["comparisons"] if (c["setting"], c["key"]) == (setting, "hm"))
    sets = ["4", "7"] if setting == "average" else [setting]
    right = {
        (row, s, seed): answers(whole / "out", s, row, seed)
        for row in ("ours", one["against"]) for s in sets for seed in (1, 2)
    }  # fmt: skip
    generator = np.random.default_rng(5)

    def figure(row: str, chosen: dict[tuple[str, str], list[int]]) -> float:
        seeds = []
        for seed in (1, 2):
            means = {
                split: statistics.fmean(
                    100 * statistics.fmean(right[row, s, seed][split][i] for i in chosen[s, split]) for s in sets
                )
                for split in ("base", "new")
            }
            seeds.append(harmonic_mean(means["base"], means["new"]))
        return statistics.fmean(seeds)

    draws = []
    for _ in range(1500):
        chosen = {(s, split): generator.integers(0, 15, 15).tolist() for s in sets for split in ("base", "new")}
        draws.append(figure("ours", chosen) - figure(one["against"], chosen))
    low, high = np.quantile(draws, [0.025, 0.975])
    close = 0.3 * float(np.std(draws))
    assert one["low"] == pytest.approx(low, abs=close)
    assert one["high"] == pytest.approx(high, abs=close)


def test_rows_of_other_photos_are_not_paired(whole: Path, tmp_path: Path) -> None:
    other = {"data": {"spec": "scenes:classes=6,train=3,test=5,size=32,seed=9"}, "method": {"name": "vacsr"}}
    rows = [*TABLE["rows"][:2], {"name": "ours", "set": other}]
    file = write(tmp_path, rows=rows, settings=[{"name": "4"}], seeds=[1])
    assert compare(read_table(file, [f"backbone.start={whole / 'start'}"]), tmp_path / "out").differences == ()


def test_without_answers_nothing_is_tested_and_a_warning_says_so(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole / "out", tmp_path / "out"))
    lost = out / "4/ours/seed-2/answers.safetensors"
    lost.write_bytes(b"broken")
    with pytest.warns(UserWarning, match=f"row 'ours' gets no † or ‡.*delete {lost.parent} and run the table"):
        found = compare(read_table(whole / "table.yaml"), out).differences
    assert {one.setting for one in found} == {"7"}, "nor of the average"


# ----------------------------------------------------------------------------------------------------------- rules


def test_the_rules_work_on_numbers_and_on_draws() -> None:
    base, new = np.array([80.0, 0.0, 50.0]), np.array([60.0, 0.0, 100.0])
    each = joint_metrics({"base": {"accuracy": base}, "new": {"accuracy": new}})["hm"]
    assert each == pytest.approx([harmonic_mean(b, n) for b, n in zip(base, new, strict=True)])
    pairs = ((80.0, 60.0), (100.0, 50.0))
    reports = [{"base": {"accuracy": b}, "new": {"accuracy": n}, "hm": harmonic_mean(b, n)} for b, n in pairs]
    found = averaged_metrics(reports)
    assert (round(found["hm"], 2), round(found["mean_hm"], 2)) == (68.28, 67.62)


def test_a_split_that_some_data_set_lacks_is_not_averaged() -> None:
    one, other = {"source": {"accuracy": 50.0}, "blur": {"accuracy": 30.0}}, {"source": {"accuracy": 70.0}}
    assert averaged_metrics([one, other]) == {"source": {"accuracy": 60.0}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average": "4"}, "the average is called '4', as one of the settings"),
        ({"measures": ["tolerance"]}, "measures are taken of trained pairs, the task is fewshot"),
        ({"task": "train", "average": "average"}, "an average over settings is of fewshot tables"),
        ({"start": {"recipe": "no.yaml", "folder": "x"}}, r"no such file: .*no\.yaml"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_table(write(tmp_path, **changes))


def test_a_few_shot_recipe_is_no_table(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "own.yaml").write_text("base: recipe.yaml\n", encoding="utf-8")
    for name in ("own.yaml", "recipe.yaml"):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "method": "coop"}), encoding="utf-8")
        with pytest.raises(UsageError, match=rf"{name} is a recipe, .* vacsr fewshot .*{name}"):
            read_table(tmp_path / name)


def test_a_row_takes_the_plan_of_its_own_paper(tmp_path: Path) -> None:
    """Below what the table writes; the command line's fields come last."""
    table = read_table(write(tmp_path), ["train.momentum=0.5"])
    found = {cell.row: cell for cell in list_cells(table, tmp_path)}
    assert all(isinstance(cell, Cell) and isinstance(cell.recipe, FewshotRecipe) for cell in found.values())
    plans = {row: cell.recipe.train for row, cell in found.items()}
    assert (plans["coop"].lr, plans["coop"].epochs, plans["ours"].lr) == (0.5, 2, 0.005)
    assert {plan.momentum for plan in plans.values()} == {0.5}
    assert table.baselines() == ("zeroshot", "coop")
