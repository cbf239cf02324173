"""A minute's tour: three losses trained on a generated world whose every similarity is known. `vacsr demo` runs it.

The numbers come out as they are. All methods share one learning rate, chosen once by the sum of their dev RSUMs in a
world of another seed; batch and epochs keep the tour short.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.data import load_pairs, parse_spec
from vacsr.data.synthetic import ATTRIBUTES, SyntheticWorld, load_synthetic, true_share
from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.evaluate.exact import Truth, TruthFacts, exact_metrics, exact_truth, truth_facts
from vacsr.evaluate.retrieval import evaluate_retrieval
from vacsr.files import write_json, write_text
from vacsr.methods.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.train import fit

METHODS = ("infonce", "sigmoid", "vacsr")
_KIND = "vacsr demo"  # marks a results.json as ours, to be overwritten
_SHOWN = 3
_COLUMNS = (
    ("RSUM ↑", "rsum"),
    ("exact mAP@R ↑", "map_at_r"),
    ("exact τ-b ↑", "tau_b"),
    ("σ–R@1 i2t ↓", "corr_r1_i2t"),
    ("σ–R@1 t2i ↓", "corr_r1_t2i"),
    ("FN by score ↑", "auroc_false_negative_score"),
    ("FN by σ ↑", "auroc_false_negative"),
)
_LEGEND = """\
infonce is CLIP's loss, sigmoid is SigLIP's, vacsr the variational adapter; same data, heads and epochs.
↑ higher is better, ↓ lower is better, – the method has no uncertainty σ.

- RSUM: R@1 + R@5 + R@10 in both directions on the official labels, at most 600; a false negative counts as a mistake.
- exact mAP@R: retrieval against the truth, every wholly true pair being relevant; both directions averaged, percent.
- exact τ-b: does the order of the scores follow the true grades between 0 and 1? Kendall's, times 100.
- σ–R@1: is the top answer right less often where σ is high? A correlation over ten bins; −1 is best.
- FN by score, FN by σ: does a high value tell a false negative from the other unlabelled pairs? AUROC in percent;
  50 is chance, below 50 false negatives have the lower values.

One world, one seed: repeat with --seed 1 before you trust a small difference."""


class Demo(NamedTuple):
    """What came out."""

    seed: int
    facts: TruthFacts
    figures: dict[str, dict[str, float | None]]
    """By method, then by the keys of the columns."""
    example: str


def run_demo(out: Path, *, seed: int = 0) -> str:
    """Train the three methods, save them in ``out`` with table.md and results.json, and say what came out."""
    claim_folder(out)
    with _one_thread():
        models = {name: train_method(name, seed=seed) for name in METHODS}
        demo = examine_models(models, seed=seed)
    text = describe(demo)
    write_json(out / "results.json", to_json(demo))  # first: it marks the folder as the demo's
    write_text(out / "table.md", text + "\n")
    for name, model in models.items():
        model.save_pretrained(out / name / "model")
    command = f"vacsr evaluate {shlex.quote(str(out / 'vacsr'))} --pairs {world_spec(seed)} --split test"
    return f"{text}\n\nSaved in {out}. Next, try: {command}"


def world_spec(seed: int) -> str:
    """The SPEC of the demo's world."""
    return f"synthetic:seed={seed}"


def claim_folder(out: Path) -> None:
    """Make the folder. One that holds other people's results under the demo's names is refused before any work."""
    names = [name for name in ("results.json", "table.md", *METHODS) if (out / name).exists()]
    if names and not _is_demo(out / "results.json"):
        raise UsageError(f"{out} already holds {names[0]}, which is not the demo's — choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make the folder {out} ({error.strerror}) — choose another --out") from error


