"""Rows are tested against the right row, over the right queries, seeds averaged first."""

import json
import statistics
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from vacsr.compare import Table, collect, list_cells, read_table
from vacsr.compare.cells import Cell
from vacsr.compare.results import Difference
from vacsr.config.io import dump_yaml
from vacsr.evaluate.significance import Outcomes, QueryOutcomes, contributions, write_outcomes

IMAGES, CAPTIONS = 12, 30
OWNERS = torch.arange(CAPTIONS) % IMAGES
METHODS = {"infonce": "infonce", "sigmoid": "sigmoid", "ours": "vacsr", "variant": "vacsr"}
TABLE: dict[str, Any] = {
    "title": "Small world",
    "rows": [{"name": name, "set": {"method": {"name": method}}} for name, method in METHODS.items()],
    "seeds": [0, 1],
    "draws": 2000,
    "columns": [
        {"key": "test.rsum"},
        {"key": "test.i2t.map_at_r"},
        {"key": "test.mean.r1"},
        {"key": "test/eccv.t2i.r5"},
        {"key": "test/eccv.mean.r_precision"},
        {"key": "test.i2t.median_rank", "best": "low"},
    ],
}
TABLE["rows"][3]["against"] = "ours"
GOOD = {"infonce": 0.2, "sigmoid": 0.5, "ours": 0.6, "variant": 0.9}


def direction(generator: np.random.Generator, count: int, good: float, *, missing: int = 0) -> QueryOutcomes:
    rank = torch.from_numpy(np.where(generator.random(count) < good, 1, generator.integers(1, 30, count)))
    average, within = torch.from_numpy(generator.random((2, count))) * good
    values = {f"r{k}": (rank <= k).double() for k in (1, 5, 10)} | {"map_at_r": average, "r_precision": within}
    for tensor in values.values():
        tensor[:missing] = torch.nan
    return values


def outcomes(cell: Cell, queries: str = "same") -> list[Outcomes]:
    generator = np.random.default_rng([cell.seed, *cell.row.encode()])
    good = GOOD[cell.row]
    return [
        Outcomes(
            protocol, "test", *(direction(generator, n, good, missing=m) for n in (IMAGES, CAPTIONS)), queries, OWNERS
        )
        for protocol, m in (("flickr", 0), ("eccv", 5))
    ]


def plain(found: QueryOutcomes) -> dict[str, float]:
    """The report's numbers, query by query."""
    shares = {name: [value for value in tensor.tolist() if value == value] for name, tensor in found.items()}
    return {**{name: 100 * statistics.fmean(values) for name, values in shares.items()}, "median_rank": 1.0}


def fill(cell: Cell, given: list[Outcomes]) -> None:
    results = []
    for one in given:
        i2t, t2i = plain(one.i2t), plain(one.t2i)
        total = sum(side[key] for side in (i2t, t2i) for key in ("r1", "r5", "r10"))
        results.append({"protocol": one.protocol, "split": "test", "i2t": i2t, "t2i": t2i, "rsum": total})
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.yaml").write_text(dump_yaml(cell.recipe), encoding="utf-8")
    (cell.folder / "report.json").write_text(json.dumps({"schema": 1, "results": results}), encoding="utf-8")
    write_outcomes(cell.folder / "outcomes.safetensors", given)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(TABLE), encoding="utf-8")
    return read_table(path)


def named(found: tuple[Difference, ...]) -> dict[tuple[str, str], Difference]:
    return {(one.row, one.key): one for one in found}


