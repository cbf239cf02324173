"""Tables that turn one switch at a time: readings of the paper, and the frame around its loss; and the script for
readings that need no training."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from vacsr.adapter import AdapterConfig
from vacsr.compare import list_cells, read_table
from vacsr.config.io import method_config
from vacsr.data import load_pairs
from vacsr.evaluate.report import evaluate_retrieval
from vacsr.methods.vacsr import VacsrConfig
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
TOGETHER = {"paper-adamp-decay-1e-4": 2, "paper-no-rest": 2, "paper-no-augmentation": 4}
"""Rows of more than one field."""
FRAME = (".train", ".backbone", ".data")


@pytest.fixture(scope="module")
def readings() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("readings", ROOT / "benchmarks/readings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["readings"] = module  # typing looks the annotations up there
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "benchmarks"))


def flatten(fields: Any, before: str = "") -> dict[str, Any]:
    if not isinstance(fields, dict):
        return {before: fields}
    return {name: value for key, part in fields.items() for name, value in flatten(part, f"{before}.{key}").items()}


@pytest.mark.parametrize(("name", "part"), [("readings", ".method"), ("frame", FRAME), ("frame-features", FRAME)])
def test_every_row_turns_one_switch_of_the_papers_preset(name: str, part: Any) -> None:
    table = read_table(ROOT / f"tables/{name}.yaml")
    cells = {
        (cell.row, cell.setting, cell.seed): flatten(cell.recipe.model_dump(mode="json"))
        for cell in list_cells(table, Path("x"))
    }
    turned = set()
    for (row, setting, seed), fields in cells.items():
        paper = cells["vacsr-paper", setting, seed]
        assert fields.keys() == paper.keys()
        change = {field: value for field, value in fields.items() if value != paper[field]}
        assert len(change) == (0 if row == "vacsr-paper" else TOGETHER.get(row, 1)), row
        assert all(field.startswith(part) for field in change)
        turned.add(str(change))
    assert len(turned) == len(table.rows), "no two rows are the same"
    assert {row.against for row in table.rows if row.name != "vacsr-paper"} == {"vacsr-paper"}


def test_the_first_row_is_that_of_the_ablation() -> None:
    """Run folders may then be shared."""
    own, theirs = (
        {(cell.folder, cell.recipe.model_dump_json()) for cell in list_cells(read_table(path), Path("x"))}
        for path in (ROOT / "tables/readings.yaml", ROOT / "tables/ablation.yaml")
    )
    assert len(own & theirs) == 2 * 3


def test_every_other_value_of_a_switch_is_tried_somewhere(readings: Any) -> None:
    """In a table of ours, or by the script."""
    tried = {(name, str(getattr(reading, name))) for reading in readings.READINGS.values() for name in reading._fields}
    for path in TRAINED:
        for cell in list_cells(read_table(ROOT / f"tables/{path}.yaml"), Path("x")):
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


def test_results_are_those_of_a_model_with_that_switch(
    readings: Any, vacsr: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, recipe, out = tmp_path / "clean" / "vacsr-paper" / "seed-3", tmp_path / "recipe.yaml", tmp_path / "out.json"
    recipe.write_text(
        f"data: {{pairs: '{PAIRS}'}}\nmethod: vacsr-paper\nbackbone: {{head: {{dim: 8}}}}\n"
        "train: {epochs: 2, batch_size: 16, seed: 3, device: cpu}\n",
        encoding="utf-8",
    )
    assert vacsr("train", recipe, "--out", run).code == 0
    monkeypatch.setattr(sys, "argv", ["readings.py", str(run), "--json", str(out)])
    readings.main()
    printed = capsys.readouterr().out
    records = json.loads(out.read_text(encoding="utf-8"))["records"]
    assert [record["reading"] for record in records] == list(readings.READINGS)
    pairs = load_pairs(PAIRS, split="test")
    for record in records:
        assert (record["name"], record["seed"]) == ("clean/vacsr-paper", 3)
        switch, _, value = record["reading"].partition(": ")
        scorer = PairScorer(turned(run, {switch: value} if switch in ("decode", "uncertainty") else {}), device="cpu")
        assert record["log_var"] == pytest.approx(log_var_range(scorer, pairs), rel=1e-4)
        options = {switch: value} if switch in ("ties", "bins") else {}
        (expected,) = evaluate_retrieval(scorer, pairs, **options).results  # type: ignore[arg-type]
        assert record["figures"]["RSUM"] == expected["rsum"]
        assert record["figures"]["AURC i2t"] == expected["uncertainty"]["aurc_i2t"]
        assert record["figures"]["σ–R@1 t2i"] == pytest.approx(expected["uncertainty"]["corr_r1_t2i"], nan_ok=True)
        assert f"| {record['reading']} | {expected['rsum']:.1f} |" in printed
    assert len({json.dumps(record["figures"]) for record in records}) > 3, "some switch must tell"


def log_var_range(scorer: PairScorer, pairs: Any) -> list[float]:
    """Lowest and highest of all pairs; fewer than a hundred images and captions."""
    adapter: Any = scorer.model.method.adapter
    images, texts = scorer.embed_images(pairs.images).mean, scorer.embed_texts(pairs.texts).mean
    assert max(len(images), len(texts)) <= 100
    values = adapter.log_var(adapter.features(images[:, None], texts[None]))
    return [values.min().item(), values.max().item()]


def turned(run: Path, switches: dict[str, str]) -> MatchingModel:
    """A model built with these switches, and the run's weights in it."""
    trained = MatchingModel.from_pretrained(run)
    method = trained.method.config.model_dump()
    method["adapter"] |= switches
    dims = {"image_dim": trained.backbone.image_dim, "text_dim": trained.backbone.text_dim}
    model = MatchingModel.build(method_config(method), trained.config, **dims, provenance=trained.provenance)
    model.load_state_dict(trained.state_dict())
    return model
