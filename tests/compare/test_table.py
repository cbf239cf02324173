"""Table files that build on others, and the tables that are shipped."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from vacsr.compare import Table, collect, list_cells, read_table
from vacsr.compare.formats import to_markdown
from vacsr.compare.results import Published
from vacsr.config.base import METHODS
from vacsr.config.io import read_recipe, recipe_from
from vacsr.data.scenes.classes import ClassOptions, class_source
from vacsr.errors import UsageError
from vacsr.evaluate.protocols import check_protocols
from vacsr.fewshot import read_fewshot
from vacsr.fewshot.config import FewshotRecipe

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "tables").glob("*.yaml"))
COCO = ROOT / "tables/parts/coco.yaml"
COCO_B16 = COCO.with_name("coco-vitb16.yaml")
BELOW: dict[str, Any] = {
    "title": "Below",
    "about": "small data",
    "base": {"train": {"epochs": 3, "lr": 0.1}, "data": {"pairs": "synthetic:"}},
    "rows": [
        {"name": "a", "set": {"method": {"name": "infonce"}}, "seeds": [7]},
        {"name": "b", "set": {"method": {"name": "vacsr"}}},
    ],
    "columns": [{"key": "test.rsum", "name": "RSUM"}, {"key": "dev.rsum"}],
}


def write(path: Path, fields: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


@pytest.fixture
def below(tmp_path: Path) -> Path:
    return write(tmp_path / "below.yaml", BELOW)


def test_a_table_extends_another(below: Path) -> None:
    above = {
        "extends": "below.yaml",
        "title": "Above",
        "base": {"train": {"epochs": 5}},
        "rows": ["b", {"like": "a", "baseline": False}, {"name": "c"}],
        "columns": ["dev.rsum", "RSUM", {"key": "test.i2t.r1"}],
    }
    table = read_table(write(below.with_name("above.yaml"), above))
    assert table.heading() == "Above: small data"
    assert table.base["train"] == {"epochs": 5, "lr": 0.1}
    assert [row.name for row in table.rows] == ["b", "a", "c"]
    assert (table.rows[1].seeds, table.rows[1].baseline) == ((7,), False)
    assert [column.key for column in table.columns] == ["dev.rsum", "test.rsum", "test.i2t.r1"]


def test_a_file_laid_over_a_table_may_bring_a_recipe(below: Path) -> None:
    recipe = write(below.parent / "deep/recipe.yaml", {"data": {"pairs": "synthetic:images=9"}, "train": {"lr": 0.5}})
    layer = {"about": "other data", "recipe": recipe.name, "base": {"train": {"clip_norm": 1.0}}}
    table = read_table(below, ["train.epochs=2"], layers=[write(recipe.with_name("layer.yaml"), layer)])
    (first, *_) = list_cells(table, below.parent)
    assert first.recipe.data.pairs == "synthetic:images=9"
    assert (first.recipe.train.lr, first.recipe.train.clip_norm, first.recipe.train.epochs) == (0.5, 1.0, 2)
    assert table.heading() == "Below: other data"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_any_row_of_a_shipped_table_can_be_dropped(path: Path, tmp_path: Path) -> None:
    """With all that speaks of it: the page, published figures beside it, rows tested against it."""
    rows = [row.name for row in read_table(path).rows]
    for row in rows if len(rows) > 1 else ():
        layer = write(tmp_path / "layer.yaml", {"drop": [row]})
        left = read_table(path, layers=[layer])
        assert [each.name for each in left.rows] == [each for each in rows if each != row]
        assert row not in left.page.drawn
        assert all(entry.beside != row for entry in left.published)
        assert all(each.against != row for each in left.rows)
        assert left.page.gallery is None or row not in left.page.gallery.rows


PARTS = {
    "clip-features": [], "coco": [], "coco-part": [], "noun-noise": [], "scenes": [], "coco-vitb16": ["coco"],
    "coco-part-towers": ["coco-part"], "flickr8k-coco": ["coco-part"],
}  # fmt: skip
"""Files for --with, and those they are laid on."""


def test_every_part_is_known() -> None:
    others = {"published", "scenes-small"}  # the paper's numbers, and a part of one table
    assert {path.stem for path in COCO.parent.glob("*.yaml")} == PARTS.keys() | others


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("table", ["retrieval", "noise"])
def test_every_part_fits_the_tables(name: str, table: str) -> None:
    layers = [COCO.with_name(f"{part}.yaml") for part in (*PARTS[name], name)]
    cells = list(list_cells(read_table(ROOT / f"tables/{table}.yaml", layers=layers), Path("x")))
    assert cells
    check_protocols([each for cell in cells for each in cell.recipe.evaluate.protocols])


def test_the_papers_tables_have_all_their_columns() -> None:
    """Every number of tables 1 and 2 is a column, and both towers have their published rows."""
    table = read_table(ROOT / "tables/coco.yaml")
    keys = {column.key for column in table.columns}
    assert [entry for entry in table.published if not entry.values.keys() <= keys] == []
    shown = {name: [one.name for one in collect(table, []).published_rows(name)] for name in ("vit-b32", "vit-b16")}
    assert shown["vit-b16"] == ["P2RM", "DAA", "PCME", "PCME++", "VACSR"]
    assert shown["vit-b32"] == [*shown["vit-b16"], "VACSR, uncertainty"]
    b32, b16 = ({c.recipe.backbone.spec for c in list_cells(table, Path("x")) if c.setting == s} for s in shown)
    assert (b32, b16) == ({"clip:openai/clip-vit-base-patch32"}, {"clip:openai/clip-vit-base-patch16"})


def test_a_file_laid_over_a_table_may_drop_rows(below: Path) -> None:
    """Those that the table has; a row that was tested against one of them is tested against the best baseline."""
    layer = write(below.with_name("layer.yaml"), {"drop": ["a", "of another table"], "about": "other data"})
    assert [row.name for row in read_table(below, layers=[layer]).rows] == ["b"]
    above = write(below.with_name("above.yaml"), {"extends": "below.yaml", "rows": ["b", "a"], "drop": ["b"]})
    assert [row.name for row in read_table(above).rows] == ["a"], "its own rows too"
    again = write(below.with_name("again.yaml"), {"rows": ["a"]})
    with pytest.raises(UsageError, match=r"rows names 'a', which is not among those it extends \(b\)"):
        read_table(below, layers=[layer, again])
    write(below, {**BELOW, "rows": [BELOW["rows"][0], {**BELOW["rows"][1], "against": "a"}]})
    assert [row.against for row in read_table(below, layers=[layer]).rows] == [""]


def test_baselines_are_all_but_vacsr_unless_told(below: Path) -> None:
    assert read_table(below).baselines() == ("a",)
    rows = [{**BELOW["rows"][0], "baseline": False}, {**BELOW["rows"][1], "baseline": True}]
    assert read_table(write(below, {**BELOW, "rows": rows})).baselines() == ("b",)


def test_published_figures_come_from_a_group(below: Path) -> None:
    group = {"source": "them", "data": "coco:", "keys": ["test.rsum", "dev.rsum"]}
    group["entries"] = [{"name": "theirs", "values": [5.0, None]}, {"name": "A", "beside": "a", "values": [6.0, 7.0]}]  # type: ignore[assignment]
    write(below.with_name("published.yaml"), {"main": group})
    given = {**BELOW, "published": ["published.yaml#main", {"name": "inline", "source": "us", "values": {"x": 1.0}}]}
    table = read_table(write(below, given))
    assert [entry.name for entry in table.published] == ["theirs", "A", "inline"]
    assert table.published[0].values == {"test.rsum": 5.0, "dev.rsum": None}
    assert [entry.name for entry in collect(table, []).published] == ["A", "inline"], "other data than theirs"
    same = read_table(below, ["data.pairs=coco:data/coco"])
    assert "| A (published) | – | 6.0 | 7.0 |" in to_markdown(collect(same, [])), "a row of its own on the same data"


def published_names(table: Table) -> list[str]:
    return [entry.name for entry in collect(table, []).published]


def test_published_figures_stand_beside_their_towers(below: Path) -> None:
    """A row of their own needs both the data and the towers; a setting may have towers of its own."""
    given = [
        {"name": "both", "source": "s", "values": {"test.rsum": 1.0}, "data": "synthetic:", "backbone": "clip:*16"},
        {"name": "towers", "source": "s", "values": {"test.rsum": 2.0}, "backbone": "clip:*16", "setting": "b16"},
        {"name": "any", "source": "s", "values": {"test.rsum": 3.0}, "data": "synthetic:"},
        {"name": "beside", "source": "s", "values": {"x": 4.0}, "beside": "a", "data": "coco:", "backbone": "clip:*16"},
    ]
    path = write(below, {**BELOW, "published": given})
    assert published_names(read_table(path)) == ["any", "beside"]
    assert published_names(read_table(path, ["backbone.spec=clip:x/vit-base-patch32"])) == ["any", "beside"]
    assert published_names(read_table(path, ["backbone.spec=clip:./CLIP-B16"])) == ["both", "towers", "any", "beside"]
    own = {"name": "b16", "set": {"backbone": {"spec": "clip:vit-b16"}}}
    table = read_table(write(below, {**BELOW, "published": given, "settings": [{"name": "clean"}, own]}))
    assert published_names(table) == ["towers", "any", "beside"]
    theirs = {entry.name: entry for entry in collect(table, []).published}
    assert theirs["beside"].beside == "a"
    assert theirs["towers"] == Published(name="towers", source="s", values={"test.rsum": 2.0}, setting="b16")


@pytest.mark.parametrize("name", ["retrieval", "noise", "ablation", "sensitivity", "tolerance"])
def test_rows_of_other_towers_are_left_out_on_coco(name: str) -> None:
    path, b16 = ROOT / f"tables/{name}.yaml", "clip:openai/clip-vit-base-patch16"
    coco = read_table(path, layers=[COCO])
    assert "(published)" in to_markdown(collect(coco, []))
    recipe = next(list_cells(coco, Path("x"))).recipe
    assert (recipe.backbone.spec[:5], recipe.evaluate.judgments) == ("clip:", ())
    other = collect(read_table(path, [f"backbone.spec={b16}"], layers=[COCO]), [])
    shown = [entry for setting in other.settings for entry in other.published_rows(setting)]
    assert [entry.name for entry in shown if "B/16" not in entry.source] == []
    theirs = read_table(path, layers=[COCO, COCO_B16])
    assert {cell.recipe.backbone.spec for cell in list_cells(theirs, Path("x"))} == {b16}
    assert published_names(theirs) == ["P2RM", "DAA", "PCME", "PCME++", "VACSR"]
    assert "ViT-B/16" in theirs.heading()


@pytest.mark.parametrize("layers", [[COCO], [COCO, COCO_B16]], ids=["b32", "b16"])
def test_published_rsums_are_the_sums_of_the_printed_recalls(layers: list[Path]) -> None:
    entries = collect(read_table(ROOT / "tables/retrieval.yaml", layers=layers), []).published
    assert len(entries) == 5
    for entry in entries:
        recalls = [entry.values[f"test/coco-1k.{way}.r{k}"] or 0 for way in ("i2t", "t2i") for k in (1, 5, 10)]
        assert entry.values["test/coco-1k.rsum"] == pytest.approx(sum(recalls), abs=0.01)
        assert all(entry.values.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extends": "self.yaml"}, "extends itself"),
        ({"extends": 3}, "extends is 3"),
        ({"extends": "below.yaml", "rows": ["x"]}, r"rows names 'x', .* \(a, b\) — write it out"),
        ({"extends": "below.yaml", "columns": [{"like": "x"}]}, r"columns names 'x'"),
        ({"extends": "none.yaml"}, r"what .*self.yaml extends: no such file: .*none.yaml"),
        ({"data": {"pairs": "x:"}, "method": {"name": "vacsr"}}, r"self.yaml is a recipe, .* vacsr train .*self.yaml"),
        ({**BELOW, "published": ["published.yaml#x"]}, r"published.yaml has no group 'x' — choose one of: main"),
        ({**BELOW, "published": ["published.yaml#main"]}, r"values are not one for each of its keys"),
        ({**BELOW, "published": ["none.yaml#x"]}, r"what .*self.yaml quotes: no such file: .*none.yaml"),
        ({**BELOW, "published": [{"name": "A", "source": "s", "values": {}, "beside": "z"}]}, "beside the row 'z'"),
        ({**BELOW, "recipe": "none.yaml"}, r"the recipe of .*self.yaml: no such file: .*none.yaml"),
        ({**BELOW, "recipe": 3}, "recipe is 3"),
        ({**BELOW, "rows": [{"name": "a", "against": "z"}]}, r"against the row 'z'.* — choose from: a"),
        ({**BELOW, "drop": "a"}, r"drop is 'a', .* — write drop: \[ROW\]"),
        ({**BELOW, "drop": ["a", "b"]}, r"self.yaml: .*\n  rows: "),
        ({**BELOW, "settings": []}, r"\n  settings: "),
        ({**BELOW, "seeds": []}, r"\n  seeds: "),
        ({**BELOW, "colums": []}, "colums"),
        ({**BELOW, "page": {"drawn": ["z"]}}, r"page shows the row 'z', .* — choose from: a, b"),
        ({**BELOW, "page": {"gallery": {"setting": "z", "rows": ["a"]}}}, "page shows the setting 'z'"),
        ({**BELOW, "columns": [{"key": "x.y"}, {"key": "x.y", "name": "again"}]}, "two columns .* 'x.y'"),
        ({**BELOW, "rows": [BELOW["rows"][0]] * 2}, "two rows named 'a'"),
        ({**BELOW, "settings": [{"name": "n"}] * 2}, "two settings named 'n'"),
        ({**BELOW, "settings": [{"name": "Results.json"}]}, "'Results.json' cannot be the name of a cell's folder"),
        ({**BELOW, "rows": [{"name": "a/b"}]}, "'a/b' cannot be the name of a cell's folder"),
        (
            {**BELOW, "rows": [*BELOW["rows"], {"name": "c", "set": {"train": {"epoch": 3}}}]},
            r"self.yaml: row 'c' in setting 'clean': .*\n  train.epoch: unknown field \(did you mean 'epochs'\?\)",
        ),
        ({**BELOW, "rows": [{"name": "x", "set": {"method": {"name": "vacs"}}}]}, "unknown method 'vacs'"),
        ({**BELOW, "base": {"train": {"lrr": 1}}}, r"self.yaml: the configuration .*\n  train.lrr"),
    ],
)
def test_what_does_not_fit_is_refused(below: Path, fields: dict[str, Any], message: str) -> None:
    broken = {"source": "them", "keys": ["a", "b"], "entries": [{"name": "x", "values": [1.0]}]}
    write(below.with_name("published.yaml"), {"main": broken})
    with pytest.raises(UsageError, match=message):
        read_table(write(below.with_name("self.yaml"), fields))


def test_files_laid_over_a_table_are_named_with_it(below: Path) -> None:
    layer = write(below.with_name("layer.yaml"), {"rows": [{"like": "b", "set": {"method": {"nam": "x"}}}]})
    with pytest.raises(UsageError, match=r"below.yaml with .*layer.yaml: row 'b' in setting 'clean': "):
        read_table(below, layers=[layer])
    layer.write_text("about: x\nrows: [a]\nseeds: [1]\nrows: [b]\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"layer.yaml: .*duplicate key 'rows' in line 4"):
        read_table(below, layers=[layer])


def test_a_key_may_stand_beside_what_others_published_and_in_tables_of_other_settings(below: Path) -> None:
    columns = [
        {"key": "x.y", "settings": ["n"]},
        {"key": "x.y", "settings": ["m"], "digits": 2},
        {"key": "x.y", "published": True},
    ]
    settings = [{"name": "n"}, {"name": "m"}]
    table = read_table(write(below, {**BELOW, "columns": columns, "settings": settings}))
    assert len(table.columns) == 3
    columns[1]["settings"] = ["m", "n"]
    with pytest.raises(UsageError, match="two columns"):
        read_table(write(below, {**BELOW, "columns": columns, "settings": settings}))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_are_whole(path: Path) -> None:
    """Every cell has a recipe, and every figure that is quoted belongs to a column or to the same data elsewhere."""
    table = read_table(path)
    found = list(list_cells(table, Path("runs")))
    assert len({cell.folder for cell in found}) == len(found)
    assert len({column.head for column in table.columns}) == len(table.columns), "a sheet has each head once"
    shown = collect(table, [])
    beside = {entry.beside for entry in shown.published if entry.beside}
    published = [column.key for column in table.columns if column.published]
    for setting in shown.settings[:1]:
        for row in beside:
            assert any(shown.beside(setting, row, key) is not None for key in published), row
    assert to_markdown(shown).startswith(f"# {table.heading()}\n")


BASE_TO_NOVEL = ROOT / "tables/base-to-novel.yaml"
SETS = "imagenet caltech101 oxford_pets stanford_cars oxford_flowers food101 fgvc_aircraft sun397 dtd eurosat ucf101"


def hm(base: float, new: float) -> float:
    return 2 * base * new / (base + new)


def test_published_harmonic_means_follow_from_base_and_new_or_a_note_says_otherwise() -> None:
    """Printed with two digits, CLIPood's with one."""
    entries = collect(read_table(BASE_TO_NOVEL), []).published
    assert len(entries) == 8 * 12
    assert {entry.setting for entry in entries} == {"average", *SETS.split()}
    for entry in entries:
        base, new, printed = (entry.values[key] for key in ("base.accuracy", "new.accuracy", "hm"))
        assert base is not None
        assert new is not None
        near = abs(hm(base, new) - float(printed or 0)) <= (0.1 if entry.name == "CLIPood" else 0.011)
        explained = (entry.name, entry.setting) in {("MMA", "ucf101"), ("MMRL", "dtd"), ("VACSR", "average")}
        assert near != explained, (entry.name, entry.setting)
        assert bool(entry.note) == (explained or (entry.name, entry.setting) == ("MMA", "average"))
        if explained:
            assert f"{hm(base, new):.2f}" in entry.note


