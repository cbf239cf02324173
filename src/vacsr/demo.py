"""`vacsr demo`: a small comparison in a generated world, where the truth of every pair is known, and its page.

The table is demo.yaml. Three losses start from the same towers, which CLIP's own loss trained on other scenes.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from vacsr.compare import Table, compare
from vacsr.compare.examples import examples_of, load_material
from vacsr.compare.results import ComparisonTable, GalleryConfig, look_up
from vacsr.config.io import load_yaml, merge, parse
from vacsr.data import parse_spec
from vacsr.data.scenes import SceneWorld, load_scenes, pair_kinds, render_scene, scene_grades
from vacsr.errors import UsageError
from vacsr.evaluate.truth import (
    KindValues,
    exact_truth,
    false_negatives_above,
    spread,
    truth_facts,
    values_by_kind,
)
from vacsr.files import atomic_path, make_folder, write_json, write_text
from vacsr.pages.curves import Curves, Plot, row_styles, sigma_plots
from vacsr.pages.examples import Examples, Picture, Query, data_uri
from vacsr.pages.plots import Histogram, histogram_plot
from vacsr.pages.render import Cell, Row, render

METHODS = ("infonce", "sigmoid", "vacsr")
OURS, SPLIT, SETTING = "vacsr", "test", "clean"
RESULTS, TABLE, PAGE, PICTURE = "results.json", "table.md", "index.html", "scene.png"
KIND = "vacsr demo"
"""Marks a results.json as the demo's, which may be overwritten."""
KIND_NAMES = {
    "positives": "positives",
    "false_negatives": "false negatives",
    "hard": "hard negatives",
    "easy": "easy negatives",
}
_OTHER_SEED = 1000  # added to the seed for the scenes that the towers learn from
_DRAWN = 1 << 17  # pairs of a kind that its histogram is drawn from
_BINS, _TAIL = 60, 0.002  # of a histogram, and the share of values beyond either end of its axis
_SCENES, _SCENE_SIDE, _PICTURE_SIDE = 8, 192, 256


class Demo(NamedTuple):
    """Everything that came out."""

    result: ComparisonTable
    world: SceneWorld
    """The test split."""
    facts: Mapping[str, float]
    """Of its labels."""
    kinds: Mapping[str, Mapping[str, KindValues]]
    """By method, then by kind of pair."""
    examples: Examples


def demo_table(seed: int, *, start: Path, changes: Mapping[str, Any] | None = None) -> Table:
    """The table of one seed; ``start`` is the run folder of the towers, ``changes`` go over every recipe."""
    raw = load_yaml(files("vacsr").joinpath("demo.yaml").read_text(encoding="utf-8"), source="demo.yaml")
    recipe, changes = raw["start"]["recipe"], dict(changes or {})
    pairs = recipe["data"]["pairs"].format(start_seed=seed + _OTHER_SEED)
    recipe = merge(merge(recipe, {"data": {"pairs": pairs}, "train": {"seed": seed}}), changes)
    towers = {"recipe": recipe, "folder": str(start)}
    return parse(Table, {**raw, "seeds": [seed], "start": towers, "overrides": changes})


