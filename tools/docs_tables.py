"""Write the numbers in the tables of docs/ from the measurements in docs/results/.

    python tools/docs_tables.py              # rewrite the tables that are stale
    python tools/docs_tables.py --check      # write nothing; exit 1 where a table is stale (`make docs-check`)
    python tools/docs_tables.py --store FILE OUT.json   # shorten a JSON file: six digits, one record per line

A page says which rows and columns a table has; this script fills in the cells. To add a row, write its name and `–` in
the other cells, and run the script. A table is found by its page and the first cell of its heading. The layers of
imports in CONTRIBUTING.md and docs/architecture.md are written from pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LAYERED = ("CONTRIBUTING.md", "docs/architecture.md")
"""Pages that list the layers of imports."""
Cell = Callable[[list[str], str], str | None]
"""What a cell shows, by the cells of its row and its column's heading; None leaves it as it is."""


class Measured(NamedTuple):
    """A column of a comparison: the keys of its metrics, two of them shown as `i2t / t2i`."""

    keys: tuple[str, ...]
    digits: int = 1
    spread: bool = False
    bold: bool = False
    """Mark the highest mean, of several keys that of the first."""
    correlation: bool = False
    """Two digits without the leading zero."""
    test: str = ""
    """Whether † and ‡ mark tested differences."""


@cache
def stored(name: str) -> Any:
    """A file of docs/results/."""
    return json.loads((ROOT / "docs/results" / name).read_text(encoding="utf-8"))


def number(value: float, column: Measured) -> str:
    """As the pages write it.

    >>> number(-0.604, Measured((), correlation=True)), number(396.61, Measured(()))
    ('−.60', '396.6')
    """
    if not column.correlation:
        return f"{value:z.{column.digits}f}"
    text = f"{abs(value):.2f}".removeprefix("0")
    return f"−{text}" if round(value, 2) < 0 else text


class Comparison:
    """Cells of one setting of a stored comparison: seeds of a row by metric."""

    def __init__(self, name: str, setting: str, columns: dict[str, Measured], *, rows: tuple[str, ...] = ()) -> None:
        data = stored(name)
        self.columns = columns
        self.tests = {(t["row"], t["key"]): t for t in data.get("comparisons", ()) if t["setting"] == setting}
        self.runs: dict[str, list[dict[str, float | None]]] = {}
        for run in data["cells"]:
            if run["setting"] == setting and (not rows or run["row"] in rows):
                self.runs.setdefault(run["row"], []).append(run["values"])

    def values(self, row: str, key: str) -> list[float]:
        """Of the seeds that have the metric."""
        return [value for run in self.runs.get(row, ()) if (value := run.get(key)) is not None]

    def __call__(self, cells: list[str], heading: str) -> str | None:
        row = cells[0].replace("**", "").replace("vacsr, preset `", "vacsr-").removesuffix("`")
        if heading == "seeds":
            return str(len(self.runs[row]))
        return self.show(row, self.columns[heading]) if heading in self.columns else None

    def show(self, row: str, column: Measured) -> str:
        """Mean of each key, bold where it leads, with its spread and mark."""
        seeds = [self.values(row, key) for key in column.keys]
        if not all(seeds):
            return "–"
        text = " / ".join(
            number(statistics.fmean(values), column) + (self.mark(row, key) if column.test else "")
            for key, values in zip(column.keys, seeds, strict=True)
        )
        means = [statistics.fmean(v) for name in self.runs if (v := self.values(name, column.keys[0]))]
        if column.bold and statistics.fmean(seeds[0]) == max(means):
            text = f"**{text}**"
        spread = column.spread and len(seeds[0]) > 1
        return f"{text} ± {number(statistics.stdev(seeds[0]), column)}" if spread else text

    def mark(self, row: str, key: str) -> str:
        """† better and ‡ worse than its baseline, where the interval leaves out zero."""
        test = self.tests.get((row, key))
        if test is None or test["low"] <= 0 <= test["high"]:
            return ""
        return "†" if test["difference"] > 0 else "‡"


