"""The cells of a table: a recipe and a folder each. Whether they can run, running them, and reading their reports."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from vacsr.compare.table import Table
from vacsr.config import Recipe
from vacsr.config.io import dump_yaml, read_yaml, recipe_from
from vacsr.data.pairs import LabelledPairs
from vacsr.errors import ConfigError, DataError, OtherRun, UsageError
from vacsr.evaluate.agreement import MATCH, Judgments
from vacsr.evaluate.fewshot import joint_metrics
from vacsr.evaluate.report import config_judgments
from vacsr.evaluate.tolerance import loss_tolerance, tolerance_summary
from vacsr.evaluate.truth import scene_truth
from vacsr.fewshot import check_fewshot, fewshot_from, run_fewshot
from vacsr.fewshot.config import FewshotRecipe
from vacsr.files import write_json, write_text
from vacsr.methods.base import Likelihood
from vacsr.pretrained import check_start
from vacsr.scoring import PairScorer
from vacsr.train.checkpoint import LOCK, NO_EFFECT, check_folder, first_difference, holds_run, run_lock
from vacsr.train.run import check_recipe, report_sets, run_recipe


class Cell(NamedTuple):
    row: str
    setting: str
    seed: int
    recipe: Recipe | FewshotRecipe
    folder: Path
    task: str = "train"
    measures: tuple[str, ...] = ()
    steps: int = 100

    @property
    def name(self) -> str:
        return f"{self.setting} / {self.row} / seed {self.seed}"

    def reported(self) -> bool:
        """Its report exists and is what the recipe asked for now would give."""
        return (self.folder / "report.json").is_file() and self._difference(report=True) is None

    def finished(self) -> bool:
        return self.reported() and all((self.folder / f"{name}.json").is_file() for name in self.measures)

    def outdated(self) -> str | None:
        """How the recipe of the run in its folder differs; None where it does not, or there is nothing to train.

        A finished report counts whatever the strips of its loss; a checkpoint is for the very same strips.
        """
        return self._difference(report=False) if holds_run(self.folder) and not self.reported() else None

    def _difference(self, *, report: bool) -> str | None:
        """The first field that differs. Fields that the old recipe did not have are at their defaults."""
        try:
            raw = read_yaml(self.folder / "config.yaml")
            before = fewshot_from(raw) if self.task == "fewshot" else recipe_from(raw)
        except ConfigError as error:
            return f"its recipe cannot be read: {error}"
        timed = self.task == "efficiency"  # a step's time depends on device and strips
        old, new = (_fields(recipe, report=report, timed=timed) for recipe in (before, self.recipe))
        return first_difference(old, new)


def _fields(recipe: Recipe | FewshotRecipe, *, report: bool, timed: bool) -> dict[str, Any]:
    """What decides the weights; with ``report`` up to rounding, and also what decides the report."""
    alike = report and not timed
    left_out = set() if timed else {*NO_EFFECT, *(("tile",) if alike else ())}
    excluded: dict[str, Any] = {"train": left_out} | ({} if report else {"evaluate": True})
    excluded |= {"method": {"objective": {"fused"}}} if alike else {}
    if isinstance(recipe, FewshotRecipe):
        excluded |= {} if report else {"data": {"targets"}}
    return recipe.model_dump(mode="json", exclude=excluded)


def list_cells(table: Table, out: Path, *, seeds: Sequence[int] = ()) -> Iterator[Cell]:
    """Every cell once, row by row; of a row with ``seeds: []`` none."""
    for row in table.rows:
        if row.seeds == ():
            continue
        for setting in table.settings:
            for seed in dict.fromkeys(seeds or setting.seeds or row.seeds or table.seeds):
                folder = out / setting.name / row.name / f"seed-{seed}"
                recipe = table.recipe(row, setting, seed=seed)
                yield Cell(row.name, setting.name, seed, recipe, folder, table.task, table.measures, table.steps)


def run_cell(cell: Cell, *, progress: bool, fresh: bool = False) -> None:
    """Train and report one cell, resuming its checkpoint; a cell that another process is training is refused.

    With ``fresh``, a run of another recipe, or a checkpoint of other data, is deleted first.
    """
    with run_lock(cell.folder):
        if fresh and cell.outdated() is not None:
            clear_folder(cell.folder)
        try:
            _fill(cell, progress=progress)
        except OtherRun as error:
            if not fresh:
                hint = "restore the data of that run, or add --fresh to start the cell again"
                raise OtherRun(f"{str(error).partition(' — ')[0]} — {hint}") from error
            clear_folder(cell.folder)
            _fill(cell, progress=progress)


def clear_folder(out: Path) -> None:
    """Remove everything that a run left, except for the lock, which the caller holds."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _fill(cell: Cell, *, progress: bool) -> None:
    """Do what is missing; another process may have done some since this one looked."""
    if not cell.reported():
        for name in cell.measures:
            (cell.folder / f"{name}.json").unlink(missing_ok=True)
        if _run(cell, progress=progress):
            raise KeyboardInterrupt  # one Ctrl-C stops the table, not just this cell
    if "tolerance" in cell.measures and not (cell.folder / "tolerance.json").is_file():
        assert isinstance(cell.recipe, Recipe), "only such tables have measures"
        write_json(cell.folder / "tolerance.json", run_tolerance(cell.folder, cell.recipe))