def run_demo(out: Path, *, seed: int = 0, changes: Mapping[str, Any] | None = None) -> str:
    """Train the methods, save them in ``out`` with results.json, table.md and index.html, and return what to print.

    ``changes`` are recipe fields that go over those of demo.yaml.
    """
    claim_folder(out)
    with TemporaryDirectory(prefix="vacsr-demo-") as scratch:
        table = demo_table(seed, start=Path(scratch) / "start", changes=changes)
        threads = torch.get_num_threads()
        torch.set_num_threads(min(2, threads))  # small towers gain nothing from more, and lose much on a busy machine
        try:
            result = compare(table, Path(scratch), jobs=min(len(table.rows), os.cpu_count() or 1))
        finally:
            torch.set_num_threads(threads)
        shared = table.recipe(table.rows[0], table.settings[0], seed=seed)
        recipe = shared.model_dump(mode="json", exclude={"backbone": {"start"}})  # a folder that is gone afterwards
        demo = examine(result, recipe["data"]["pairs"])
        data = to_json(demo, recipe=recipe, start=table.start.recipe if table.start else {})
        commands = _commands(out, demo, pairs=data["pairs"], seed=seed)
        shown = {"data": data, "metrics": _metric_rows(result), "kinds": KIND_NAMES, "examples": demo.examples}
        text = render("demo.md", **shown)
        write_json(out / RESULTS, data)  # first: it marks the folder as the demo's
        write_text(out / TABLE, text)
        write_text(out / PAGE, render("demo.html", commands=commands, **shown, **_pictures(demo)))
        for run in result.values:
            assert run.folder is not None, "it was just trained"
            copytree(run.folder / "model", out / run.row / "model", dirs_exist_ok=True)
    with atomic_path(out / PICTURE) as temporary:
        Image.fromarray(render_scene(demo.world.scenes[0], _PICTURE_SIDE)).save(temporary, "png")
    return f"{text}\nSaved in {out}. Open {out / PAGE} in a browser. Next, try: {next(iter(commands.values()))}"


def claim_folder(out: Path) -> None:
    """Make the folder. One that holds other results under the demo's names is refused before any work."""
    try:
        ours = json.loads((out / RESULTS).read_text(encoding="utf-8"))["kind"] == KIND
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    names = [name for name in (RESULTS, TABLE, PAGE, PICTURE, *METHODS) if (out / name).exists()]
    if names and not ours:
        raise UsageError(f"{out} already holds {names[0]}, which is not the demo's — choose another --out")
    make_folder(out)


def examine(result: ComparisonTable, pairs: str) -> Demo:
    """Scores and uncertainties by kind of pair, and some queries with their answers, on the test split."""
    world = load_scenes(parse_spec(pairs).with_options({"split": SPLIT}))
    grades, owners = scene_grades(world), world.pairs.caption_image
    rows = (OURS, *(name for name in result.rows if name != OURS))
    gallery = GalleryConfig(setting=SETTING, rows=rows, photos=f"{pairs},size={_SCENE_SIDE}")
    material = load_material(result.values, gallery, split=SPLIT, device="cpu")
    assert material is not None, "the models were just trained"
    masks = pair_kinds(grades, owners)
    kinds = {name: values_by_kind(material.scores[name], masks, pairs=_DRAWN) for name in result.rows}
    facts = truth_facts(exact_truth(grades, owners))
    return Demo(result, world, facts, kinds, examples_of(material, SETTING, captions=6, images=4))


def _metric_rows(result: ComparisonTable) -> list[Row]:
    """One row per metric, one cell per method; the best is bold where two methods or more have it."""
    rows = []
    for column in result.columns:
        summaries = {name: result.summary(SETTING, name, column.key) for name in result.rows}
        means = {name: one.mean for name, one in summaries.items() if one is not None and one.mean == one.mean}
        best = result.leading(SETTING, column) if len(means) > 1 else []
        texts = {name: f"{means[name]:z.{column.digits}f}" if name in means else "–" for name in result.rows}
        cells = [Cell(text, name in best) for name, text in texts.items()]
        rows.append(Row(f"{column.head} {'↑' if column.best == 'high' else '↓'}", cells))
    return rows


def _pictures(demo: Demo) -> dict[str, Any]:
    """Scenes and plots of the page."""
    pairs = demo.world.pairs
    scenes = []
    for row, scene in enumerate(demo.world.scenes[:_SCENES]):
        captions = [pairs.captions[col] for col in (pairs.caption_image == row).nonzero().flatten().tolist()]
        uri = data_uri(render_scene(scene, _SCENE_SIDE))
        scenes.append((Picture(pairs.image_ids[row], captions[0], uri), captions[:3]))
    curves = Curves(demo.result.values, SETTING, row_styles(demo.result.rows), SPLIT)
    sigma = {kind: values.uncertainty for kind, values in demo.kinds[OURS].items() if values.uncertainty is not None}
    by_kind = Plot("σ by kind of pair", kind_plot(sigma, label="uncertainty σ", title="Uncertainty by kind of pair"))
    scores = []
    for name, kinds in demo.kinds.items():
        score = {kind: values.score for kind, values in kinds.items()}
        scores.append(Plot(name, kind_plot(score, label="score", title=f"Score of {name} by kind of pair"), name))
    return {"scenes": scenes, "sigma_plots": [by_kind, *sigma_plots(curves).plots[:3]], "score_plots": scores}