def test_each_row_against_the_best_baseline_or_its_own(table: Table, tmp_path: Path) -> None:
    done = list(list_cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
    result = collect(table, done)
    found = named(result.differences)
    keys = ["test.rsum", "test.i2t.map_at_r", "test.mean.r1", "test/eccv.t2i.r5", "test/eccv.mean.r_precision"]
    assert set(found) == {(row, key) for row in ("ours", "variant") for key in keys}, "a median is no mean"
    for (row, key), one in found.items():
        means = {name: result.summary("clean", name, key) for name in METHODS}
        best = max(("infonce", "sigmoid"), key=lambda name: means[name].mean)  # type: ignore[union-attr]
        assert one.against == ("ours" if row == "variant" else best)
        ours, theirs = means[row], means[one.against]
        assert ours is not None
        assert theirs is not None
        assert one.difference == pytest.approx(ours.mean - theirs.mean), (row, key)
        assert one.low <= one.difference <= one.high


def test_an_interval_against_a_plain_bootstrap(table: Table, tmp_path: Path) -> None:
    """RSUM of seed means: images drawn with their captions."""
    done = list(list_cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
    one = named(collect(table, done).differences)["ours", "test.rsum"]
    added: dict[str, list[list[float]]] = {}
    for name in ("ours", one.against):
        runs = [outcomes(cell)[0] for cell in done if cell.row == name]
        for side in ("i2t", "t2i"):
            hits = [[getattr(run, side)[name].tolist() for name in ("r1", "r5", "r10")] for run in runs]
            per_query = (100 * np.array(hits).sum(axis=1).mean(axis=0)).tolist()
            added.setdefault(side, []).append(per_query)
    generator = np.random.default_rng(7)
    draws = []
    for _ in range(4000):
        chosen = generator.integers(0, IMAGES, IMAGES).tolist()
        captions = [q for image in chosen for q in range(CAPTIONS) if int(OWNERS[q]) == image]
        sides = zip(added.values(), (chosen, captions), strict=True)
        draws.append(sum(statistics.fmean(ours[q] - theirs[q] for q in queries) for (ours, theirs), queries in sides))
    low, high = np.quantile(draws, [0.025, 0.975])
    close = 0.15 * float(np.std(draws))
    assert one.low == pytest.approx(low, abs=close)
    assert one.high == pytest.approx(high, abs=close)


@pytest.mark.parametrize(("seeds", "tested"), [((1,), set()), ((0, 1), {"variant"})])
def test_only_rows_of_the_same_queries_are_paired(
    table: Table, tmp_path: Path, seeds: tuple[int, ...], tested: set[str]
) -> None:
    """One seed of `ours` and `variant` on other queries, or all: then what varies `ours` still has a partner."""
    done = list(list_cells(table, tmp_path / "out"))
    for cell in done:
        other = cell.row in ("ours", "variant") and cell.seed in seeds
        fill(cell, outcomes(cell, "others" if other else "same"))
    assert {row for row, _ in named(collect(table, done).differences)} == tested


def test_each_row_without_outcomes_is_told_of_once(table: Table, tmp_path: Path) -> None:
    """Broken files too; the rest is tested."""
    done = list(list_cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
        if cell.row == "variant":
            (cell.folder / "outcomes.safetensors").write_bytes(b"broken")
        if cell.row == "infonce":
            write_outcomes(cell.folder / "outcomes.safetensors", [])
    with pytest.warns(UserWarning, match="variant") as told:
        found = named(collect(table, done).differences)
    assert {row for row, _ in found} == {"ours"}
    (message,) = [str(one.message) for one in told]
    assert "row 'variant' gets no † or ‡" in message
    assert "seed-0/outcomes.safetensors is not" in message
    assert "(and 1 more)" in message
    assert message.endswith(f"delete {tmp_path / 'out/clean/variant/seed-0'} and run the table")
    for cell in done:
        if (cell.row, cell.seed) == ("ours", 1):
            (cell.folder / "outcomes.safetensors").unlink()
    with pytest.warns(UserWarning, match="no such file"):
        assert collect(table, done).differences == (), "outcomes of every seed are needed"


def test_nothing_is_told_where_no_figure_could_be_tested(tmp_path: Path) -> None:
    """Medians and uncertainties are not means over queries; a baseline alone has nothing to be tested against."""
    columns = [{"key": "test.i2t.median_rank", "best": "low"}, {"key": "test.uncertainty.aurc_i2t", "best": "low"}]
    shown = {**TABLE["columns"][0], "best": "none"}
    for number, fields in enumerate(({"columns": columns}, {"columns": [shown]}, {"rows": TABLE["rows"][:1]})):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump({**TABLE, **fields}), encoding="utf-8")
        done = list(list_cells(read_table(path), tmp_path / str(number)))
        for cell in done:
            fill(cell, outcomes(cell))
            (cell.folder / "outcomes.safetensors").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert collect(read_table(path), done).differences == ()


def test_a_metric_that_outcomes_lack_is_not_tested(table: Table, tmp_path: Path) -> None:
    """One seed of `ours` has no R-precision: neither is it tested nor what varies it; the rest is."""
    done = list(list_cells(table, tmp_path / "out"))
    for cell in done:
        given = outcomes(cell)
        fill(cell, given)
        if (cell.row, cell.seed) == ("ours", 1):
            older = [replace(one, t2i={k: v for k, v in one.t2i.items() if k != "r_precision"}) for one in given]
            write_outcomes(cell.folder / "outcomes.safetensors", older)
    found = collect(table, done)
    keys = ["test.rsum", "test.i2t.map_at_r", "test.mean.r1", "test/eccv.t2i.r5"]
    assert set(named(found.differences)) == {(row, key) for row in ("ours", "variant") for key in keys}
    assert found.summary("clean", "ours", "test/eccv.mean.r_precision") is not None, "shown, and not tested"


def test_a_figure_that_its_queries_do_not_give_is_left_untested(table: Table, tmp_path: Path) -> None:
    done = list(list_cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
    path = done[-1].folder / "report.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"rsum": ', '"rsum": 1'), encoding="utf-8")
    found = named(collect(table, done).differences)
    assert ("variant", "test.rsum") not in found
    assert ("variant", "test.mean.r1") in found


def test_contributions_by_hand() -> None:
    nan = torch.nan
    recalls = {"r1": [1.0, 0.0, nan], "r5": [1.0, 0.0, nan], "r10": [1.0, 1.0, nan]}
    i2t = {name: torch.tensor(values).double() for name, values in {**recalls, "map_at_r": [0.5, 0.0, nan]}.items()}
    t2i = {name: torch.tensor([0.25]).double() for name in ("r1", "r5", "r10", "map_at_r", "r_precision")}
    one = Outcomes("flickr", "test", i2t, t2i, "", torch.tensor([1]))
    expected: dict[str, dict[str, list[float]]] = {
        "test.rsum": {"i2t": [300.0, 100.0, nan], "t2i": [75.0]},
        "test.mean.map_at_r": {"i2t": [25.0, 0.0, nan], "t2i": [12.5]},
        "test.t2i.r_precision": {"t2i": [25.0]},
    }
    for key, values in expected.items():
        added = contributions(one, key)
        assert added is not None
        assert added.keys() == values.keys()
        for direction, per_query in added.items():
            np.testing.assert_array_equal(per_query, values[direction])
    for key in ("i2t.r_precision", "mean.r_precision", "sideways.r1", "i2t.median_rank", "uncertainty.aurc_i2t"):
        assert contributions(one, f"test.{key}") is None, key
