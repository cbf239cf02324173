"""Rows are tested against the right row, over the right queries, seeds averaged first."""

from __future__ import annotations

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

from vacsr.compare import Table, cells, collect, read_table
from vacsr.compare.cell import Cell
from vacsr.config.io import dump_yaml
from vacsr.evaluate.outcomes import Outcomes, QueryOutcomes, write_outcomes
from vacsr.report.queries import contributions
from vacsr.report.tables import Comparison

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
    rank = torch.from_numpy(np.where(generator.random(count) < good, 1, generator.integers(1, 30, count))).double()
    average, within = torch.from_numpy(generator.random((2, count))) * good
    rank[:missing] = average[:missing] = within[:missing] = torch.nan
    return QueryOutcomes(rank, average, within)


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
    """The report's figures, query by query."""
    assert found.r_precision is not None
    rank, average, within = (
        [value for value in tensor.tolist() if value == value]
        for tensor in (found.best_rank, found.average_precision, found.r_precision)
    )
    shares = {f"r{k}": 100 * statistics.fmean(value <= k for value in rank) for k in (1, 5, 10)}
    shares |= {"map_at_r": 100 * statistics.fmean(average), "r_precision": 100 * statistics.fmean(within)}
    return {**shares, "median_rank": statistics.median(rank)}


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


def named(found: tuple[Comparison, ...]) -> dict[tuple[str, str], Comparison]:
    return {(one.row, one.key): one for one in found}


def test_each_row_against_the_best_baseline_or_its_own(table: Table, tmp_path: Path) -> None:
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
    result = collect(table, done)
    found = named(result.comparisons)
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
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
    one = named(collect(table, done).comparisons)["ours", "test.rsum"]
    added: dict[str, list[list[float]]] = {}
    for name in ("ours", one.against):
        runs = [outcomes(cell)[0] for cell in done if cell.row == name]
        for side in ("i2t", "t2i"):
            ranks = [getattr(run, side).best_rank.tolist() for run in runs]
            per_query = [
                statistics.fmean(100 * sum(r <= k for k in (1, 5, 10)) for r in q) for q in zip(*ranks, strict=True)
            ]
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


def test_only_the_same_queries_are_paired(table: Table, tmp_path: Path) -> None:
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell, "others" if cell.row == "ours" and cell.seed == 1 else "same"))
    assert collect(table, done).comparisons == ()


def test_rows_on_other_data_are_not_paired(table: Table, tmp_path: Path) -> None:
    """As many queries, but others: `ours` has no partner left, and what varies it has."""
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell, "others" if cell.row in ("ours", "variant") else "same"))
    assert {row for row, _ in named(collect(table, done).comparisons)} == {"variant"}


def test_tests_over_several_data_stand_side_by_side(table: Table, tmp_path: Path) -> None:
    """Each with as many queries as its own data have."""
    changed = {"rows": [{**row, "against": "sigmoid" if row["name"] == "infonce" else ""} for row in TABLE["rows"]]}
    changed["rows"][3]["against"] = "ours"
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump({**TABLE, **changed}), encoding="utf-8")
    done = list(cells(read_table(path), tmp_path / "out"))
    for cell in done:
        given = outcomes(cell, "few" if cell.row in ("ours", "variant") else "same")
        if cell.row in ("ours", "variant"):
            cut = [QueryOutcomes(*(tensor[:9] for tensor in one.t2i if tensor is not None)) for one in given]
            given = [replace(one, t2i=t2i, caption_image=OWNERS[:9]) for one, t2i in zip(given, cut, strict=True)]
        fill(cell, given)
    found = named(collect(read_table(path), done).comparisons)
    assert {(one.row, one.against) for one in found.values()} == {("infonce", "sigmoid"), ("variant", "ours")}


def test_without_outcomes_of_every_seed_nothing_is_tested(table: Table, tmp_path: Path) -> None:
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
        if (cell.row, cell.seed) == ("ours", 1):
            (cell.folder / "outcomes.safetensors").unlink()
    with pytest.warns(UserWarning, match="no such file") as told:
        assert named(collect(table, done).comparisons) == {}, "neither ours nor what varies it"
    (message,) = [str(one.message) for one in told]
    folder = tmp_path / "out/clean/ours/seed-1"
    assert (
        f"row 'ours' gets no † or ‡, and no row does against it, where its queries are lost: no such file: {folder}"
        in message
    )
    assert message.endswith(f"delete {folder} and run the table")