def _is_demo(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == _KIND


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small products gain nothing from more, lose much on a busy machine, and might round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_config(seed: int) -> TrainConfig:
    """On the CPU, so that the table is the same with and without a GPU."""
    return TrainConfig(epochs=10, batch_size=64, lr=5e-3, seed=seed, device="cpu")


def train_method(name: str, *, seed: int) -> MatchingModel:
    """One method on the train split; dev RSUM on the official labels chooses the epoch."""
    train, dev = (load_pairs(world_spec(seed), split=split) for split in ("train", "dev"))
    run = fit(name, train, train_config(seed), dev=dev, backbone=BackboneConfig(head=HeadConfig(dim=32)))
    if run.interrupted:
        raise KeyboardInterrupt
    return run.model


def examine_models(models: dict[str, MatchingModel], *, seed: int) -> Demo:
    """Every figure of every method on the test split, and one caption looked at closely."""
    world = load_synthetic(parse_spec(world_spec(seed)).with_options({"split": "test"}))
    truth = exact_truth(true_share(world.present, world.mentioned), world.pairs.caption_image)
    scorers = {name: PairScorer(model, device="cpu") for name, model in models.items()}
    figures = {name: measure(scorer, world, truth) for name, scorer in scorers.items()}
    return Demo(seed, truth_facts(truth), figures, describe_example(scorers["vacsr"], world, truth))


def measure(scorer: PairScorer, world: SyntheticWorld, truth: Truth) -> dict[str, float | None]:
    """Retrieval by the official labels, by the truth, and what the uncertainty is worth."""
    (result,) = evaluate_retrieval(scorer, world.pairs).results
    exact = exact_metrics(scorer.score_set(world.pairs), truth)
    sigma = result["uncertainty"] or {}
    correlations = {key: sigma.get(key) for key in ("corr_r1_i2t", "corr_r1_t2i")}
    return {"rsum": result["rsum"], **exact._asdict(), **correlations}


def describe_example(scorer: PairScorer, world: SyntheticWorld, truth: Truth) -> str:
    """The first caption that is true of three images or more, and its best images: chosen before any score is seen."""
    caption = int((truth.relevant.sum(dim=0) >= _SHOWN).int().argmax())
    scores = scorer.score_set(world.pairs)
    best = scores.topk(_SHOWN, direction="t2i").index[caption]
    found = scorer.score_at(scores, rows=best, cols=torch.full_like(best, caption))
    assert found.uncertainty is not None, "vacsr has an uncertainty"
    rows = [["image", "shows", "grade", "σ", "truly a match?"]]
    for image, grade, sigma in zip(best.tolist(), found.grade.tolist(), found.uncertainty.tolist(), strict=True):
        shows = ", ".join(name for name, there in zip(ATTRIBUTES, world.present[image].tolist(), strict=True) if there)
        rows.append(
            [world.pairs.image_ids[image], shows, f"{grade:.2f}", f"{sigma:.3f}", _verdict(truth, image, caption)]
        )
    assert world.pairs.captions is not None, "the generated world has words"
    count = int(truth.relevant[:, caption].sum())
    words = (
        f'"{world.pairs.captions[caption]}" is true of {count} test images and labelled with one. vacsr\'s best three:'
    )
    return f"{words}\n\n{markdown_table(rows)}"


def _verdict(truth: Truth, image: int, caption: int) -> str:
    if truth.labelled[image, caption]:
        return "yes, the labelled one"
    if truth.relevant[image, caption]:
        return "yes, though unlabelled"
    return f"no, {100 * float(truth.grades[image, caption]):.0f}% of it is true"


def describe(demo: Demo) -> str:
    """The facts of the world, the table with its legend, and the example, as Markdown."""
    return "\n\n".join(
        ["# vacsr demo", describe_world(demo), figures_table(demo), _LEGEND, "## One caption", demo.example]
    )


def describe_world(demo: Demo) -> str:
    """What there is to find, and how much of it the labels know."""
    facts = demo.facts
    return (
        f"A generated world (seed {demo.seed}) of attributes seen through noisy embeddings. Its test split has "
        f"{facts.images:,} images and {facts.captions:,} captions.\n"
        f"A caption is true of {facts.images_per_caption:.1f} images on average, but labelled with one: "
        f"{facts.unlabelled_share:.0f}% of the true pairs carry no label.\n"
        f"These {facts.false_negatives:,} false negatives are {facts.false_negative_share:.1f}% of the unlabelled "
        "pairs. All methods trained on labels of this kind."
    )


def figures_table(demo: Demo) -> str:
    """One row a method."""
    head = ["method", *(title for title, _ in _COLUMNS)]
    rows = [[name, *(_figure(key, found[key]) for _, key in _COLUMNS)] for name, found in demo.figures.items()]
    return markdown_table([head, *rows])


def _figure(key: str, value: float | None) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.2f}" if key.startswith("corr_") else f"{value:.1f}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns also line up as plain text; the first row is the head.

    >>> print(markdown_table([["method", "x"], ["a", "1.0"]]))
    | method | x   |
    |--------|-----|
    | a      | 1.0 |
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def to_json(demo: Demo) -> dict[str, Any]:
    """Every figure, with the settings it came from."""
    return {
        "schema": 1,
        "kind": _KIND,
        "seed": demo.seed,
        "pairs": world_spec(demo.seed),
        "split": "test",
        "train": train_config(demo.seed).model_dump(mode="json"),
        "world": demo.facts._asdict(),
        "methods": demo.figures,
    }