def _run(cell: Cell, *, progress: bool) -> bool:
    """Fill the cell's folder; True where it was interrupted."""
    if isinstance(cell.recipe, FewshotRecipe):
        return run_fewshot(cell.recipe, cell.folder, resume=True, progress=progress).interrupted
    if cell.task == "efficiency":
        from vacsr.bench.training import measure_recipe

        check_folder(cell.folder, resume=True)
        (cell.folder / "report.json").unlink(missing_ok=True)
        measured = measure_recipe(cell.recipe, steps=cell.steps)
        write_text(cell.folder / "config.yaml", dump_yaml(cell.recipe))
        write_json(cell.folder / "report.json", {"schema": 1, "results": [{"split": "step", **measured}]})
        return False
    return run_recipe(cell.recipe, cell.folder, resume=True, progress=progress).interrupted


def read_report(cell: Cell) -> dict[str, Any]:
    """A finished cell's report by split; `test/eccv` is one protocol of a split, `test` the first of its protocols.

    Further measures (`tolerance.json`, by split) are in the split under their names. A few-shot report also has joint
    metrics of its splits, and the number of trainable parameters.
    """
    report: dict[str, Any] = {}
    raw = _json(cell.folder / "report.json")
    for result in raw["results"]:
        report.setdefault(result["split"], result)
        if "protocol" in result:
            report[f"{result['split']}/{result['protocol']}"] = result
    for name in cell.measures:
        for split, measured in _json(cell.folder / f"{name}.json").items():
            report[split] = {**report.get(split, {}), name: measured}
    if cell.task == "fewshot":
        report |= {**joint_metrics(report), "trainable": raw["trainable"]}
    return report


def read_history(cell: Cell) -> tuple[Any, ...]:
    path = cell.folder / "metrics.jsonl"
    return tuple(_json(path, lines=True)) if path.is_file() else ()


def _json(path: Path, *, lines: bool = False) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()] if lines else json.loads(text)
    except ValueError as error:
        message = f"{path} is not complete JSON ({error}) — delete its folder and run the same command again"
        raise DataError(message) from error


