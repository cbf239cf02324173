"""The frame around the paper's loss: its tables turn one switch a row, and docs quote what came out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from vacsr.compare import Cell, cells, read_table

ROOT = Path(__file__).resolve().parents[1]
DECISIONS = (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
TRAINED_PAGE = (ROOT / "docs/results-flickr8k.md").read_text(encoding="utf-8")


def stored(name: str) -> Any:
    return json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))


TOWERS, FEATURES = stored("frame/results"), stored("frame-features/results")
TOGETHER = {"paper-adamp-decay-1e-4": 2, "paper-no-rest": 2, "paper-no-augmentation": 4}
"""Rows of more than one field."""


def flatten(fields: Any, before: str = "") -> dict[str, Any]:
    if not isinstance(fields, dict):
        return {before: fields}
    return {name: value for key, part in fields.items() for name, value in flatten(part, f"{before}.{key}").items()}


def changed(cell: Cell, other: Cell) -> set[str]:
    own, theirs = (flatten(each.recipe.model_dump(mode="json")) for each in (cell, other))
    return {name for name, value in own.items() if value != theirs[name]}


@pytest.mark.parametrize("name", ["frame", "frame-features"])
def test_every_row_turns_its_switch_and_no_other(name: str) -> None:
    table = read_table(ROOT / f"tables/{name}.yaml")
    found = {(cell.row, cell.setting, cell.seed): cell for cell in cells(table, Path("x"))}
    for (row, setting, seed), cell in found.items():
        change = changed(cell, found["vacsr-paper", setting, seed])
        assert len(change) == (0 if row == "vacsr-paper" else TOGETHER.get(row, 1)), row
        assert not any(field.startswith(".method") for field in change)
    assert {row.against for row in table.rows if row.name != "vacsr-paper"} == {"vacsr-paper"}


@pytest.mark.parametrize(
    ("said", "row"),
    [
        (r"\*\*(470\.0) \(dev (\S+)\)\*\* of the frame as it is", "vacsr-paper"),
        (r"`image_output=norm` (\S+) \(dev (\S+), worse\)", "paper-image-norm"),
        (r"torch's default for both (\S+) \(no clear difference; dev ([\d.]+)\)", "paper-head-torch"),
        (r"neither rest nor ramp (\S+) \(better; dev ([\d.]+)\)", "paper-no-rest"),
    ],
)
def test_decisions_quote_towers_with_dev(said: str, row: str) -> None:
    (found,) = re.findall(said, DECISIONS)
    for shown, key in zip(found, ("test.rsum", "dev.rsum"), strict=True):
        assert shown == f"{TOWERS['summaries']['clean'][row][key]['mean']:.1f}"


@pytest.mark.parametrize(
    ("said", "key", "rows"),
    [
        (r"`mean` (\S+), `cls` ([\d.]+):", "test.rsum", ["paper-pooling-mean", "paper-pooling-cls"]),
        (
            r"dev (\S+) and (\S+) \(both worse, in one seed\): GPO",
            "dev.rsum",
            ["paper-pooling-mean", "paper-pooling-cls"],
        ),
        (r"towers: AdamW ([\d.]+)\.", "test.rsum", ["paper-adamw"]),
        (r"by depth (\S+), image tower at ×0.1 (\S+) ", "test.rsum", ["paper-no-layer-decay", "paper-image-lr-0.1"]),
        (r"none of them (\S+) \(worse\)", "test.rsum", ["paper-no-augmentation"]),
    ],
)
def test_decisions_quote_towers(said: str, key: str, rows: list[str]) -> None:
    (found,) = re.findall(said, DECISIONS)
    shown = [found] if isinstance(found, str) else list(found)
    assert shown == [f"{TOWERS['summaries']['clean'][row][key]['mean']:.1f}" for row in rows]


@pytest.mark.parametrize(
    ("said", "row"),
    [
        (r"\*\*(\S+) clean and (\S+) with noise\*\* in the same batch", "vacsr-paper"),
        (r"Xavier (\S+) \(worse on dev and in mAP@R\), noise (\S+) \(worse\)", "paper-head-xavier"),
        (r"one linear layer (\S+), noise (\S+) \(both worse\)", "paper-head-linear"),
        (r"Features: AdamP (\S+), noise ([\d.]+);", "paper-adamp"),
        (r"with decay 1e-4 (\S+), noise ([\d.]+):", "paper-adamp-decay-1e-4"),
        (r"25 epochs (\S+), noise ([\d.]+);", "paper-25-epochs"),
        (r"cosine decay (\S+), noise ([\d.]+):", "paper-cosine-schedule"),
        (r"No bound on the gradient (\S+), noise \*\*([\d.]+)\*\* \(worse\)", "paper-no-clipping"),
        (r"`bf16` (\S+), noise ([\d.]+):", "paper-bf16"),
    ],
)
def test_decisions_quote_features(said: str, row: str) -> None:
    (found,) = re.findall(said, DECISIONS)
    for shown, setting in zip(found, ("clean", "noise-50"), strict=True):
        assert shown.rstrip(",") == f"{FEATURES['summaries'][setting][row]['test.rsum']['mean']:.1f}"


def test_decisions_quote_the_other_noise() -> None:
    (found,) = re.findall(r"`derange-captions` (\S+) for (\S+): no difference", DECISIONS)
    own = FEATURES["summaries"]
    rows = ("paper-deranged-noise", "vacsr-paper")
    assert list(found) == [f"{own['noise-50'][row]['test.rsum']['mean']:.1f}" for row in rows]
    (again,) = re.findall(r"the same recipe trained a second time has (\S+) clean", DECISIONS)
    assert again == f"{own['clean']['paper-deranged-noise']['test.rsum']['mean']:.1f}"


def test_what_is_called_better_or_worse_is_so_and_nothing_else() -> None:
    def apart(results: Any, key: str) -> dict[tuple[str, str], str]:
        clear = [c for c in results["comparisons"] if c["key"] == key and not c["low"] <= 0 <= c["high"]]
        return {(c["setting"], c["row"]): "better" if c["low"] > 0 else "worse" for c in clear}

    assert apart(TOWERS, "test.rsum") == {
        **{("clean", f"paper-{name}"): "better" for name in ("no-layer-decay", "image-lr-0.1", "no-rest")},
        ("clean", "paper-no-augmentation"): "worse",
    }
    worse_on_dev = ("pooling-mean", "pooling-cls", "image-norm", "no-augmentation")
    assert apart(TOWERS, "dev.rsum") == {
        **{("clean", f"paper-{name}"): "better" for name in ("no-layer-decay", "no-rest")},
        **{("clean", f"paper-{name}"): "worse" for name in worse_on_dev},
    }
    assert apart(FEATURES, "test.rsum") == {
        ("clean", "paper-head-linear"): "worse",
        **{("noise-50", f"paper-{name}"): "worse" for name in ("no-clipping", "head-xavier", "head-linear")},
    }
    assert apart(FEATURES, "dev.rsum") == {
        **{("clean", f"paper-{name}"): "worse" for name in ("head-xavier", "head-linear")},
        **{("noise-50", f"paper-{name}"): "worse" for name in ("no-clipping", "head-xavier", "head-linear")},
        ("noise-50", "paper-cosine-schedule"): "better",
    }
    assert apart(FEATURES, "test.i2t.map_at_r").keys() - apart(FEATURES, "test.rsum").keys() == {
        ("clean", "paper-head-xavier"),
        ("clean", "paper-cosine-schedule"),
    }
    assert apart(FEATURES, "test.t2i.map_at_r").keys() - apart(FEATURES, "test.rsum").keys() == {
        ("clean", "paper-head-xavier"),
        ("clean", "paper-adamp-decay-1e-4"),
    }


def test_decisions_quote_the_pairs_of_few_shot_training() -> None:
    results = stored("scenes-fewshot-pairs/results")
    row = next(line for line in DECISIONS.splitlines() if line.startswith("| 20 |"))
    said = re.findall(r"\d\d\.\d", row)
    places = [
        (setting, key, f"{preset}-pairs-batch" if batch else f"vacsr-{preset}")
        for setting, key in (("base-to-novel", "hm"), ("outline", "hm"), ("domain", "mean_target"))
        for preset in ("paper", "default")
        for batch in (True, False)
    ]
    assert said == [f"{results['summaries'][setting][name][key]['mean']:.1f}" for setting, key, name in places]
    worse = {(c["setting"], c["row"]) for c in results["comparisons"] if c["key"] == "hm" and c["high"] < 0}
    better = [c for c in results["comparisons"] if c["key"] in ("hm", "mean_target") and c["low"] > 0]
    assert (worse, better) == (
        {("base-to-novel", "default-pairs-batch")}
        | {("outline", f"{preset}-pairs-batch") for preset in ("paper", "default")},
        [],
    )


def test_the_second_seed_of_two_rows() -> None:
    (said,) = re.findall(r"says the same: (\S+) against (\S+) \(\[data\]\(results/flickr8k-second-seed", TRAINED_PAGE)
    runs = stored("flickr8k-second-seed")["runs"]
    for shown, row in zip(said, ("vacsr-default", "pcmepp"), strict=True):
        (rsum,) = [r["rsum"] for r in runs[f"noise-50/{row}/seed-1"]["report"]["results"] if r["split"] == "test"]
        assert shown == f"{rsum:.1f}"


def test_vse_collapses_as_told() -> None:
    (said,) = re.findall(
        r"dev RSUM is (\d+) after the first epoch and (\d+) after the last at 20% noise, (\d+) and (\d+) at 50%",
        TRAINED_PAGE,
    )
    runs = stored("flickr8k-reports")["runs"]
    dev = [[row["dev_rsum"] for row in runs[f"{noise}/vse/seed-0"]["epochs"]] for noise in ("noise-20", "noise-50")]
    assert all(len(epochs) == 10 for epochs in dev)
    assert list(said) == [f"{epochs[place]:.0f}" for epochs in dev for place in (0, -1)]