def test_published_averages_follow_from_the_data_sets_or_a_note_says_otherwise() -> None:
    entries = {(entry.name, entry.setting): entry for entry in collect(read_table(BASE_TO_NOVEL), []).published}
    for name in {name for name, _ in entries}:
        found = {
            key: sum(entries[name, one].values[key] or 0 for one in SETS.split()) / 11
            for key in ("base.accuracy", "new.accuracy", "hm")
        }
        average = entries[name, "average"]
        digit = 0.051 if name == "CLIPood" else 0.0051
        assert average.values["base.accuracy"] == pytest.approx(found["base.accuracy"], abs=digit)
        assert average.values["mean_hm"] == pytest.approx(found["hm"], abs=0.0051)
        same = abs(float(average.values["new.accuracy"] or 0) - found["new.accuracy"]) <= digit
        assert same == (name != "MMA")
        if not same:
            assert (
                f"{found['new.accuracy']:.2f} and {hm(found['base.accuracy'], found['new.accuracy']):.2f}"
                in average.note
            )


def test_published_domain_averages_are_means_of_four() -> None:
    entries = collect(read_table(ROOT / "tables/domain.yaml"), []).published
    assert len(entries) == 8
    for entry in entries:
        *_, printed = values = [value for value in entry.values.values() if value is not None]
        assert printed == pytest.approx(sum(values[1:5]) / 4, abs=0.0501), entry.name


