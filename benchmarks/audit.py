"""How well an audit finds wrong pairs and missing matches, beside other signals of the same data, and what it costs.

    python benchmarks/audit.py [--noise RUNS] [--clean RUNS …] [--scenes RUNS] [--walk] --json docs/results/audit.json
    python benchmarks/audit.py --figure docs/results/audit.svg --json docs/results/audit.json

RUNS hold run folders as `vacsr compare` leaves them: noise-20/vacsr-default/seed-0, noise-20/infonce-cosine/seed-0 and
so on; clean/ROW/seed-K for the human judgments, which the runs' own config.yaml names; for scenes start and
seed-K/METHOD. What the JSON file holds of other parts stays.
"""

from __future__ import annotations

import argparse
import io
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

from _audit_signals import HIGH_RECALLS, measured, missing_signals, wrong_signals
from _common import keep, parser, stored, timed
from vacsr.config.io import read_recipe
from vacsr.data import load_pairs, read_split
from vacsr.evaluate.agreement import Judgments, read_judgments
from vacsr.evaluate.truth import scene_truth
from vacsr.files import write_json, write_text
from vacsr.pages.plots import palette
from vacsr.scoring import PairScorer
from vacsr.search.audit import find_neighbours
from vacsr.train.data import training_data

Record = dict[str, Any]
OURS, RIVAL = "vacsr-default", "infonce-cosine"
WORLD = "scenes:images=1000,held_out=300,seed={seed}"
WALKS = ((8_000, 20_000, 256), (600, 566_435, 256))  # a whole one, and a part of one with COCO's captions
PANELS = {
    "noise-20": ("wrong captions, 20% noise", (20, 100)),
    "noise-50": ("wrong captions, 50% noise", (20, 100)),
    "judged-test": ("missing matches, people's grades", (0, 100)),
    "scenes": ("missing matches, exact truth", (0, 40)),
}
"""Of the figure: title and range of precisions in percent, by setting."""
SIGNALS = {
    "audit of vacsr": ("vacsr audit", "vacsr", "-"),
    "cosine of vacsr": ("vacsr cosine", "vacsr", ":"),
    "loss GMM of infonce": ("infonce loss GMM", "hue-1", "-"),
    "audit of infonce": ("infonce audit", "infonce", "-"),
    "cosine of infonce": ("infonce cosine", "infonce", ":"),
    "σ of vacsr": ("vacsr σ", "published", "-"),
}
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "vacsr", "font.size": 9, "font.sans-serif": ["DejaVu Sans"],
               "axes.spines.right": False, "axes.spines.top": False}  # fmt: skip


def main() -> None:
    """Measure what was asked for, print it, write it."""
    options = parser(__doc__)
    options.add_argument("--noise", type=Path, help="(a) and, with models trained under 20%% noise, (b)")
    options.add_argument("--clean", type=Path, action="append", default=[], help="(b)")
    options.add_argument("--scenes", type=Path, help="(c)")
    options.add_argument("--walk", action="store_true", help="time the walk over all pairs")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--figure", type=Path, help="draw the curves of what --json holds")
    args = options.parse_args()
    if args.json is None:
        print("give --json and what to measure; nothing to do without them")
        return
    torch.set_num_threads(args.threads)
    for record in itertools.chain(noisy(args), judged(args), scenes(args)):
        shown = " ".join(f"{key} {record[key]:.1f}" for key in ("precision_at_n", "ap", "auroc"))
        print(f"{record['setting']} seed {record['seed']} {record['signal']}: {shown}", flush=True)
        keep(args.json, record, keys=("setting", "seed", "signal"))
    if args.walk:
        write_json(args.json, {**stored(args.json), "walks": [walk(*size, threads=args.threads) for size in WALKS]})
    if args.figure:
        write_text(args.figure, draw(stored(args.json)["records"]))


def noisy(args: argparse.Namespace) -> Iterator[Record]:
    """(a) Captions that the noise moved to another image."""
    for setting, seed, folder in [*noise_runs(args, OURS), *noise_runs(args, RIVAL)]:
        data = training_data(read_recipe(folder / "config.yaml").data)
        assert data.noise is not None
        wrong = data.noise.assignment != data.noise.original
        scorer, name = PairScorer.from_pretrained(folder, device="cpu"), folder.parent.name.partition("-")[0]
        for signal, value in wrong_signals(scorer, data.train, name=name).items():
            metrics = measured(value, wrong, recalls=HIGH_RECALLS)
            yield {"setting": setting, "seed": seed, "signal": signal, **metrics}


def noise_runs(
    args: argparse.Namespace, row: str, settings: tuple[str, ...] = ("noise-20", "noise-50")
) -> Iterator[tuple[str, int, Path]]:
    """Setting, seed and run folder of each noisy run."""
    for setting in settings if args.noise else ():
        for seed in map(int, args.seeds.split(",")):
            yield setting, seed, args.noise / setting / row / f"seed-{seed}"