def run_tolerance(folder: Path, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Loss tolerance by split, and the scale of the loss. Empty for losses that are no likelihood of their scores.

    False negatives come from the exact truth of generated scenes, or from experts' grades of the judged-test half.
    Splits without either, and images held out of training as dev, are left out.
    """
    scorer = PairScorer.from_pretrained(folder, device=recipe.train.device)
    method = scorer.model.method
    likelihood = method.likelihood() or (Likelihood("logistic", 1.0) if method.logit_score else None)
    judgments, result = config_judgments(recipe.evaluate), {}
    for pairs, _ in report_sets(recipe):
        truth = scene_truth(recipe.data.pairs, pairs)
        missed = judged_false_negatives(pairs, judgments) if truth is None else truth.false_negative
        if missed is None or likelihood is None:
            continue
        labelled = torch.arange(len(pairs.image_ids))[:, None] == pairs.caption_image.cpu()
        score = scorer.score_set(pairs).score.detach().cpu()
        tolerance = loss_tolerance(score, labelled, missed, **likelihood._asdict())
        result[pairs.split] = {**tolerance_summary(tolerance, missed), "scale": likelihood.scale}
    return result


def judged_false_negatives(pairs: LabelledPairs, judgments: Sequence[Judgments]) -> Tensor | None:
    """Pairs across images that experts find fitting, of the judged-test half; None where no pair was judged. [I, T]"""
    missed = torch.zeros(len(pairs.image_ids), len(pairs.caption_ids), dtype=torch.bool)
    known = 0
    for judged in (part.subset("judged-test") for part in judgments if part.kind == "expert"):
        part, rows, cols = judged.within(pairs)
        fits = torch.from_numpy(~part.same_image & (part.grades >= MATCH["expert"]))
        missed[rows[fits], cols[fits]] = True
        known += len(part)
    return missed if known else None


def check_cells(table: Table, asked: Sequence[Cell]) -> None:
    """Refuse cells whose recipe alone shows that they cannot finish; the message names row and setting."""
    start = None if table.start is None else recipe_from(table.start.recipe)
    if asked and start is not None:
        try:
            check_recipe(start)
        except UsageError as error:
            raise UsageError(f"what the cells start from cannot be trained: {error}") from error
    refused: dict[str, tuple[str, UsageError]] = {}
    for cell in {(cell.row, cell.setting): cell for cell in asked}.values():  # seeds are alike
        try:
            if isinstance(cell.recipe, FewshotRecipe):
                check_fewshot(cell.recipe)
            else:
                check_recipe(cell.recipe, timed=cell.task == "efficiency")
                if table.start is not None and start is not None and cell.recipe.backbone.start == table.start.folder:
                    check_start(cell.recipe.backbone, start.backbone, folder=table.start.folder)
        except UsageError as error:
            refused.setdefault(cell.row, (cell.setting, error))
    if refused:
        first, *others = refused
        setting, reason = refused[first]
        more = f" (nor can {', '.join(others)})" if others else ""
        message = f"row '{first}' can never finish in '{setting}'{more}: {reason}"
        if len(refused) < len({cell.row for cell in asked}):
            message += f"; or leave it out by --with a file that has drop: [{', '.join(refused)}]"
        raise UsageError(message)


def start_cell(table: Table, missing: Sequence[Cell]) -> Cell | None:
    """What must be trained before ``missing`` can be; None where nothing is, or where it is finished already."""
    if table.start is None or all(cell.recipe.backbone.start != table.start.folder for cell in missing):
        return None
    folder, recipe = Path(table.start.folder).expanduser(), recipe_from(table.start.recipe)
    start = Cell("start", "first", recipe.train.seed, recipe, folder)
    return None if start.reported() else start


def train_start(start: Cell, every: Sequence[Cell], *, console: Console, fresh: bool) -> None:
    """Train it, on all cores. With ``fresh``, delete a run of another recipe and the cells that started from it."""
    if fresh and start.outdated() is not None:
        for cell in every:
            if Path(cell.recipe.backbone.start).expanduser() == start.folder and cell.folder.exists():
                with run_lock(cell.folder):
                    clear_folder(cell.folder)
    console.print(f"first: what the cells start from, into {start.folder}", highlight=False)
    run_cell(start, progress=True, fresh=fresh)