def kind_plot(values: Mapping[str, Tensor], *, label: str, title: str) -> Markup:
    """One histogram per kind of pair, of values [P] each."""
    arrays = {kind: values[kind].double().numpy() for kind in KIND_NAMES}
    low, high = np.quantile(np.concatenate(list(arrays.values())), (_TAIL, 1 - _TAIL))
    room = 0.02 * (high - low) or 0.5
    edges = np.linspace(low - room, high + room, _BINS + 1)
    groups = []
    for kind, array in arrays.items():
        counts = np.histogram(np.clip(array, edges[0], edges[-1]), edges)[0].astype(np.float64)
        median = float(np.median(array)) if len(array) else None
        note = "no pair" if median is None else f"median {median:z.3f}"
        groups.append(Histogram(KIND_NAMES[kind], counts, kind.replace("_", "-"), note, median))
    return histogram_plot(groups, edges=edges, label=label, title=title)


def to_json(demo: Demo, *, recipe: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    """Every number, with the settings it came from."""
    keys = [column.key for column in demo.result.columns]
    return {
        "schema": 3,
        "kind": KIND,
        "seed": recipe["train"]["seed"],
        "pairs": recipe["data"]["pairs"],
        "split": SPLIT,
        "recipe": {part: recipe[part] for part in ("data", "backbone", "train")},
        "start": start,
        "world": demo.facts,
        "methods": {run.row: {key: look_up(run.report, key) for key in keys} for run in demo.result.values},
        "kinds": {name: _kinds_json(kinds) for name, kinds in demo.kinds.items()},
        "queries": [_query_json(query) for query in demo.examples.queries],
    }


def _kinds_json(kinds: Mapping[str, KindValues]) -> dict[str, Any]:
    """Score and σ by kind of pair, and how often those of false negatives are higher."""
    score = {kind: values.score for kind, values in kinds.items()}
    sigma = {kind: values.uncertainty for kind, values in kinds.items() if values.uncertainty is not None}
    return {
        kind: {
            "pairs": values.total,
            "score": spread(values.score),
            "sigma": spread(sigma[kind]) if sigma else None,
            "false_negatives_above": {
                "score": false_negatives_above(score).get(kind),
                "sigma": false_negatives_above(sigma).get(kind) if sigma else None,
            },
        }
        for kind, values in kinds.items()
    }


def _query_json(query: Query) -> dict[str, Any]:
    return {
        "direction": "t2i" if query.picture is None else "i2t",
        "query": query.query_id,
        "unlabelled": query.unlabelled,
        "rank": {row.row: row.rank for row in query.rows},
        "answers": {
            row.row: [
                {
                    "answer": answer.text if answer.picture is None else answer.picture.image_id,
                    "verdict": answer.kind,
                    "grade": answer.grade,
                    "uncertainty": answer.uncertainty,
                }
                for answer in row.answers
            ]
            for row in query.rows
        },
    }


def _commands(out: Path, demo: Demo, *, pairs: str, seed: int) -> dict[str, str]:
    """What to type next, by what it does."""
    run, picture = shlex.quote(str(out / OURS)), shlex.quote(str(out / PICTURE))
    captions = demo.world.pairs.captions
    texts = " ".join(f"--text {shlex.quote(caption)}" for caption in (captions[0], captions[-1]))
    return {
        "Evaluate the saved model": f"vacsr evaluate {run} --pairs {pairs} --split {SPLIT}",
        "Score any text for any picture": f"vacsr score {run} --image {picture} {texts}",
        "Repeat with another seed": f"vacsr demo --seed {seed + 1} --out {shlex.quote(f'{out}-{seed + 1}')}",
        "Train with your own settings, in a checkout": "vacsr train recipes/scenes-tiny.yaml --out runs/scenes",
    }