def clean_runs(args: argparse.Namespace) -> Iterator[tuple[str, int, Path]]:
    """Of several roots, the first that has a model gives it."""
    done = set()
    for folder in (path.parent for root in args.clean for path in sorted(root.glob("clean/*/seed-*/model"))):
        row, seed = folder.parent.name, int(folder.name.removeprefix("seed-"))
        if row in (OURS, "infonce", "sigmoid") and (row, seed) not in done:
            done.add((row, seed))
            yield "", seed, folder


def judged(args: argparse.Namespace) -> Iterator[Record]:
    """(b) Unlabelled pairs that experts grade 3 or more, among the unlabelled pairs that they graded."""
    noisy = [run for row in (OURS, RIVAL) for run in noise_runs(args, row, ("noise-20",))]
    for trained, seed, folder in [*clean_runs(args), *noisy]:
        recipe = read_recipe(folder / "config.yaml")
        pairs = read_split(recipe.data, "test")
        every = map(read_judgments, map(Path, recipe.evaluate.judgments))
        expert = next(judgments for judgments in every if judgments.kind == "expert")
        scorer, name = PairScorer.from_pretrained(folder, device="cpu"), folder.parent.name.partition("-")[0]
        for half in ("judged-dev", "judged-test"):
            rows, cols, missed = judged_pairs(expert.subset(half), pairs)
            for signal, value in missing_signals(scorer, pairs, rows, cols, name=name).items():
                setting = f"{half}-{trained}" if trained else half
                yield {"setting": setting, "seed": seed, "signal": signal, **measured(value, missed)}


def judged_pairs(judged: Judgments, pairs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and whether it is a match, of the judged pairs across images that are in the data. [P] each"""
    images = {name: row for row, name in enumerate(pairs.image_ids)}
    captions = {name: col for col, name in enumerate(pairs.caption_ids)}
    every = zip(judged.image_ids, judged.caption_ids, judged.grades, judged.same_image, strict=True)
    known = [(images[i], captions[c], g >= 3) for i, c, g, same in every if not same and i in images and c in captions]
    rows, cols, missed = zip(*known, strict=True)
    return torch.tensor(rows), torch.tensor(cols), torch.tensor(missed)


def scenes(args: argparse.Namespace) -> Iterator[Record]:
    """(c) Every unlabelled pair of a generated world; matches are those whose caption is wholly true."""
    for seed in map(int, args.seeds.split(",")) if args.scenes else ():
        world = WORLD.format(seed=seed)
        for setting, split in (("scenes-dev", "dev"), ("scenes", "test")):
            pairs = load_pairs(world, split=split)
            truth = scene_truth(world, pairs)
            assert truth is not None
            rows, cols = (~truth.labelled).nonzero().unbind(1)
            missed = truth.false_negative[rows, cols]
            for signal, value in scene_signals(args.scenes, pairs, rows, cols, seed=seed):
                yield {"setting": setting, "seed": seed, "signal": signal, **measured(value, missed)}


def scene_signals(root: Path, pairs: Any, rows: Tensor, cols: Tensor, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Of the methods and of the towers that they started from."""
    for name in ("vacsr", "infonce", "sigmoid"):
        scorer = PairScorer.from_pretrained(root / f"seed-{seed}" / name, device="cpu")
        yield from missing_signals(scorer, pairs, rows, cols, name=name).items()
    start = PairScorer.from_pretrained(root / "start", device="cpu").score_set(pairs)
    yield "start cosine", start.score_of(rows, cols)


def walk(images: int, captions: int, dim: int, *, threads: int) -> Record:
    """Time of the walk over all pairs of random unit vectors: as the clock goes, and as this process worked."""
    generator = torch.Generator().manual_seed(0)
    v, t = (normalize(torch.randn(count, dim, generator=generator), dim=1) for count in (images, captions))
    owner = torch.arange(captions) % images
    find_neighbours(v[:256], t[:256], owner[:256] % 256, captions=5)  # the first call sets torch up
    _, (seconds, cpu) = timed(lambda: find_neighbours(v, t, owner, captions=5))
    result = {"images": images, "captions": captions, "dim": dim, "threads": threads}
    result |= {"seconds": float(seconds), "cpu_seconds": float(cpu)}
    print(result)
    return result


def draw(records: Sequence[Mapping[str, Any]]) -> str:
    """Precision along the recall as an SVG file: four settings, one legend; curves are means over seeds."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 6.2), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, (setting, (title, limits)) in zip(panels, PANELS.items(), strict=True):
            axes.set(title=title, ylim=limits, xlabel="recall, %", ylabel="precision, %")
            axes.grid(axis="y", alpha=0.3)
            for name, (signal, colour, line) in SIGNALS.items():
                points = curve(records, setting, signal)
                if points:
                    axes.plot(*zip(*points, strict=True), line, color=palette()[colour], label=name)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def curve(records: Sequence[Mapping[str, Any]], setting: str, signal: str) -> list[tuple[float, float]]:
    """Recall and mean precision; empty where it was not measured."""
    same = [one for one in records if (one["setting"], one["signal"]) == (setting, signal)]
    recalls = same[0]["precision_at_recall"] if same else {}
    return [(float(r), statistics.fmean(one["precision_at_recall"][r] for one in same)) for r in recalls]


if __name__ == "__main__":
    main()