@pytest.mark.parametrize(
    ("name", "file", "setting"),
    [
        ("domain", "domain-imagenet-vitb16", "imagenet"),
        ("scenes-fewshot", "scenes-domain", "domain"),
        ("scenes-fewshot", "scenes-base2novel", "base-to-novel"),
        *(("base-to-novel", f"base2novel-{dataset}-vitb16", dataset) for dataset in SETS.split()),
    ],
)
def test_a_recipe_is_a_cell_of_its_table(name: str, file: str, setting: str) -> None:
    """But for the search of base-to-novel, which the table has for vacsr."""
    given, table = read_fewshot(ROOT / f"recipes/{file}.yaml"), read_table(ROOT / f"tables/{name}.yaml")
    cell = next(c for c in list_cells(table, Path("x")) if (c.row, c.setting, c.seed) == ("vacsr-default", setting, 1))
    assert isinstance(cell.recipe, FewshotRecipe)
    without = {"train": {"checkpoint_epochs", "log_every"}} | ({"search": True} if name == "base-to-novel" else {})
    assert cell.recipe.model_dump(exclude=without) == given.model_dump(exclude=without)
    assert len(cell.recipe.search.candidates()) == (12 if name == "base-to-novel" else 0)


def test_the_scenes_table_has_all_methods_and_its_own_words() -> None:
    """The words of a context or a template must be known to the small towers."""
    table = read_table(ROOT / "tables/scenes-fewshot.yaml")
    found = [cell.recipe.method for cell in list_cells(table, Path("x"))]
    assert {method.name for method in found} == set(METHODS["fewshot"])
    template = class_source(ClassOptions(classes=4, train=1, test=1)).template
    for method in found:
        assert getattr(method, "template", "") == ""
        assert getattr(method, "context", "") in ("", template.removesuffix(" {}."))
    assert table.start is not None
    assert recipe_from(table.start.recipe) == read_recipe(ROOT / "recipes/scenes-clip.yaml")


