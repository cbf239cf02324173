"""Other readings of the paper: the table that trains them, and the script for those that need no training."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from vacsr.adapter import AdapterConfig
from vacsr.compare import Cell, cells, read_table
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.evaluate.retrieval import evaluate_retrieval
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.model import MatchingModel
from vacsr.objective import ObjectiveConfig
from vacsr.scoring import PairScorer

ROOT = Path(__file__).resolve().parents[1]
PAIRS = "synthetic:images=40,per_image=2"
PAPER = method_config("vacsr-paper")
TRAINED = ("readings", "ablation", "flickr8k-features", "flickr8k-features-search")
UNMEASURED = {
    ("weighting", "eq13"),  # the same at the paper's weights
    ("residual", "cosine"),  # ours, no reading; the default preset has it
    ("fused", "auto"),  # how, not what
}


@pytest.fixture(scope="module")
def readings() -> Any:
    spec = importlib.util.spec_from_file_location("readings", ROOT / "benchmarks/readings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["readings"] = module  # typing looks the annotations up there
    spec.loader.exec_module(module)
    return module


def flatten(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= flatten(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


def changed(cell: Cell, other: Cell) -> dict[str, Any]:
    """Fields of a cell's recipe that are not as in the other's."""
    own, theirs = (flatten(each.recipe.model_dump(mode="json")) for each in (cell, other))
    assert own.keys() == theirs.keys()
    return {name: value for name, value in own.items() if value != theirs[name]}


def test_every_row_turns_one_switch_of_the_papers_preset() -> None:
    table = read_table(ROOT / "tables/readings.yaml")
    found = {(cell.row, cell.setting, cell.seed): cell for cell in cells(table, Path("x"))}
    assert len(found) == len(table.rows) * 2 * 3
    turned = []
    for (row, setting, seed), cell in found.items():
        change = changed(cell, found["vacsr-paper", setting, seed])
        assert len(change) == (row != "vacsr-paper"), row
        assert all(name.startswith("method.") for name in change)
        turned += list(change.items())
    assert len(set(turned)) == len(table.rows) - 1, "no two rows are the same"
    assert {row.against for row in table.rows if row.name != "vacsr-paper"} == {"vacsr-paper"}


def test_the_first_row_is_that_of_the_ablation() -> None:
    """Run folders may then be shared."""
    own, theirs = (
        {(cell.folder, cell.recipe.model_dump_json()) for cell in cells(read_table(path), Path("x"))}
        for path in (ROOT / "tables/readings.yaml", ROOT / "tables/ablation.yaml")
    )
    assert len(own & theirs) == 2 * 3


def test_every_other_value_of_a_switch_is_tried_somewhere(readings: Any) -> None:
    """In a table of ours, or by the script."""
    tried = {(name, str(getattr(reading, name))) for reading in readings.READINGS.values() for name in reading._fields}
    for path in TRAINED:
        for cell in cells(read_table(ROOT / f"tables/{path}.yaml"), Path("x")):
            method = cell.recipe.method
            if isinstance(method, VacsrConfig):
                fields = {**method.adapter.model_dump(), **method.objective.model_dump()}
                tried |= {(name, str(value)) for name, value in fields.items()}
    assert isinstance(PAPER, VacsrConfig)
    for kind, paper in ((AdapterConfig, PAPER.adapter), (ObjectiveConfig, PAPER.objective)):
        for name, field in kind.model_fields.items():
            values = {str(value) for value in literals(field.annotation)} - {str(getattr(paper, name))}
            assert {(name, value) for value in values} <= tried | UNMEASURED, name


def literals(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for part in get_args(annotation) for value in literals(part))


@pytest.fixture
def run(vacsr: Callable[..., Any], tmp_path: Path) -> Path:
    folder = tmp_path / "clean" / "vacsr-paper" / "seed-3"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"data: {{pairs: '{PAIRS}'}}\nmethod: vacsr-paper\nbackbone: {{head: {{dim: 8}}}}\n"
        "train: {epochs: 2, batch_size: 16, seed: 3, device: cpu}\n",
        encoding="utf-8",
    )
    assert vacsr("train", recipe, "--out", folder).code == 0
    return folder


def test_figures_are_those_of_a_model_with_that_switch(
    readings: Any, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run.parent / "out.json"
    monkeypatch.setattr(sys, "argv", ["readings.py", str(run), "--json", str(out)])
    readings.main()
    printed = capsys.readouterr().out
    records = json.loads(out.read_text(encoding="utf-8"))["records"]
    assert [record["reading"] for record in records] == list(readings.READINGS)
    pairs, config = load_pairs(PAIRS, split="test"), json.loads((run / "model/config.json").read_text(encoding="utf-8"))
    for record in records:
        assert (record["name"], record["seed"]) == ("clean/vacsr-paper", 3)
        switch, _, value = record["reading"].partition(": ")
        adapter = {**config["method"]["adapter"], **({switch: value} if switch in ("decode", "uncertainty") else {})}
        scorer = PairScorer(turned(run, {**config["method"], "adapter": adapter}), device="cpu")
        assert record["log_var"] == pytest.approx(log_var_of_all(scorer, pairs), rel=1e-4)
        options = {switch: value} if switch in ("ties", "bins") else {}
        (expected,) = evaluate_retrieval(scorer, pairs, **options).results  # type: ignore[arg-type]
        assert record["figures"]["RSUM"] == expected["rsum"]
        assert record["figures"]["AURC i2t"] == expected["uncertainty"]["aurc_i2t"]
        assert record["figures"]["σ–R@1 t2i"] == pytest.approx(expected["uncertainty"]["corr_r1_t2i"], nan_ok=True)
        assert f"| {record['reading']} | {expected['rsum']:.1f} |" in printed
    assert len({json.dumps(record["figures"]) for record in records}) > 3, "some switch must tell"


def log_var_of_all(scorer: PairScorer, pairs: Any) -> list[float]:
    """Lowest and highest, pair by pair; fewer than a hundred images and captions."""
    assert isinstance(scorer.model.method, Vacsr)
    adapter = scorer.model.method.adapter
    images, texts = scorer.embed_images(pairs.images).mean, scorer.embed_texts(pairs.texts).mean
    assert max(len(images), len(texts)) <= 100
    found = [adapter.log_var(adapter.features(v, t)).flatten().tolist() for v in images for t in texts]
    return [min(map(min, found)), max(map(max, found))]


def turned(run: Path, method: Mapping[str, Any]) -> MatchingModel:
    """A model built with these switches, and the run's weights in it."""
    trained = MatchingModel.from_pretrained(run)
    model = MatchingModel.build(
        method_config(method),
        trained.config,
        image_dim=trained.backbone.image_dim,
        text_dim=trained.backbone.text_dim,
        provenance=trained.provenance,
    )
    model.load_state_dict(trained.state_dict())
    return model