def audit(setting: str) -> Cell:
    """Signals of an audit: mean and spread of the models."""
    keys = {"precision at n": "precision_at_n", "AP": "ap", "AUROC": "auroc"}
    models = setting.startswith(("judged", "scenes", "cxc"))

    def cell(cells: list[str], heading: str) -> str | None:
        records = _audited(setting, cells[0])
        if heading == "models":
            return str(len(records))
        values = [record[keys[heading]] for record in records]
        text = f"{statistics.fmean(values):.1f}"
        text = f"**{text}**" if text == _audit_leader(setting, keys[heading]) else text
        spread = len(values) > 1 and (heading == "precision at n" or (models and heading == "AP"))
        return f"{text} ± {statistics.stdev(values):.2f}" if spread else text

    return cell


def wrong_captions(cells: list[str], heading: str) -> str | None:
    """Precision at n of one signal: mean and spread over seeds, in bold where it leads."""
    setting = AUDITED[heading]
    values = [record["precision_at_n"] for record in _audited(setting, cells[0])]
    text = f"{statistics.fmean(values):.1f}"
    text = f"**{text}**" if text == _audit_leader(setting, "precision_at_n") else text
    return f"{text} ± {statistics.stdev(values):.2f}"


def graded_captions(cells: list[str], heading: str) -> str | None:
    """AUROC of one signal, mean over models, for captions that people grade low."""
    setting = {"below 3.5": "cxc-own", "below 4.5": "cxc-odd"}[heading]
    text = f"{statistics.fmean(record['auroc'] for record in _audited(setting, cells[0])):.1f}"
    return f"**{text}**" if text == _audit_leader(setting, "auroc") else text


def counted(cells: list[str], heading: str) -> str | None:
    """Repetitions of one data set and share of wrong captions: how often the interval holds, and how wide it is."""
    name, share = cells[0].removesuffix("% wrong").split(", ")
    cases = [r for r in stored("audit.json")["counts"] if (r["data"], 100 * r["ratio"]) == (name.lower(), float(share))]
    held = sum(r["low"] <= r["wrong"] <= r["high"] for r in cases)
    wrong = sum(r["wrong"] for r in cases)
    if heading == "true number in the interval":
        return f"{held} of {len(cases)}"
    if heading == "mean estimate / true":
        return f"{sum(r['value'] for r in cases) / wrong:.2f}" if wrong else "–"
    return f"{sum(r['high'] - r['low'] for r in cases) / wrong:.2f}" if wrong else "–"


def _audited(setting: str, signal: str) -> list[dict[str, Any]]:
    return [r for r in stored("audit.json")["records"] if (r["setting"], r["signal"]) == (setting, signal)]


def _audit_leader(setting: str, key: str) -> str:
    signals = {r["signal"] for r in stored("audit.json")["records"] if r["setting"] == setting} - {"count"}
    signals = {name for name in signals if "rival image" not in name}
    return f"{max(statistics.fmean(r[key] for r in _audited(setting, name)) for name in signals):.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


WAYS = {
    "vacsr calibrate": "vacsr",
    "softmax, one size": "softmax",
    "flat cosine, each size": "flat cosine",
    "SigLIP's ≥ 0.5": "sigmoid",
}


def cutoffs(cells: list[str], heading: str) -> str | None:
    """What is shown in galleries of one size, over many halves."""
    asked = (int(cells[0].replace(",", "")), WAYS[cells[1]])
    row = next(r for r in stored("cutoffs.json")["records"] if (r["size"], r["way"]) == asked)
    answered = f"{percent(row['answered'])} ({percent(row['low'])} to {percent(row['high'])})"
    shown = {
        "queries with a confident hit": answered if row["answered"] else "none",
        "precision": percent(row["precision"]) if row["precision"] else "–",
        "halves that keep 90%": f"{round(row['kept'] * row['rounds'])} of {row['rounds']}" if row["answered"] else "–",
        "silent without a match": percent(row["silent"]) if "silent" in row else "–",
        "answer set": f"{row['set_size']:.1f}" if "set_size" in row else "–",
        "sets that hold": percent(row["held"]) if "held" in row else "–",
    }
    return shown.get(heading)


