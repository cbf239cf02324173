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
from vacsr.demo.settings import demo_recipes, start_recipe
from vacsr.demo.text import describe
from vacsr.demo.training import START, train_methods
from vacsr.files import atomic_path, write_json, write_text
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer

_SIDE = 256  # pixels of the picture that is left to play with


def run_demo(
    out: Path, *, seed: int = 0, recipes: Mapping[str, Recipe] | None = None, start: Recipe | None = None
) -> str:
    """Train the methods, save them in ``out`` with table.md, results.json and index.html, and say what came out.

    ``recipes``: by method, instead of :func:`vacsr.demo.settings.demo_recipes`, all on the same ``scenes:`` world;
    ``start``: what trains the towers they start from, instead of :func:`vacsr.demo.settings.start_recipe`.
    """
    claim_folder(out)
    chosen, first = dict(recipes or demo_recipes(seed)), start or start_recipe(seed)
    with DemoProgress([START, *chosen]) as progress, _one_thread():
        progress.say(f"{START}: small towers from nothing, on {first.data.pairs}")
        progress.say(f"then {', '.join(chosen)} from there, on {next(iter(chosen.values())).data.pairs}")
        models = train_methods(chosen, start=first, listen=progress.listen)
        progress.say("measuring against the truth, drawing the page")
        demo = examine(models, chosen, start=first)
        page = demo_page(demo, commands=_commands(out, demo))
    text = describe(demo)
    write_json(out / RESULTS, to_json(demo))  # first: it marks the folder as the demo's
    write_text(out / TABLE, text + "\n")
    write_text(out / PAGE, page)
    for name, model in models.items():
        model.save_pretrained(out / name / "model")
    _save_picture(out / PICTURE, demo)
    command = next(iter(_commands(out, demo).values()))
    return f"{text}\n\nSaved in {out}. Open {out / PAGE} in a browser. Next, try: {command}"


def examine(models: Mapping[str, MatchingModel], recipes: Mapping[str, Recipe], *, start: Recipe) -> Demo:
    """Every figure of every method on the test split, and some queries looked at closely."""
    known = known_world(next(iter(recipes.values())))
    scores = {name: PairScorer(model, device="cpu").score_set(known.world.pairs) for name, model in models.items()}
    findings = {name: measure(found, known) for name, found in scores.items()}
    return Demo(dict(recipes), start, known, findings, tuple(ask(scores, known)))


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
