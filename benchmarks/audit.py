"""How well an audit finds wrong pairs and missing matches, beside other signals of the same data, and counts them.

    python benchmarks/audit.py --flickr8k DIR --coco DIR [--count] --json docs/results/audit.json
    python benchmarks/audit.py [--clean RUNS …] [--scenes RUNS] [--walk] --json docs/results/audit.json
    python benchmarks/audit.py --figure docs/results/audit.svg --json docs/results/audit.json

The first trains InfoNCE on frozen features for three epochs, with labels made wrong; it takes about ten minutes of one
core, and --count as long again. RUNS hold run folders as `vacsr compare` leaves them: clean/ROW/seed-K for the human
judgments, which the runs' own config.yaml names; for scenes start and seed-K/METHOD. What the JSON file holds of other
parts stays.
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
from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import read_recipe
from vacsr.data import PairSet, load_pairs, read_split
from vacsr.data.noise import SHARED_NOUN, apply_noise, make_noise
from vacsr.evaluate.agreement import Judgments, read_judgments
from vacsr.evaluate.truth import scene_truth
from vacsr.files import write_json, write_text
from vacsr.pages.plots import palette
from vacsr.scoring import PairScorer
from vacsr.search.audit import find_neighbours, signals
from vacsr.train import fit

Record = dict[str, Any]
KEYS = ("setting", "seed", "signal")
SETTINGS = {
    f"{name}-{round(100 * ratio)}": (protocol, ratio)
    for name, protocol in (("random", "derange-captions"), ("noun", SHARED_NOUN))
    for ratio in (0.2, 0.5)
}
COUNTED = (0.0, 0.05, 0.2, 0.5)  # shares of random noise
COUNT_SEEDS, SUBSETS = 3, 4  # models of each share, and halves of the images that are counted again with each
LOW = {"cxc-own": 3.5, "cxc-odd": 4.5}  # of CxC's grades 0 to 5: below, a caption is wrong, or odd
MATCH = 4.0  # from this grade an unlabelled pair is a match
WORLD = "scenes:images=1000,held_out=300,seed={seed}"
WALKS = ((8_000, 20_000, 256), (600, 566_435, 256))  # a whole one, and a part of one with COCO's captions
PANELS = {
    "random-20": ("random, 20% wrong", (40, 100)),
    "random-50": ("random, 50% wrong", (40, 100)),
    "noun-20": ("shared noun, 20% wrong", (40, 100)),
    "noun-50": ("shared noun, 50% wrong", (40, 100)),
}
"""Of the figure: title and range of precisions in percent, by setting."""
SIGNALS = {
    "audit": ("audit", "vacsr", "-"),
    "LEMoN, tuned": ("LEMoN, tuned", "published", "-"),
    "LEMoN": ("LEMoN", "published", ":"),
    "CLIP score": ("CLIP score", "infonce", "-"),
    "loss GMM": ("loss GMM", "hue-1", "-"),
    "self-confidence": ("self-confidence", "hue-1", ":"),
}
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "vacsr", "font.size": 9, "font.sans-serif": ["DejaVu Sans"],
               "axes.spines.right": False, "axes.spines.top": False}  # fmt: skip


def main() -> None:
    """Measure what was asked for, print it, write it."""
    options = parser(__doc__)
    options.add_argument("--flickr8k", type=Path, help="folder with features and captions.json: (a) and the counts")
    options.add_argument("--coco", type=Path, help="the same, with cxc-grades.tsv: (b) and the counts")
    options.add_argument("--clean", type=Path, action="append", default=[], help="(c)")
    options.add_argument("--scenes", type=Path, help="(d)")
    options.add_argument("--count", action="store_true", help="only the counts, by estimate and in truth")
    options.add_argument("--walk", action="store_true", help="time the walk over all pairs")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--figure", type=Path, help="draw the curves of what --json holds")
    args = options.parse_args()
    if args.json is None:
        print("give --json and what to measure; nothing to do without them")
        return
    torch.set_num_threads(args.threads)
    if args.count:
        counts = [show(record) for record in counted(args)]
        write_json(args.json, {**stored(args.json), "counts": counts})
        return
    for record in itertools.chain(noisy(args), graded(args), judged(args), scenes(args)):
        shown = " ".join(f"{key} {record[key]:.1f}" for key in ("precision_at_n", "ap", "auroc"))
        print(f"{record['setting']} seed {record['seed']} {record['signal']}: {shown}", flush=True)
        keep(args.json, record, keys=KEYS)
    if args.walk:
        write_json(args.json, {**stored(args.json), "walks": [walk(*size, threads=args.threads) for size in WALKS]})
    if args.figure:
        write_text(args.figure, draw(stored(args.json)["records"]))


def show(record: Record) -> Record:
    print(record, flush=True)
    return record


def noisy(args: argparse.Namespace) -> Iterator[Record]:
    """(a) Captions that the noise moved to another image."""
    for setting, (protocol, ratio) in SETTINGS.items() if args.flickr8k else ():
        for seed in map(int, args.seeds.split(",")):
            scorer, pairs, wrong = trained(args.flickr8k, "train", protocol=protocol, ratio=ratio, seed=seed)
            for signal, value in wrong_signals(scorer, pairs, wrong).items():
                yield {
                    "setting": setting,
                    "seed": seed,
                    "signal": signal,
                    **measured(value, wrong, recalls=HIGH_RECALLS),
                }
            every = signals(scorer.score_set(pairs), pairs.caption_image).wrong
            assert every is not None
            count = every.estimate(pairs.caption_image, len(pairs.image_ids))
            keep(
                args.json,
                {"setting": setting, "seed": seed, "signal": "count", "n": int(wrong.sum()), **count._asdict()},
                keys=KEYS,
            )


def trained(
    folder: Path, split: str, *, protocol: str = "derange-captions", ratio: float = 0.0, seed: int = 0
) -> tuple[PairScorer, PairSet, Tensor]:
    """InfoNCE on noisy labels of frozen features, those labels, and which are wrong. The noise has the model's seed."""
    file = next(folder.glob("features-*.safetensors"))
    pairs = load_pairs(f"features:{file},captions={folder / 'captions.json'}", split=split)
    assert isinstance(pairs, PairSet)
    noise = make_noise(protocol, pairs.caption_image, ratio=ratio, seed=seed, captions=pairs.captions)
    noisy = apply_noise(pairs, noise)
    config = TrainConfig(epochs=3, batch_size=128, device="cpu", seed=seed)
    run = fit("infonce", noisy, config, backbone=BackboneConfig(head=HeadConfig(dim=256)), progress=False)
    return PairScorer(run.model, device="cpu"), noisy, noise.assignment != noise.original


