import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import ttest_ind

from vacsr.compare.formats import differences_to_markdown, to_markdown
from vacsr.compare.results import Column, ComparisonTable, look_up, read_records, write_records
from vacsr.errors import DataError
from vacsr.pages.curves import RunRecord

RSUM = {("a", 0): 300.0, ("a", 1): 310.0, ("b", 0): 320.0, ("b", 1): 280.0, ("c", 0): 100.0}
ERROR = {("a", 0): 5.0, ("a", 1): 6.0, ("b", 0): 4.0, ("b", 1): 4.5}


def table(*columns: Column) -> ComparisonTable:
    values = []
    for (row, seed), value in RSUM.items():
        error = ERROR.get((row, seed))
        report = {"test": {"rsum": value, "uncertainty": None if error is None else {"aurc": error}}}
        values.append(RunRecord(row, "clean", seed, report))
    return ComparisonTable("Small", columns, ("a", "b", "c", "d"), ("clean", "noisy"), tuple(values))


def test_look_up_follows_dots() -> None:
    report = {"test": {"i2t": {"r1": 12}, "uncertainty": None, "split": "test", "bins": [1.0]}}
    assert look_up(report, "test.i2t.r1") == 12.0
    for key in ("test.i2t", "test.uncertainty.x", "dev.rsum", "test.i2t.r1.more", "test.split", "test.bins"):
        assert look_up(report, key) is None, key


def test_one_seed_ahead_of_several_takes_no_bold_and_leaves_none() -> None:
    found = table(Column(key="test.rsum", best="low"))
    assert "**" not in to_markdown(found)  # c is ahead, with one seed
    assert found.best("clean", found.columns[0], among=("a", "b", "c")) == "c"  # and yet the one to be measured against
    assert found.leading("clean", Column(key="test.rsum")) == ["a"]


def test_all_of_exact_ties_lead() -> None:
    seeds = {"a": (0.1, 0.2, 0.3), "b": (0.3, 0.2, 0.1), "c": (0.2, 0.2, 0.1), "one": (0.2,)}
    values = [RunRecord(row, "clean", n, {"x": value}) for row, own in seeds.items() for n, value in enumerate(own)]
    tied = ComparisonTable("T", (Column(key="x"),), tuple(seeds), ("clean",), tuple(values))
    assert tied.leading("clean", Column(key="x")) == ["a", "b"]
    assert tied.leading("clean", Column(key="x", best="low")) == ["c"]
    assert tied.leading("clean", Column(key="x", published=True)) == []
    assert tied.leading("noisy", Column(key="x")) == []


def test_json_has_every_value_of_every_seed() -> None:
    found = table(Column(key="test.rsum"), Column(key="test.uncertainty.aurc")).to_dict()
    assert (found["schema"], found["title"], len(found["cells"])) == (2, "Small", 5)
    assert found["cells"][0] == {
        "setting": "clean",
        "row": "a",
        "seed": 0,
        "values": {"test.rsum": 300.0, "test.uncertainty.aurc": 5.0},
    }
    assert found["cells"][4]["values"]["test.uncertainty.aurc"] is None
    assert found["summaries"]["clean"]["b"]["test.rsum"] == {
        "mean": 300.0,
        "std": pytest.approx(statistics.stdev([320.0, 280.0])),
        "seeds": 2,
    }
    assert "test.uncertainty.aurc" not in found["summaries"]["clean"]["c"]


def test_differences_count_standard_errors_and_zero_has_no_sign() -> None:
    values = [
        RunRecord(row, "clean", seed, {"rsum": value})
        for row, both in {"a": (1.0, 3.0), "b": (0.98, 2.98), "c": (1.02, 3.02), "d": (0.0, 2.0)}.items()
        for seed, value in enumerate(both)
    ]
    lines = ComparisonTable("t", (Column(key="rsum"),), ("a", "b", "c", "d"), ("clean",), tuple(values))
    assert differences_to_markdown(lines, "a").splitlines()[6:] == [
        "| b | 0.0 (0.0) |",
        "| c | 0.0 (0.0) |",
        "| d | -1.0 (-0.7) |",
    ]
    alone = replace(lines, values=tuple(run for run in values if run.row != "d" or run.seed == 0))
    assert "| d | -2.0 |" in differences_to_markdown(alone, "a"), "one seed has no spread"


def test_differences_are_corrected_for_the_number_of_rows() -> None:
    """A p of .03 is clear of one rival, not of one among four."""
    spread = (-1.0, 0.0, 1.0)
    values = [
        RunRecord(row, "clean", seed, {"rsum": mean + one})
        for row, mean in {"a": 0.0, "b": -2.7, "c": -20.0, "d": 0.1, "e": 0.2}.items()
        for seed, one in enumerate(spread)
    ]
    table = ComparisonTable("t", (Column(key="rsum"),), ("a", "b", "c", "d", "e"), ("clean",), tuple(values))
    p = ttest_ind(spread, [one - 2.7 for one in spread], equal_var=False).pvalue
    assert 0.05 / 4 < p < 0.05
    lines = differences_to_markdown(table, "a").splitlines()
    assert lines[6:10] == [
        "| b | -2.7 (-3.3) |",
        "| c | -20.0 (-24.5)* |",
        "| d | +0.1 (+0.1) |",
        "| e | +0.2 (+0.2) |",
    ]
    pair = replace(table, rows=("a", "b"))
    assert "| b | -2.7 (-3.3)* |" in differences_to_markdown(pair, "a")


def test_records_come_back_short_and_without_folders(tmp_path: Path) -> None:
    """Numbers to five digits, infinite ones as null; a split's first protocol only."""
    report = {"test": {"rsum": 123.456789, "bad": float("nan")}, "test/eccv": {"rsum": 2.0}}
    run = RunRecord("a", "x", 1, report, ({"step": 1, "loss": 2.0},), tmp_path)
    write_records(tmp_path / "records.json", [run, run._replace(seed=2)])
    first, second = read_records(tmp_path / "records.json")
    assert first == RunRecord("a", "x", 1, {"test": {"rsum": 123.46, "bad": None}}, [{"step": 1, "loss": 2.0}])
    assert second.seed == 2
    for text in ("{", '[{"row": "a"}]'):
        (tmp_path / "records.json").write_text(text)
        with pytest.raises(DataError, match="--page"):
            read_records(tmp_path / "records.json")
    with pytest.raises(DataError, match="--page"):
        read_records(tmp_path / "absent.json")