def scoring(cells: list[str], heading: str) -> str | None:
    """All pairs on a GPU: the n-th row is the n-th that was timed."""
    rows = {(f"{r['way']} ({r['note']})" if r["note"] else r["way"], r["decoder"], r["dtype"]): r for r in _timed()}
    row = rows[cells[0], cells[1], cells[2]]
    shown = {
        "seconds": f"{row['seconds']:.3f}",
        "rounds": str(row["rounds"]),
        "TFLOP/s": _tflops(row["tflops"]),
        "× the trunk's products": f"{row['x_ceiling']:.2f}",
        "× the best sustained": f"{row['x_sustained']:.2f}",
    }
    return shown.get(heading)


def _timed() -> Iterator[dict[str, Any]]:
    for row in stored("scoring.json")["rows"]:
        yield {**row, "decoder": row["decoder"] or "–", "note": row.get("note", "")}


def _tflops(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def reranked(cells: list[str], heading: str) -> str | None:
    """Scores on a CPU in bfloat16: time and share of the bare product by d; errors at d=1024."""
    for row in stored("rerank.json")["rows"]:
        if (row["work"], row["precision"], row["way"]) == (cells[0], "bfloat16", "scores"):
            ms = 1e3 * row["seconds"]
            time = f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
            shown = {f"d={row['d']:,}": f"{time}, {row['share']:.0%}"}
            if row["d"] == 1024:
                shown |= {"error / spread": f"{row['error']:.2%}", "top-10 kept": f"{row['overlap']:.1%}"}
            if heading in shown:
                return shown[heading]
    return None


def rankings(cells: list[str], heading: str) -> str | None:
    """What a precision does to the order."""
    names = {"default topk(10)": "default topk"}
    name = "fp8 rescored" if "scored again" in cells[0] else names.get(cells[0], cells[0].removeprefix("kernel, "))
    row = stored("scoring.json")["rankings"][f"{name} against fp32"]
    forms = {
        "texts of an image kept": ("overlap", ".2%"),
        "images of a text kept": ("overlap_images", ".2%"),
        "Kendall's τ": ("tau", ".4f"),
        "error / spread": ("rms_over_std", ".2%"),
    }
    key, form = forms[heading]
    return format(row[key], form) if key in row else "–"


def index(cells: list[str], heading: str) -> str | None:
    """Searching a million vectors."""
    keys = {"p50 ms": ("p50_ms", ",.1f"), "p95 ms": ("p95_ms", ",.1f")}
    keys |= {"filled, vectors/s": ("fill_rate", ",.0f"), "on disk, MB": ("disk_mb", ",.0f")}
    (row,) = (r for r in stored("index.json")["rows"] if r["way"] == cells[0])
    key, form = keys[heading]
    return "–" if row[key] is None else format(row[key], form)


def stores(cells: list[str], heading: str) -> str | None:
    """The stores side by side: search without rerank, and its ratio to the exact index of the same run."""
    if heading == "vectors":
        return None
    rows = {(row["way"], f"{row['vectors']:,}"): row for row in stored("stores.json")["rows"]}
    row, exact = rows[f"{cells[0]}: search", cells[1]], rows.get(("exact float32: search", cells[1]))
    shown = {"p50 ms": ("p50_ms", ",.1f"), "recall": ("recall", ".1%"), "memory, MB": ("memory_mb", ",.0f")}
    shown |= {"filled per second": ("fill_rate", ",.0f"), "on disk, MB": ("disk_mb", ",.0f")}
    if heading == "× exact":
        return f"{row['p50_ms'] / exact['p50_ms']:.2g}" if exact else "–"
    key, form = shown[heading]
    return "–" if row[key] is None else format(row[key], form)


GRID = {
    f"{features}{labels}": f"{name}{setting}"
    for features, name in (("TinyViT", "tinyvit"), ("CLIP", "clip"), ("part of COCO", "coco"))
    for labels, setting in (("", ""), (", 20% wrong", "-20"), (", 50% wrong", "-50"), (", 50% by noun", "-noun"))
}
RIVALS = ("infonce", "sigmoid", "pcmepp", "ncr", "bicro")


def grid(cells: list[str], heading: str) -> str | None:
    """RSUM of a method with four networks; the lead of vacsr over the best published rival, with its standard error."""
    runs = Comparison("ensembles/results.json", GRID[cells[0]], {})
    rsum = Measured(("test.rsum",), spread=True, bold=True)
    if heading == "seeds":
        return str(len(runs.runs["vacsr-ensemble"]))
    if heading != "lead":
        return runs.show(heading, rsum)
    seeds = {row: runs.values(row, "test.rsum") for row in ("vacsr-ensemble", *RIVALS)}
    ours = seeds.pop("vacsr-ensemble")
    name = max(seeds, key=lambda row: statistics.fmean(seeds[row]))
    error = sum(statistics.variance(values) / len(values) for values in (ours, seeds[name])) ** 0.5
    return f"{statistics.fmean(ours) - statistics.fmean(seeds[name]):+.1f} ± {error:.1f} ({name})".replace("-", "−")


def grid_trust(cells: list[str], heading: str) -> str | None:
    """What vacsr with four networks knows beyond the order, beside its rivals."""
    runs = Comparison("ensembles/results.json", GRID[cells[0]], {})
    tau = f"test.grades.{'cxc' if 'COCO' in cells[0] else 'expert'}.tau_published"
    best = max(RIVALS, key=lambda row: statistics.fmean(runs.values(row, tau)))
    risk = Measured(_pair("test.signals.confidence.aurc_{}"))
    false_negatives = Measured(("test.signals.disagreement.auroc_false_negative",))
    shown = {
        "τ-c": runs.show("vacsr-ensemble", Measured((tau,), spread=True)),
        "best rival's": f"{runs.show(best, Measured((tau,), spread=True))} ({best})",
        "AURC i2t / t2i": runs.show("vacsr-ensemble", risk),
        "InfoNCE's": runs.show("infonce", risk),
        "FN AUROC of disagreement": runs.show("vacsr-ensemble", false_negatives),
        "of σ": runs.show("vacsr-ensemble", Measured(("test.signals.sigma.auroc_false_negative",))),
    }
    return shown[heading]


def noisy(cells: list[str], heading: str) -> str | None:
    """The short table of how-to/label-noise.md."""
    if heading == "networks":
        return None
    name, setting = ("ensembles", f"tinyvit-{heading[:2]}") if cells[1] == "4" else ("noise", f"noise-{heading[:2]}")
    return Comparison(f"{name}/results.json", setting, {"RSUM": Measured(("test.rsum",))})(cells, "RSUM")


def image_step(cells: list[str], heading: str) -> str | None:
    """A training step of CLIP's towers: what the adapter adds to the sigmoid loss."""
    names = {"sigmoid loss": ("sigmoid", 0), "the adapter, fused, dense": ("vacsr, fused", 0)}
    names |= {"the adapter, fused, in strips": ("vacsr, fused", "auto")}
    timed = stored("image-step-vitb32.json")["training"]["rows"]
    steps = {(row["method"], row["tile"]): row for row in timed if row["step"] == "training"}
    (products,) = (row["ms"] for row in timed if row["step"] == "products")
    plain, row = steps["sigmoid", 0], steps[names[cells[0]]]
    added = row["ms"] - plain["ms"]
    shown = {"ms": f"{row['ms']:.2f}", "peak GiB": f"{row['peak_gib']:.3f}"}
    if row is not plain:
        shown |= {"added ms": f"{added:.2f}", "× the adapter's products": f"{added / products:.2f}"}
        shown["added memory"] = f"+{row['peak_gib'] / plain['peak_gib'] - 1:.1%}"
    return shown.get(heading, "–")


def lora(cells: list[str], heading: str) -> str | None:
    """A training step of ViT-B/16 and its text tower at one batch, by what is trained and kept."""
    rows = {(row["way"], row["recompute"], row["batch"]): row for row in stored("lora.json")["rows"]}
    if heading == "recomputed":
        return None
    row = rows[cells[0], cells[1], int(heading.rpartition(" ")[2]) if "batch" in heading else 128]
    if heading == "weights and moments":
        return f"{row['held_gib']:.2f}"
    return f"{row['peak_gib']:.2f}, {row['share']:.0%}"


def strips(cells: list[str], heading: str) -> str | None:
    """Milliseconds and memory of the loss of a batch, or of some of its rows (`65,536, 4 rows`)."""
    rows = []
    for row in stored("strips.json")["rows"]:
        some = "" if row["rows"] == row["batch"] else f", {row['rows']} rows"
        if [f"{row['batch']:,}{some}", row["way"].replace(",", "").split()[0]] == cells[:2] and "ms" in row:
            rows.append(row)
    graphs = [row for row in rows if row["mode"] == "graph"]
    others = [row for row in rows if row["mode"] == "eager"]
    shown = {"in a CUDA graph": graphs[:1], "without": others[:1]}  # of several heights the first is `auto`
    if heading == "peak memory" and rows:
        return f"{max(row['peak_gib'] for ways in shown.values() for row in ways):.2f} GiB"
    return next((f"{row['ms']:,.{0 if row['ms'] > 1000 else 1}f} ms" for row in shown.get(heading, ())), None)


def service(cells: list[str], heading: str) -> str | None:
    """64 clients: milliseconds by path."""
    path = cells[0].split("`")[1].replace("ID", "")
    return f"{stored('service-load.json')['ms'][path][heading]:.0f}"


def workers(cells: list[str], heading: str) -> str | None:
    """Embedding shard by shard, with the lowest and the highest rate of the rounds."""
    (row,) = (r for r in stored("scale.json")["rows"] if r["way"] == cells[0])
    kind = "parts" if "parts" in cells[0] else "photos"
    rate = f"{row['per_second']:.3g} {kind} ({row['low']:.3g} to {row['high']:.3g})"
    time = f"{row['cpu_ms']:.3g} ms per {kind[:-1]}"
    return {"per second": rate, "processor time": time, "before the first shard": f"{row['start_s']:.0f} s"}[heading]


def audit_parts(cells: list[str], heading: str) -> str | None:
    """An audit of all photos, and in parts."""
    size = int(cells[0].partition(" ")[0].replace(",", ""))
    (row,) = (r for r in stored("scale.json")["audits"] if r["photos"] == size)
    estimate = f"{row['value']:,} ({row['low']:,} to {row['high']:,})"
    return estimate if "estimate" in heading else f"{row['precision_at_n']:.1f}%"


def _pair(metric: str, i2t: str = "i2t", t2i: str = "t2i") -> tuple[str, str]:
    return metric.format(i2t), metric.format(t2i)


RSUM = Measured(("test.rsum",), spread=True, bold=True)
EXPERTS = Measured(("test.judgments.expert_tau_c",), spread=True, bold=True)
CROWD = Measured(("test.judgments.crowd_tau_b",), spread=True, bold=True)
MAP = Measured(_pair("test.{}.map_at_r"))
SIGMA = Measured(_pair("test.uncertainty.corr_r1_{}"), correlation=True)
FALSE_NEGATIVES = Measured(("test.uncertainty.auroc_false_negative",))
BY_SCORE = Measured(("test.judgments.auroc_false_negative_score",))
METHODS = {
    "RSUM": RSUM, "mAP@R i2t / t2i": MAP, "τ-c experts": EXPERTS, "τ-b crowd": CROWD, "σ–R@1 i2t / t2i": SIGMA,
    "AURC i2t / t2i": Measured(_pair("test.uncertainty.aurc_{}")),
    "FN AUROC of σ": FALSE_NEGATIVES, "of score": BY_SCORE,
}  # fmt: skip
TOWERS = {**METHODS, "mAP@R i2t / t2i": MAP._replace(bold=True), "of score": BY_SCORE._replace(bold=True)}
SCENES = {
    "exact mAP@R": Measured(("test.exact.map_at_r",), 2, spread=True, bold=True),
    "exact τ-b": Measured(("test.exact.tau_b",), 2, spread=True, bold=True), "RSUM": RSUM,
    "FN AUROC of σ": Measured(("test.exact.auroc_false_negative",), bold=True),
    "of score": Measured(("test.exact.auroc_false_negative_score",), bold=True), "σ–R@1 i2t / t2i": SIGMA,
}  # fmt: skip
STEP = {
    "parameters, M": Measured(("step.parameters",), 2), "of the method, M": Measured(("step.method_parameters",), 2),
    "inference, ms": Measured(("step.inference.ms",), 2), "training, ms": Measured(("step.training.ms",), 2),
    "inference, GiB": Measured(("step.inference.peak_gib",), 2),
    "training, GiB": Measured(("step.training.peak_gib",), 2),
}  # fmt: skip
NOISE = {"clean labels": "clean", "50% wrong": "noise-50"}
WORLDS = {"4,000 scenes, 20 epochs": "4000-scenes-20-epochs"}
STEPS = {"ViT-B/32, eager": "vit-b32"}
AUDITED = {
    "random, 20%": "random-20", "random, 50%": "random-50", "shared noun, 20%": "noun-20", "shared noun, 50%": "noun-50"
}  # fmt: skip
FEWSHOT = {
    "base": ("base-to-novel", "base.accuracy"), "new": ("base-to-novel", "new.accuracy"), "HM": ("base-to-novel", "hm"),
    "outline HM": ("outline", "hm"), "domain source": ("domain", "source.accuracy"),
    "mean of four shifts": ("domain", "mean_target"),
}  # fmt: skip


def comparisons(name: str, columns: dict[str, Measured], heads: dict[str, str]) -> dict[tuple[str, str], Cell]:
    return {("measurements.md", head): Comparison(name, setting, columns) for head, setting in heads.items()}


def across(columns: dict[str, tuple[Comparison, str]]) -> Cell:
    """Cells whose columns come from several comparisons."""

    def cell(cells: list[str], heading: str) -> str | None:
        comparison, name = columns[heading]
        return comparison(cells, name)

    return cell


def main_rows() -> Cell:
    """The table of README.md: CLIP features, clean columns and those that end in 50% wrong."""
    rows = ("infonce", "pcmepp", "ncr", "bicro", "vacsr-ensemble")
    shown = {}
    for where, name, grades in (("Flickr8k", "clip", "expert"), ("COCO", "coco", "cxc")):
        for head, suffix in (("", ""), (", 50% wrong", "-50")):
            for kind, column in (
                ("RSUM", RSUM),
                ("τ-c", Measured((f"test.grades.{grades}.tau_published",), bold=True)),
            ):
                comparison = Comparison("ensembles/results.json", name + suffix, {kind: column}, rows=rows)
                shown[f"{where} {kind}{head}"] = (comparison, kind)
    return across(shown)


def fewshot() -> Cell:
    shown = {}
    for head, (setting, key) in FEWSHOT.items():
        column = Measured((key,), spread=True, bold=True)
        shown[head] = (Comparison("scenes-fewshot/results.json", setting, {head: column}), head)
    return across(shown)


def tables() -> dict[tuple[str, str], Cell]:
    """Every table that is filled in, by page and first heading."""
    return {
        ("../README.md", "method"): main_rows(),
        **comparisons("noise/results.json", METHODS, NOISE),
        **comparisons(
            "flickr8k/results.json",
            TOWERS,
            {"clean, towers": "clean"},
        ),
        **comparisons("scenes/results.json", SCENES, WORLDS),
        **comparisons("efficiency/results.json", STEP, STEPS),
        ("results/audit-missing.md", "missing, people's grades"): audit("cxc-across"),
        ("results/audit-missing.md", "missing, judged"): audit("judged-test"),
        ("results/audit-missing.md", "missing, scenes"): audit("scenes"),
        ("measurements.md", "wrong captions"): wrong_captions,
        ("results/audit-missing.md", "people's grades"): graded_captions,
        ("results/audit-missing.md", "counted"): counted,
        ("measurements.md", "RSUM, four networks"): grid,
        ("measurements.md", "beyond the order"): grid_trust,
        ("measurements.md", "few-shot"): fewshot(),
        ("measurements.md", "items | way"): cutoffs,
        ("results/cutoffs.md", "items | way"): cutoffs,
        ("performance.md", "way | decoder"): scoring,
        ("performance.md", "scores"): rankings,
        ("performance.md", "work"): reranked,
        ("performance.md", "way | p50 ms"): index,
        ("performance.md", "store"): stores,
        ("performance.md", "batch"): strips,
        ("performance.md", "training step"): image_step,
        ("performance.md", "what learns"): lora,
        ("how-to/serve.md", "path | p50"): service,
        ("scale.md", "workers"): workers,
        ("scale.md", "photos of a part"): audit_parts,
        ("how-to/label-noise.md", "method | networks"): noisy,
    }


def filled(text: str, head: str, cell: Cell) -> str:
    """The page with the cells of one table as they are measured.

    >>> print(filled("| x | a |\\n|---|---|\\n| one | – |\\n", "x", lambda cells, heading: heading * 2))
    | x | a |
    |---|---|
    | one | aa |
    <BLANKLINE>
    """
    lines = text.split("\n")
    start = next((n for n, line in enumerate(lines) if line.startswith(f"| {head} |")), None)
    if start is None:
        raise SystemExit(f"no table begins with '| {head} |' — put the heading back, or remove it from tables()")
    headings = _cells(lines[start])
    for n in range(start + 2, len(lines)):
        if not lines[n].startswith("|"):
            break
        cells = _cells(lines[n])
        shown = [cell(cells, heading) for heading in headings[1:]]
        lines[n] = f"| {' | '.join([cells[0], *(new or old for new, old in zip(shown, cells[1:], strict=True))])} |"
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def with_layers(text: str) -> str:
    """A page with the layers of imports in pyproject.toml, top first, after its mark `<!-- layers -->`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    words = " > ".join(", ".join(f"`{name}`" for name in layer.split(" | ")) for layer in layers)
    before, mark, after = text.partition("<!-- layers -->\n")
    if not mark:
        raise SystemExit("a page has no mark <!-- layers --> — put it back, or remove the page from LAYERED")
    return "".join((before, mark, textwrap.fill(words, 130), "\n\n", after.partition("\n\n")[2]))


def rounded(data: Any) -> Any:
    """Six digits per number: more than any page shows."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, dict):
        return {key: rounded(value) for key, value in data.items()}
    return [rounded(value) for value in data] if isinstance(data, list) else data


def compact(data: Any) -> str:
    """JSON with one line per record of a list.

    >>> print(compact({"schema": 1, "rows": [{"a": 1}, {"a": 2}]}))
    {
    "schema": 1,
    "rows": [
    {"a":1},
    {"a":2}
    ]
    }
    """
    short = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    lines = []
    for key, value in data.items():
        records = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n" + ",\n".join(map(short, value)) + "\n]" if records else short(value)
        lines.append(f"{short(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is stale")
    parser.add_argument(
        "--store", nargs=2, type=Path, metavar=("FILE", "OUT"), help="shorten a JSON file for docs/results"
    )
    options = parser.parse_args()
    if options.store:
        source, out = options.store
        data = rounded(json.loads(source.read_text(encoding="utf-8")))
        data.pop("summaries", None)  # of a comparison: means of the cells, which are computed again
        for cell in data.get("cells", ()):
            cell["values"] = {key: value for key, value in cell["values"].items() if value is not None}
        out.write_text(compact(data) + "\n", encoding="utf-8")
        return 0
    stale = []
    parts = [(f"docs/{page}", head, partial(filled, head=head, cell=cell)) for (page, head), cell in tables().items()]
    for page, head, fill in [*parts, *((page, "layers", with_layers) for page in LAYERED)]:
        text = (ROOT / page).read_text(encoding="utf-8")
        fresh = fill(text)
        if fresh != text:
            stale.append(f"{page}: {head}")
            if not options.check:
                (ROOT / page).write_text(fresh, encoding="utf-8")
    action = " — run: python tools/docs_tables.py" if options.check and stale else ""
    print(f"{'stale' if options.check else 'rewritten'}: {'; '.join(stale) or 'none'}{action}", file=sys.stderr)
    return 1 if action else 0


if __name__ == "__main__":
    sys.exit(main())
