"""Draw docs/results/ again from run folders, and from docs/results/ the tables that pages of docs/ quote.

    python docs/results/refresh.py --runs runs/new --runs runs/cells    # everything that they hold, from the checkout
    python docs/results/refresh.py --only noise --runs runs/cells       # one folder
    python docs/results/refresh.py --draw                               # all folders again, from what is stored
    python docs/results/refresh.py                                      # only what the pages quote
    python docs/results/refresh.py --check                              # write nothing, say which pages are behind

A cell comes from the first --runs folder that holds it finished, by the recipe that the table has now. Run folders are
those of `vacsr compare`: SETTING/ROW/seed-N. Pages have no photos, which are not part of the project.

Of flickr8k, whose runs were made one by one, the whole reports are kept in flickr8k-reports.json: --runs adds cells to
them or replaces some, and the folder is drawn from all that are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quoting import refresh_pages

from vacsr.compare import Cell, Table, cells, collect, read_table, redraw, write_results
from vacsr.compare.page import RECORDS, read_records, run_records, write_page, write_records
from vacsr.errors import DataError, UsageError, VacsrError
from vacsr.files import write_text
from vacsr.report.records import RunRecord
from vacsr.report.stored import read_results
from vacsr.report.tables import CellValues

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
FOLDERS = {
    **dict.fromkeys(("noise", "ablation", "sensitivity", "tolerance", "readings", "flickr8k", "scenes"), True),
    **dict.fromkeys(("frame", "frame-features", "presets"), True),
    **dict.fromkeys(("efficiency", "scenes-plans", "scenes-fewshot", "scenes-fewshot-pairs"), False),
}
"""Each is drawn from the table of its name; True where it has a page."""
KEPT = {"flickr8k": "flickr8k-reports.json"}
"""Folders drawn from whole reports: `{"schema": 1, "runs": {"SETTING/ROW/seed-N": {"report", "epochs"}}}`."""


def finished(table: Table, roots: Sequence[Path]) -> Iterator[tuple[Cell, Path | None]]:
    """Every cell of the table and the first root that has it finished, or None."""
    for places in zip(*(cells(table, root) for root in roots), strict=True):
        yield next(((c, root) for c, root in zip(places, roots, strict=True) if c.finished()), (places[0], None))


def gather(table: Table, roots: Sequence[Path], out: Path, *, page: bool = False, partial: bool = False) -> str:
    """Write a folder of docs/results/ from run folders; what it took from where, in a line.

    Cells that the folder has now and no root gives would be lost: they are refused, unless ``partial``.
    """
    found = list(finished(table, roots))
    done = [cell for cell, root in found if root is not None]
    if not done:
        raise DataError(f"no cell of '{table.title}' is finished in {roots[0]} — give the --runs folder that has them")
    _refuse_losses(out, {(cell.setting, cell.row, cell.seed) for cell in done}, partial=partial)
    result = collect(table, done)
    write_results(result, out)
    if page:
        write_records(out / RECORDS, run_records(done))
        write_page(table, result, read_records(out / RECORDS), out=out)  # without the models: no photos
    taken = ", ".join(f"{count} from {root}" for root, count in Counter(root for _, root in found if root).items())
    missing = dict.fromkeys(cell.row for cell, root in found if root is None)
    rest = f"; without a run: {len(found) - len(done)}, of {', '.join(missing)}" if missing else ""
    return f"{out.name}: {len(done)} of {len(found)} cells ({taken}){rest}"


def keep(table: Table, roots: Sequence[Path], path: Path) -> int:
    """Take the reports of finished cells over into a file of whole reports; how many."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    done = [cell for cell, root in finished(table, roots) if root is not None]
    for cell in done:
        log = (cell.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        raw["runs"][f"{cell.setting}/{cell.row}/seed-{cell.seed}"] = {
            "report": json.loads((cell.folder / "report.json").read_text(encoding="utf-8")),
            "epochs": [row for row in map(json.loads, log) if "dev_rsum" in row],
        }
    if done:
        write_text(path, json.dumps({**raw, "runs": dict(sorted(raw["runs"].items()))}, indent=1) + "\n")
    return len(done)


def draw_kept(table: Table, path: Path, out: Path) -> str:
    """Write a folder of docs/results/ from whole reports; how many cells, in a line."""
    kept: dict[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    places = {f"{cell.setting}/{cell.row}/seed-{cell.seed}": cell for cell in cells(table, out)}
    homeless = next((name for name in kept if name not in places), None)
    if homeless is not None:
        raise DataError(f"{path.name} has {homeless}, which '{table.title}' has not — add its row or seed to the table")
    records = []
    for name, cell in places.items():
        if name in kept:
            report = {result["split"]: result for result in kept[name]["report"]["results"]}
            records.append(RunRecord(cell.row, cell.setting, cell.seed, report, kept[name]["epochs"]))
    values = tuple(CellValues(run.row, run.setting, run.seed, dict(run.report)) for run in records)
    result = replace(collect(table, ()), values=values)
    write_results(result, out)
    write_records(out / RECORDS, records)
    write_page(table, result, read_records(out / RECORDS), out=out)
    return f"{out.name}: {len(records)} kept cells of {len(places)}"


def _refuse_losses(out: Path, kept: set[tuple[str, str, int]], *, partial: bool) -> None:
    if partial or not (out / "results.json").is_file():
        return
    stored = [(v.setting, v.row, v.seed) for v in read_results(out / "results.json").values]
    lost = [place for place in stored if place not in kept]
    if lost:
        setting, row, seed = lost[0]
        first = f"{len(lost)} cells of {out.name} have no finished run, the first {setting} / {row} / seed {seed}"
        raise DataError(f"{first} — add the --runs folder that has them, or leave them out with --partial")


def _folder(name: str, roots: Sequence[Path], *, partial: bool, named: bool) -> str:
    """Draw one folder, from runs where some are given; one that is not ``named`` and has none in them stays."""
    table, out = read_table(ROOT / "tables" / f"{name}.yaml"), RESULTS / name
    if roots and not named and not any(root for _, root in finished(table, roots)):
        return f"{name}: no cell in these runs, left as it is"
    if name in KEPT:
        added = keep(table, roots, RESULTS / KEPT[name]) if roots else 0
        return f"{draw_kept(table, RESULTS / KEPT[name], out)}, {added} of them now from runs"
    if roots:
        return gather(table, roots, out, page=FOLDERS[name], partial=partial)
    redraw(table, out / "results.json", out, page=FOLDERS[name])
    return f"{name}: drawn again"


def main(given: Sequence[str] | None = None) -> int:
    """What the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, action="append", default=[], help="repeatable; the first is asked first")
    parser.add_argument("--only", action="append", choices=FOLDERS, help="folders to draw; repeatable")
    parser.add_argument("--draw", action="store_true", help="draw folders again, from their own results and records")
    parser.add_argument("--partial", action="store_true", help="drop cells that have no run any more")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is behind")
    options = parser.parse_args(given)
    try:
        if options.check and (options.runs or options.draw):
            raise UsageError("--check compares what is stored, reads no runs and draws nothing — leave one of them out")
        for name in (options.only or FOLDERS) if options.runs or options.draw else ():
            print(_folder(name, options.runs, partial=options.partial, named=bool(options.only)), file=sys.stderr)
        behind = refresh_pages(ROOT / "docs", write=not options.check)
    except VacsrError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{'behind' if options.check else 'rewritten'}: {', '.join(behind) or 'none'}", file=sys.stderr)
    return 1 if options.check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