DECISIONS = (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
BATCH = json.loads((ROOT / "docs/results/readings/results.json").read_text(encoding="utf-8"))["summaries"]


@pytest.mark.parametrize(
    ("said", "row"),
    [
        (r"\*\*(\S+) clean and (\S+) with noise\*\* of the preset `paper`", "vacsr-paper"),
        (r"Batch: √d (\S+), noise (\S+) \(no diff", "paper-scale-sqrt-d"),
        (r"`layernorm` (\S+), noise (\S+) \(better", "paper-scale-layernorm"),
        (r"`none` (\S+), noise (\S+) \(both worse", "paper-scale-none"),
        (r"`head` (\S+), noise ([\d.]+):", "paper-mixing-head"),
        (r"τ=0\.5 (\S+), noise ([\d.]+);", "paper-gumbel-0.5"),
        (r"hard (\S+), noise ([\d.]+):", "paper-gumbel-hard"),
        (r"gradient is the same, (\S+), and with noise (\S+) as `ste`", "paper-bce"),
        (r"Batch, everywhere: (\S+), noise ([\d.]+);", "paper-variance-sigmoid"),
        (r"`sum` (\S+), noise ([\d.]+):", "paper-sigma-sum"),
        (r"`alpha` (\S+), noise ([\d.]+):", "paper-sigma-alpha"),
        (r"`both` (\S+), noise ([\d.]+):", "paper-negatives-both"),
        (r"0 has (\S+) \(worse\), noise ([\d.]+);", "paper-negative-target-0"),
        (r"`diagonal` (\S+), noise ([\d.]+):", "paper-diagonal"),
    ],
)
def test_the_decisions_quote_the_batch(said: str, row: str) -> None:
    (found,) = re.findall(said, DECISIONS)
    for shown, setting in zip(found, ("clean", "noise-50"), strict=True):
        assert shown.rstrip(",") == f"{BATCH[setting][row]['test.rsum']['mean']:.1f}"


def test_what_the_decisions_call_better_or_worse_is_so() -> None:
    """And nothing else is, by the stored bootstrap."""
    comparisons = json.loads((ROOT / "docs/results/readings/results.json").read_text(encoding="utf-8"))["comparisons"]
    apart = {
        (found["setting"], found["row"]): "better" if found["low"] > 0 else "worse"
        for found in comparisons
        if found["key"] == "test.rsum" and not found["low"] <= 0 <= found["high"]
    }
    assert apart == {
        ("noise-50", "paper-scale-layernorm"): "better",
        **{(setting, row): "worse" for setting in BATCH for row in ("paper-scale-none", "paper-sigma-sum")},
        ("clean", "paper-negative-target-0"): "worse",
    }


@pytest.mark.parametrize(
    ("said", "key", "setting", "row"),
    [
        (r"τ-c is higher \((\S+) for (\S+)\)", "judgments.expert_tau_c", "clean", "paper-scale-none"),
        (r"AURC t2i (\S+) for ([\d.]+)", "uncertainty.aurc_t2i", "noise-50", "paper-mixing-head"),
        (r"FN AUROC (36\.5) for ([\d.]+)", "uncertainty.auroc_false_negative", "noise-50", "paper-mixing-head"),
        (r"FN AUROC (8\.0) for ([\d.]+)", "uncertainty.auroc_false_negative", "clean", "paper-variance-sigmoid"),
        (r"FN AUROC (21\.4) for ([\d.]+)", "uncertainty.auroc_false_negative", "clean", "paper-negative-target-0"),
        (r"τ-c (41\.4) for ([\d.]+)", "judgments.expert_tau_c", "clean", "paper-variance-sigmoid"),
    ],
)
def test_what_else_the_decisions_quote(said: str, key: str, setting: str, row: str) -> None:
    (found,) = re.findall(said, DECISIONS)
    for shown, name in zip(found, (row, "vacsr-paper"), strict=True):
        assert shown == f"{BATCH[setting][name][f'test.{key}']['mean']:.1f}"


def test_what_the_decisions_say_of_models_tested_again() -> None:
    records = json.loads((ROOT / "docs/results/readings.json").read_text(encoding="utf-8"))["records"]

    def mean(setting: str, reading: str, figure: str) -> float:
        name = f"{setting}/vacsr-paper"
        chosen = [r["figures"][figure] for r in records if (r["name"], r["reading"]) == (name, reading)]
        assert len(chosen) == 3
        return statistics.fmean(chosen)

    argmax = re.search(r"`argmax` (\S+) for (\S+) clean, (\S+) for (\S+) with noise", DECISIONS)
    equal = re.search(r"`equal` −(\S+) ± \S+ for −(\S+) ± \S+ clean, −(\S+) ± \S+ for −(\S+) ±", DECISIONS)
    assert argmax is not None
    assert equal is not None
    places = [(setting, turned) for setting in ("clean", "noise-50") for turned in (True, False)]
    for rsum, width, (setting, turned) in zip(argmax.groups(), equal.groups(), places, strict=True):
        assert rsum == f"{mean(setting, 'decode: argmax' if turned else 'defaults', 'RSUM'):.1f}"
        assert f"0{width}" == f"{-mean(setting, 'bins: equal' if turned else 'defaults', 'σ–R@1 i2t'):.2f}"
    assert len(records) == 16 * 6
    assert min(record["log_var"][0] for record in records) == pytest.approx(-7.7, abs=0.05)
    assert max(record["log_var"][1] for record in records) == pytest.approx(4.2, abs=0.05)
    assert all(0.475 < alpha < 0.525 for record in records for alpha in record["alpha"])
    plain = [r["figures"]["RSUM"] for r in records if r["reading"] == "defaults"]
    ties = [r["figures"]["RSUM"] for r in records if r["reading"] == "ties: pessimistic"]
    assert [round(one - other, 2) for one, other in zip(plain, ties, strict=True) if one != other] == [0.2, 0.2]
