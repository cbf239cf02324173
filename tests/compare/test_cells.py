"""Rows that can never finish are refused before any cell runs, and no shipped table has one."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from vacsr.compare import compare, list_cells, read_table
from vacsr.compare.cells import check_cells, clear_folder
from vacsr.errors import UsageError
from vacsr.train.checkpoint import LOCK, run_lock

TABLES = Path(__file__).resolve().parents[2] / "tables"
PARTS = TABLES / "parts"
COCO, COCO_B16, SCENES, SMALL = (PARTS / f"{name}.yaml" for name in ("coco", "coco-vitb16", "scenes", "scenes-small"))
SHIPPED = sorted(TABLES.glob("*.yaml"))


def overlays(path: Path) -> list[list[Path]]:
    """What may be laid over a shipped table: other data over what reads cached features, a small plan over scenes."""
    if path.stem == "scenes":
        return [[], [SMALL]]
    table = read_table(path)
    own_data = any("pairs" in setting.set.get("data", {}) for setting in table.settings)
    cached = table.task == "train" and table.data_spec().startswith("features:") and not own_data
    if not cached:
        return [[]]
    return [[], [COCO], [SCENES], *([[COCO, COCO_B16]] if path.stem == "retrieval" else [])]


CASES = [(path, layers) for path in SHIPPED for layers in overlays(path)]


@pytest.mark.parametrize(
    ("path", "layers"), CASES, ids=["+".join([path.stem, *(layer.stem for layer in layers)]) for path, layers in CASES]
)
def test_every_row_that_is_shipped_can_finish(path: Path, layers: list[Path]) -> None:
    table = read_table(path, layers=layers)
    check_cells(table, list(list_cells(table, Path("x"))))


def test_models_that_scenes_start_from_have_their_backbone() -> None:
    """Another table trains them, so only here both are known."""
    (start,) = {c.recipe.backbone for c in list_cells(read_table(TABLES / "scenes-start.yaml"), Path("x"))}
    free = {"start", "augment", "weights", "checkpointing"}
    for name in ("scenes", "scenes-plans"):
        for cell in list_cells(read_table(TABLES / f"{name}.yaml"), Path("x")):
            assert cell.recipe.backbone.model_dump(exclude=free) == start.model_dump(exclude=free)


SMALL_TABLE: dict[str, Any] = {
    "title": "Small",
    "base": {"data": {"pairs": "synthetic:images=20,held_out=4"}, "train": {"epochs": 1, "batch_size": 8}},
    "rows": [
        {"name": "good", "set": {"method": {"name": "infonce"}}},
        {"name": "bad", "set": {"method": {"name": "vacsr"}, "evaluate": {"posthoc": "cosine"}}},
        {"name": "worse", "set": {"method": {"name": "pcmepp"}, "evaluate": {"posthoc": "cosine"}}},
    ],
    "columns": [{"key": "test.rsum"}],
}


def write(path: Path, fields: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def test_compare_refuses_before_any_cell_runs(vacsr: Any, tmp_path: Path) -> None:
    table, out = write(tmp_path / "table.yaml", SMALL_TABLE), tmp_path / "out"
    answer = vacsr("compare", table, "--out", out)
    assert answer.refused(2, "row 'bad' can never finish in 'clean' (nor can worse)", "drop: [bad, worse]")
    assert not out.exists()
    alone = vacsr("compare", table, "--out", out, "--row", "worse")
    assert alone.refused(2, "row 'worse' can never finish")
    assert "drop:" not in alone.err
    without = write(tmp_path / "without.yaml", {"drop": ["bad", "worse"]})
    compare(read_table(table, layers=[without]), out)
    assert [path.name for path in (out / "clean").iterdir()] == ["good"]
    compare(read_table(table), out, rows=["good"])  # finished, and nothing else is asked for
    assert vacsr("compare", table, "--out", out, "--only-collect").code == 0


def refusal(tmp_path: Path, **changes: Any) -> str:
    """What is said of a table with one row."""
    fields = {**SMALL_TABLE, "rows": [{"name": "one", "set": {"method": {"name": "infonce"}}}], **changes}
    table = read_table(write(tmp_path / "table.yaml", fields))
    with pytest.raises(UsageError) as caught:
        check_cells(table, list(list_cells(table, tmp_path)))
    return str(caught.value)


TINY = {"spec": "tiny:", "head": {"kind": "linear", "dim": 8}, "image_output": "norm"}


def test_a_start_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    start = {"data": {"pairs": "scenes:"}, "backbone": TINY, "method": {"name": "infonce"}}
    write(tmp_path / "start.yaml", start)
    base = {"data": {"pairs": "scenes:"}, "backbone": {**TINY, "image_output": "hidden"}}
    fields = {"base": base, "start": {"recipe": "start.yaml", "folder": "runs/start"}}
    told = refusal(tmp_path, **fields)
    assert "backbone.image_output is 'hidden', but 'norm' in runs/start" in told
    write(tmp_path / "start.yaml", {**start, "evaluate": {"protocols": ["eccv"]}})
    assert "what the cells start from cannot be trained: protocol 'eccv'" in refusal(tmp_path, **fields)


def test_clearing_keeps_the_lock_and_what_a_link_points_to(tmp_path: Path) -> None:
    out, far = tmp_path / "run", tmp_path / "far"
    far.mkdir()
    (far / "kept").touch()
    with run_lock(out):
        (out / "checkpoint").mkdir()
        (out / "checkpoint" / "state").touch()
        (out / "report.json").touch()
        (out / "link").symlink_to(far)
        clear_folder(out)
        assert [path.name for path in out.iterdir()] == [LOCK]
    assert (far / "kept").exists()