def test_every_sweep_of_the_paper_is_there() -> None:
    table = read_table(ROOT / "tables/sensitivity.yaml")
    values: dict[str, list[tuple[float, bool]]] = {}
    for row in table.rows:
        for point in row.sweep:
            values.setdefault(point.name, []).append((point.value, point.default))
    assert {name: sorted(value for value, _ in points) for name, points in values.items()} == {
        "alpha": [0, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2],
        "beta": [0, 0.1, 0.5, 1, 5, 10],
        "gamma": [0, 0.1, 0.5, 1, 2, 5, 10],
        "K": [1, 2, 3, 4],
        "N_h": [1, 2, 3, 4, 5, 10],
    }
    defaults = {name: [value for value, default in points if default] for name, points in values.items()}
    assert defaults == {"alpha": [5e-4], "beta": [1], "gamma": [1], "K": [2], "N_h": [1]}
    fields = {"alpha": "kl_weight", "beta": "sigma_weight", "gamma": "negative_weight", "N_h": "hard_negatives"}
    for cell, row in (
        (cell, row) for row in table.rows for cell in list_cells(table, Path("x")) if cell.row == row.name
    ):
        method = cell.recipe.method
        assert method.name == "vacsr"
        assert method.adapter.residual == "none"
        for point in row.sweep:
            shown = method.adapter.components if point.name == "K" else getattr(method.objective, fields[point.name])
            assert shown == point.value, row.name


FRAME = (".train", ".backbone", ".data")
TOGETHER = {"paper-adamp-decay-1e-4": 2, "paper-no-rest": 2, "paper-no-augmentation": 4}
"""Rows of more than one field."""


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
