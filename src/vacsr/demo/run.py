"""`vacsr demo` from start to end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image

from vacsr.config import Recipe
from vacsr.data.scenes import render_scene
from vacsr.demo.display import DemoProgress
from vacsr.demo.findings import SPLIT, known_world, measure
from vacsr.demo.folder import PAGE, PICTURE, RESULTS, TABLE, claim_folder
from vacsr.demo.gallery import ask
from vacsr.demo.page import demo_page
from vacsr.demo.result import Demo, to_json
from vacsr.demo.settings import demo_recipes
from vacsr.demo.text import describe
from vacsr.demo.training import train_methods
from vacsr.files import atomic_path, write_json, write_text
from vacsr.methods.model import MatchingModel
from vacsr.scoring import PairScorer

_SIDE = 256  # pixels of the picture that is left to play with


def run_demo(out: Path, *, seed: int = 0, recipes: Mapping[str, Recipe] | None = None) -> str:
    """Train the methods, save them in ``out`` with table.md, results.json and index.html, and say what came out.

    ``recipes``: by method, instead of :func:`vacsr.demo.settings.demo_recipes`; all on the same ``scenes:`` world.
    """
    claim_folder(out)
    chosen = dict(recipes or demo_recipes(seed))
    with DemoProgress(list(chosen)) as progress, _one_thread():
        progress.say(
            f"training {', '.join(chosen)} on {next(iter(chosen.values())).data.pairs}; this takes some minutes"
        )
        models = train_methods(chosen, listen=progress.listen)
        progress.say("measuring against the truth, drawing the page")
        demo = examine(models, chosen)
        page = demo_page(demo, commands=_commands(out, demo))
    text = describe(demo)
    write_json(out / RESULTS, to_json(demo))  # first: it marks the folder as the demo's
    write_text(out / TABLE, text + "\n")
    write_text(out / PAGE, page)
    for name, model in models.items():
        model.save_pretrained(out / name / "model")
    _save_picture(out / PICTURE, demo)
    first = next(iter(_commands(out, demo).values()))
    return f"{text}\n\nSaved in {out}. Open {out / PAGE} in a browser. Next, try: {first}"


def examine(models: Mapping[str, MatchingModel], recipes: Mapping[str, Recipe]) -> Demo:
    """Every figure of every method on the test split, and some queries looked at closely."""
    known = known_world(next(iter(recipes.values())))
    scores = {name: PairScorer(model, device="cpu").score_set(known.world.pairs) for name, model in models.items()}
    findings = {name: measure(found, known) for name, found in scores.items()}
    return Demo(dict(recipes), known, findings, tuple(ask(scores, known)))


def _commands(out: Path, demo: Demo) -> dict[str, str]:
    """What to type next, by what it does."""
    run, picture = shlex.quote(str(out / "vacsr")), shlex.quote(str(out / PICTURE))
    captions = demo.known.world.pairs.captions
    texts = " ".join(f"--text {shlex.quote(words)}" for words in (captions[0], captions[-1]))
    return {
        "Evaluate the saved model": f"vacsr evaluate {run} --pairs {demo.recipe.data.pairs} --split {SPLIT}",
        "Grade any words for any picture": f"vacsr score {run} --image {picture} {texts}",
        "Repeat with another seed": f"vacsr demo --seed {demo.seed + 1} --out {shlex.quote(f'{out}-{demo.seed + 1}')}",
        "Train with settings of your own, in a checkout": "vacsr train recipes/scenes-tiny.yaml --out runs/scenes",
    }


def _save_picture(path: Path, demo: Demo) -> None:
    """The first test scene, for `vacsr score`."""
    with atomic_path(path) as temporary:
        Image.fromarray(render_scene(demo.known.world.scenes[0], _SIDE)).save(temporary, "png")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small products gain nothing from more, lose much on a busy machine, and might round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