def test_each_row_without_outcomes_is_told_of_once(table: Table, tmp_path: Path) -> None:
    """Broken files too; the rest is tested."""
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
        if cell.row == "variant":
            (cell.folder / "outcomes.safetensors").write_bytes(b"broken")
        if cell.row == "infonce":
            write_outcomes(cell.folder / "outcomes.safetensors", [])
    with pytest.warns(UserWarning, match="variant") as told:
        found = named(collect(table, done).comparisons)
    assert {row for row, _ in found} == {"ours"}
    (message,) = [str(one.message) for one in told]
    assert "'variant'" in message
    assert "seed-0/outcomes.safetensors is not" in message
    assert "(and 1 more)" in message


def test_nothing_is_told_where_no_figure_could_be_tested(tmp_path: Path) -> None:
    """Medians and uncertainties are not means over queries; a baseline alone has nothing to be tested against."""
    columns = [{"key": "test.i2t.median_rank", "best": "low"}, {"key": "test.uncertainty.aurc_i2t", "best": "low"}]
    shown = {**TABLE["columns"][0], "best": "none"}
    for number, fields in enumerate(({"columns": columns}, {"columns": [shown]}, {"rows": TABLE["rows"][:1]})):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump({**TABLE, **fields}), encoding="utf-8")
        done = list(cells(read_table(path), tmp_path / str(number)))
        for cell in done:
            fill(cell, outcomes(cell))
            (cell.folder / "outcomes.safetensors").unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert collect(read_table(path), done).comparisons == ()


def test_with_a_file_from_before_r_precision_was_kept_the_rest_is_tested(table: Table, tmp_path: Path) -> None:
    """One seed of `ours` is older: its R-precision has no partner, nor has that of what varies it."""
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        given = outcomes(cell)
        fill(cell, given)
        if (cell.row, cell.seed) == ("ours", 1):
            older = [replace(one, i2t=one.i2t._replace(r_precision=None), t2i=one.t2i._replace(r_precision=None))
                     for one in given]  # fmt: skip
            write_outcomes(cell.folder / "outcomes.safetensors", older)
    found = collect(table, done)
    keys = ["test.rsum", "test.i2t.map_at_r", "test.mean.r1", "test/eccv.t2i.r5"]
    assert set(named(found.comparisons)) == {(row, key) for row in ("ours", "variant") for key in keys}
    assert found.summary("clean", "ours", "test/eccv.mean.r_precision") is not None, "shown, and not tested"


def test_a_figure_that_its_queries_do_not_give_is_left_untested(table: Table, tmp_path: Path) -> None:
    done = list(cells(table, tmp_path / "out"))
    for cell in done:
        fill(cell, outcomes(cell))
    path = done[-1].folder / "report.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"rsum": ', '"rsum": 1'), encoding="utf-8")
    found = named(collect(table, done).comparisons)
    assert ("variant", "test.rsum") not in found
    assert ("variant", "test.mean.r1") in found


def test_contributions_by_hand() -> None:
    i2t = QueryOutcomes(torch.tensor([1.0, 6.0, torch.nan]).double(), torch.tensor([0.5, 0.0, torch.nan]).double())
    t2i = QueryOutcomes(torch.tensor([2.0]).double(), torch.tensor([0.25]).double(), torch.tensor([0.75]).double())
    one = Outcomes("flickr", "test", i2t, t2i, "", torch.tensor([1]))
    rsum = contributions(one, "test.rsum")
    assert rsum is not None
    np.testing.assert_array_equal(rsum["i2t"], [300.0, 100.0, np.nan])
    np.testing.assert_array_equal(rsum["t2i"], [200.0])
    both = contributions(one, "test.mean.map_at_r")
    assert both is not None
    np.testing.assert_array_equal(both["i2t"], [25.0, 0.0, np.nan])
    within = contributions(one, "test.t2i.r_precision")
    assert within is not None
    np.testing.assert_array_equal(within["t2i"], [75.0])
    for key in ("test.i2t.r_precision", "test.mean.r_precision", "test.sideways.r1", "test.i2t.median_rank"):
        assert contributions(one, key) is None, key
    assert contributions(one, "test.uncertainty.aurc_i2t") is None
    assert contributions(one, "test.judgments.expert_tau_c") is None