def counted(args: argparse.Namespace) -> Iterator[Record]:
    """How many captions are wrong by estimate: of all, and of random halves of the images, with the same model."""
    for name, folder, split in (("flickr8k", args.flickr8k, "train"), ("coco", args.coco, "all")):
        for ratio, seed in itertools.product(COUNTED, range(COUNT_SEEDS)) if folder else ():
            scorer, pairs, wrong = trained(folder, split, ratio=ratio, seed=seed)
            generator, images = torch.Generator().manual_seed(seed), len(pairs.image_ids)
            for part in range(SUBSETS + 1):
                chosen = torch.randperm(images, generator=generator) < (images if part == 0 else images // 2)
                half, captions = pairs.subset(chosen), chosen[pairs.caption_image]
                every = signals(scorer.score_set(half), half.caption_image).wrong
                assert every is not None
                count = every.estimate(half.caption_image, len(half.image_ids))
                record = {"data": name, "ratio": ratio, "seed": seed, "part": part, "captions": len(half)}
                yield record | {"wrong": int(wrong[captions].sum()), **count._asdict()}


def graded(args: argparse.Namespace) -> Iterator[Record]:
    """(b) COCO as it is: own captions that people grade low, and pairs across images that they grade high (CxC)."""
    for seed in map(int, args.seeds.split(",")) if args.coco else ():
        scorer, pairs, _ = trained(args.coco, "all", seed=seed)
        judged = read_judgments(args.coco / "cxc-grades.tsv")
        own, _, cols = judged.take(judged.same_image.nonzero()[0].tolist()).within(pairs)
        ranked = wrong_signals(scorer, pairs, torch.zeros(len(pairs), dtype=torch.bool))
        ranked.pop("LEMoN, tuned")  # too few wrong captions to tune on
        for (signal, value), (setting, grade) in itertools.product(ranked.items(), LOW.items()):
            low = torch.from_numpy(own.grades < grade)
            yield {"setting": setting, "seed": seed, "signal": signal, **measured(value[cols], low, recalls=())}
        across = judged.take((~judged.same_image).nonzero()[0].tolist())
        known, rows, cols = across.within(pairs)
        high = torch.from_numpy(known.grades >= MATCH)
        for signal, value in missing_signals(scorer, pairs, rows, cols, name="infonce").items():
            if signal.split()[1] in ("audit", "cosine", "loss") and "rival" not in signal:
                yield {"setting": "cxc-across", "seed": seed, "signal": signal, **measured(value, high, recalls=())}


def clean_runs(args: argparse.Namespace) -> Iterator[tuple[int, Path]]:
    """Of several roots, the first that has a model gives it."""
    done = set()
    for folder in (path.parent for root in args.clean for path in sorted(root.glob("clean/*/seed-*/model"))):
        row, seed = folder.parent.name, int(folder.name.removeprefix("seed-"))
        if row in ("vacsr-default", "infonce", "sigmoid") and (row, seed) not in done:
            done.add((row, seed))
            yield seed, folder


def judged(args: argparse.Namespace) -> Iterator[Record]:
    """(c) Unlabelled pairs that experts grade 3 or more, among the unlabelled pairs that they graded."""
    for seed, folder in clean_runs(args):
        recipe = read_recipe(folder / "config.yaml")
        pairs = read_split(recipe.data, "test")
        every = map(read_judgments, map(Path, recipe.evaluate.judgments))
        expert = next(judgments for judgments in every if judgments.kind == "expert")
        scorer, name = PairScorer.from_pretrained(folder, device="cpu"), folder.parent.name.partition("-")[0]
        for half in ("judged-dev", "judged-test"):
            rows, cols, missed = judged_pairs(expert.subset(half), pairs)
            for signal, value in missing_signals(scorer, pairs, rows, cols, name=name).items():
                yield {"setting": half, "seed": seed, "signal": signal, **measured(value, missed)}


def judged_pairs(judged: Judgments, pairs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and whether it is a match, of the judged pairs across images that are in the data. [P] each"""
    images = {name: row for row, name in enumerate(pairs.image_ids)}
    captions = {name: col for col, name in enumerate(pairs.caption_ids)}
    every = zip(judged.image_ids, judged.caption_ids, judged.grades, judged.same_image, strict=True)
    known = [(images[i], captions[c], g >= 3) for i, c, g, same in every if not same and i in images and c in captions]
    rows, cols, missed = zip(*known, strict=True)
    return torch.tensor(rows), torch.tensor(cols), torch.tensor(missed)


def scenes(args: argparse.Namespace) -> Iterator[Record]:
    """(d) Every unlabelled pair of a generated world; matches are those whose caption is wholly true."""
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
