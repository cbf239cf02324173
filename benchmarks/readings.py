"""What the readings of the paper that need no training are worth, on models that are there already.

    python benchmarks/readings.py runs/cells/*/vacsr-paper/seed-* --json docs/results/readings.json
    python benchmarks/readings.py NAME=RUN … --pairs SPEC --judgments FILE FILE --split test

Each run of the method `vacsr` is evaluated with the default of every switch, and again with one of them changed: how z
is decoded, what the uncertainty of a pair is, how its bins are cut, and who goes first among equal scores
(docs/decisions.md: 15, 16, 19 and "rankings of equal scores"). Runs of one name are averaged; unless given, the name is
that of the two folders that the run lies in, `clean/vacsr-paper`. Data and human grades are the run's own unless given.
Each record has the mixing weights too, and how far log σ² goes before it is clamped (8).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from _common import log, parser
from vacsr.adapter import VariationalAdapter
from vacsr.data import PairSet, PhotoSet, load_pairs
from vacsr.errors import UsageError
from vacsr.evaluate.agreement import Judgments, read_judgments
from vacsr.evaluate.ranks import Ties
from vacsr.evaluate.report import evaluate_scores, markdown_table
from vacsr.evaluate.uncertainty import Bins
from vacsr.files import write_json
from vacsr.methods.vacsr import Vacsr
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer, PairScores
from vacsr.train.checkpoint import run_pairs, run_section


class Reading(NamedTuple):
    """The defaults, or one switch turned."""

    decode: str = "mean"
    uncertainty: str = "variance"
    ties: Ties = "stable"
    bins: Bins = "count"


READINGS = {
    "defaults": Reading(),
    "decode: argmax": Reading(decode="argmax"),
    "uncertainty: std": Reading(uncertainty="std"),
    "uncertainty: exp": Reading(uncertainty="exp"),
    "bins: equal": Reading(bins="equal"),
    "ties: pessimistic": Reading(ties="pessimistic"),
}
METRICS = {
    "RSUM": ("rsum",),
    "mAP@R i2t": ("i2t", "map_at_r"),
    "mAP@R t2i": ("t2i", "map_at_r"),
    "σ–R@1 i2t": ("uncertainty", "corr_r1_i2t"),
    "σ–R@1 t2i": ("uncertainty", "corr_r1_t2i"),
    "AURC i2t": ("uncertainty", "aurc_i2t"),
    "AURC t2i": ("uncertainty", "aurc_t2i"),
    "FN AUROC σ": ("uncertainty", "auroc_false_negative"),
    "τ-c experts": ("judgments", "expert_tau_c"),
}


class Data(NamedTuple):
    """What a model is judged on."""

    pairs: PairSet | PhotoSet
    judgments: Sequence[Judgments]


def read_data(run: Path, args: argparse.Namespace) -> Data:
    """As the command line says, or the run's own."""
    files = args.judgments or run_section(run, "evaluate").get("judgments") or ()
    pairs = load_pairs(args.pairs or run_pairs(run), split=args.split)
    return Data(pairs, [read_judgments(Path(file)) for file in files])


def read_model(run: Path) -> tuple[MatchingModel, VariationalAdapter]:
    """A run's model, and the part of it that the switches belong to."""
    model = MatchingModel.from_pretrained(run)
    if not isinstance(model.method, Vacsr):
        raise UsageError(f"{run} is of another method — give runs of vacsr")
    return model, model.method.adapter


@torch.inference_mode()
def log_var_range(scores: PairScores, adapter: VariationalAdapter) -> list[float]:
    """Lowest and highest log σ², unclamped, of the first hundred images with the first hundred captions."""
    hidden = adapter.features(scores.images.mean[:100, None], scores.texts.mean[None, :100])
    raw = adapter.log_var_heads(hidden)
    return [raw.min().item(), raw.max().item()]


def records(name: str, run: Path, data: Data) -> Iterator[dict[str, Any]]:
    """One for each reading; scores are computed once for those that share them. Weights depend on none of these."""
    model, adapter = read_model(run)
    logits = adapter.mixing_logits  # argmax takes the component of the largest α
    alpha = None if logits is None else logits.detach().softmax(-1).tolist()
    head = {"name": name, "seed": run_section(run, "train").get("seed"), "images": len(data.pairs.image_ids)}
    scores: dict[tuple[str, str], PairScores] = {}
    for title, reading in READINGS.items():
        switches = {"decode": reading.decode, "uncertainty": reading.uncertainty}
        adapter.config = adapter.config.model_copy(update=switches)
        key = (reading.decode, reading.uncertainty)
        if key not in scores:
            scores[key] = PairScorer(model).score_set(data.pairs)
        (result,) = evaluate_scores(
            scores[key], data.pairs, judgments=data.judgments, ties=reading.ties, bins=reading.bins
        ).results
        values = {metric: at(result, path) for metric, path in METRICS.items()}
        reach = log_var_range(scores[key], adapter)
        yield {**head, "alpha": alpha, "log_var": reach, "reading": title, "figures": values}


def at(result: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """A metric of a report; None where it has none."""
    value: Any = result
    for part in path:
        value = (value or {}).get(part)
    return value


def markdown(every: Sequence[Mapping[str, Any]]) -> str:
    """Mean ± standard deviation over runs of one name."""
    rows = []
    for name in dict.fromkeys(record["name"] for record in every):
        for title in READINGS:
            chosen = [record["figures"] for record in every if (record["name"], record["reading"]) == (name, title)]
            cells = [spread([values[metric] for values in chosen], metric) for metric in METRICS]
            rows.append([name, str(len(chosen)), title, *cells])
    return markdown_table(["model", "runs", "reading", *METRICS], rows)


def spread(values: Sequence[float | None], metric: str) -> str:
    """``395.0 ± 1.2``, correlations with one digit more."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    digits = 3 if "R@1" in metric else 1
    mean = f"{statistics.fmean(known):.{digits}f}"
    return f"{mean} ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean


def main() -> None:
    """Evaluate each run under each reading; print the means and keep every metric."""
    options = parser(__doc__)
    options.add_argument("runs", nargs="*", metavar="[NAME=]RUN")
    options.add_argument("--pairs", metavar="SPEC", help="data; default: each run's own")
    options.add_argument("--judgments", nargs="+", metavar="FILE", help="human grades; default: each run's own")
    options.add_argument("--split", default="test")
    args = options.parse_args()
    if not args.runs:
        print("give run folders that hold their models; nothing to do without them")
        return
    every: list[dict[str, Any]] = []
    for item in args.runs:
        label, _, folder = item.rpartition("=")
        run = Path(folder)
        name = label or "/".join(run.resolve().parts[-3:-1])
        every += records(name, run, read_data(run, args))
        log(f"{name}: {run.name}")
    print(markdown(every))
    if args.json:
        write_json(args.json, {"schema": 1, "split": args.split, "torch": torch.__version__, "records": every})


if __name__ == "__main__":
    main()
