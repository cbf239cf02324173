"""`vacsr demo`: search, audit and confidence on drawn scenes, where the truth of every pair is known, and a page of it.

Small towers come with the package (tools/demo_towers.py made them). The demo draws new scenes, moves a third of the
training captions to other images, and trains heads with three losses on these labels. Each method has two members and
averaged weights; vacsr has the settings of its preset `ensemble`, with a narrow adapter that a CPU trains in seconds.

How the settings were chosen, on the dev splits of seeds 501 and 502. Captions speak of a scene's subject (subject=1),
as captions of photos do; in scenes without a subject the audit is behind the cosine. Among linear and two-layer heads
and 5, 10 and 20 epochs: the plan in which wrong labels cost InfoNCE most dev precision at 1, among those in which it
comes within two points of its best with clean labels. docs/measurements.md has the numbers, and those of other seeds.
"""

import json
import shlex
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vacsr.backbones.images import tower_inputs
from vacsr.config import BackboneConfig, Config, HeadConfig, TrainConfig
from vacsr.data import PairSet, PhotoSet, parse_spec
from vacsr.data.noise import apply_noise, make_noise
from vacsr.data.scenes import SceneWorld, load_scenes, render_scene, scene_grades
from vacsr.data.scenes.render import SceneRenderer
from vacsr.errors import UsageError
from vacsr.evaluate.truth import Truth, exact_metrics, exact_truth, truth_facts
from vacsr.evaluate.uncertainty import Array, aurc, selective_risk
from vacsr.files import atomic_paths, make_folder, write_json, write_text
from vacsr.model import MatchingModel
from vacsr.pages.curves import Plot
from vacsr.pages.examples import Picture, data_uri
from vacsr.pages.plots import Line, line_plot
from vacsr.pages.render import Cell, Row, render
from vacsr.progress import Bars
from vacsr.scoring import PairScorer, PairScores
from vacsr.search.audit import Signals
from vacsr.search.audit import signals as audit_signals
from vacsr.search.calibrate import CalibrateSettings, Calibration, fit_direction
from vacsr.search.galleries import Lists
from vacsr.search.index import calibration_path, model_digest
from vacsr.search.probabilities import Isotonic, Mask, expected_calibration_error, fit_hits, fit_isotonic
from vacsr.train import fit

METHODS: Mapping[str, Mapping[str, Any]] = {
    "infonce": {"name": "infonce", "members": 2},
    "sigmoid": {"name": "sigmoid", "members": 2},
    "vacsr": {"name": "vacsr", "preset": "ensemble", "members": 2, "adapter": {"hidden": 32, "latent": 16}},
}
OURS, USUAL = "vacsr", "infonce"
RESULTS, TABLE, PAGE, PICTURE, ALBUM = "results.json", "table.md", "index.html", "scene.png", "album"
KIND = "vacsr demo"  # marks a results.json as the demo's, which may be overwritten
TOWERS = "demo-towers"
WRONG_SHARE = 1 / 3
HEAD = HeadConfig(kind="mlp", dim=64, hidden=256, dropout=0.0)
METRICS = {
    "precision_at_1": ("first answer is true, %", "high"),
    "precision_at_5": ("true among the first five, %", "high"),
    "map_at_r": ("mAP@R, all matches, %", "high"),
    "wrong_by_audit": ("wrong captions found by the audit, %", "high"),
    "wrong_by_cosine": ("wrong captions found by the cosine, %", "high"),
    "missing_found": ("missing matches found, %", "high"),
    "aurc": ("risk, area under the curve", "low"),
    "grade_error": ("calibration error of the grade", "low"),
}
"""Of results.json, with their names in the table and which value is best."""
_LIST, _SHOWN, _CARDS, _SIDE, _ALBUM_SIDE = 20, 5, 6, 160, 224


class DemoConfig(Config):
    images: int = 1000
    held_out: int = 300
    epochs: int = 20

    def pairs(self, seed: int) -> str:
        return f"scenes:images={self.images},held_out={self.held_out},subject=1,seed={seed}"


class Split(NamedTuple):
    """Scenes with their features, the labels that the methods see, and the truth."""

    world: SceneWorld
    features: PairSet
    truth: Truth


class Answers(NamedTuple):
    """The best images of each test caption, by one method; its grades and confidences were fitted on dev."""

    images: Tensor  # [M, 20]
    right: Mask  # [M, 20]
    grade: Array  # [M, 20] the probability of a match
    confidence: Array  # [M] the probability that the first answer is right

    def hits(self) -> Array:
        """True images among those shown. [M]"""
        return np.asarray(self.right[:, :_SHOWN].sum(1))


class Audited(NamedTuple):
    """The labels of the training split, by one method."""

    signals: Signals
    wrong: Mask  # [M] the labelled pair is not true
    by_audit: Array  # [M] share of wrong captions among the first i
    by_cosine: Array  # [M]


class Measured(NamedTuple):
    answers: Answers
    audited: Audited
    metrics: dict[str, float]


def run_demo(out: Path, *, seed: int = 0, config: DemoConfig | None = None, progress: bool = True) -> str:
    """Train the methods, save them in ``out`` with results.json, table.md and index.html, and return what to print."""
    claim_folder(out)
    config = config or DemoConfig()
    models, measured = dict[str, MatchingModel](), dict[str, Measured]()
    with Bars(show=progress) as bars:
        step = bars.steps("demo", total=1 + 2 * len(METHODS))
        step("drawing scenes")
        towers = load_towers()
        splits = {name: load_split(towers, config.pairs(seed), name) for name in ("train", "dev", "test")}
        noisy = with_wrong_captions(splits["train"], seed=seed)
        for name in METHODS:
            step(f"training {name}")
            models[name] = train(name, noisy.features, seed=seed, epochs=config.epochs)
            step(f"measuring {name}")
            measured[name] = measure(PairScorer(models[name], device="cpu"), noisy, splits["dev"], splits["test"])
    data = to_json(measured, noisy, splits["test"], seed=seed, config=config)
    commands = _commands(out, splits["test"].world, pairs=data["pairs"], seed=seed)
    text = render("demo.md", data=data, rows=_rows(measured))
    write_json(out / RESULTS, data)  # first: it marks the folder as the demo's
    write_text(out / TABLE, text)
    page = {"queries": _search(measured, splits["test"]), **_audit(measured, noisy), "plots_of": _plots(measured)}
    write_text(out / PAGE, render("demo.html", data=data, rows=_rows(measured), commands=commands, **page))
    for name, model in models.items():
        with_towers(model, towers).save_pretrained(out / name / "model")
    calibrate_saved(out / OURS, splits["dev"], spec=config.pairs(seed))
    with atomic_paths(out / PICTURE) as (temporary,):
        Image.fromarray(render_scene(splits["test"].world.scenes[0], 256)).save(temporary, "png")
    save_album(out / ALBUM, splits["test"].world)
    return f"{text}\nSaved in {out}. Open {out / PAGE} in a browser. Next, try: {next(iter(commands.values()))}"


def claim_folder(out: Path) -> None:
    """Make the folder. One that holds other results under the demo's names is refused before any work."""
    try:
        ours = json.loads((out / RESULTS).read_text(encoding="utf-8"))["kind"] == KIND
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    names = [name for name in (RESULTS, TABLE, PAGE, PICTURE, ALBUM, *METHODS) if (out / name).exists()]
    if names and not ours:
        raise UsageError(f"{out} already holds {names[0]}, which is not the demo's — choose another --out")
    make_folder(out)


def load_towers() -> MatchingModel:
    with as_file(files("vacsr").joinpath(TOWERS)) as folder:
        return MatchingModel.from_pretrained(folder)


def load_split(towers: MatchingModel, pairs: str, name: str) -> Split:
    """Draw the scenes of a split and put them through the towers."""
    world = load_scenes(parse_spec(pairs).with_options({"split": name}))
    truth = exact_truth(scene_grades(world), world.pairs.caption_image)
    return Split(world, tower_features(towers, world.pairs), truth)


@torch.inference_mode()
def tower_features(towers: MatchingModel, pairs: PhotoSet) -> PairSet:
    """What the heads get from the towers: one vector per photo and per caption."""
    inputs, rows = tower_inputs(towers.backbone, pairs), range(len(pairs.image_ids))
    photos = inputs.images.stream([rows[start : start + 64] for start in range(0, len(rows), 64)])
    images = [towers.image_pool(towers.backbone.encode_images(batch)) for batch in photos]
    texts = [towers.text_pool(towers.backbone.encode_texts(batch)) for batch in torch.split(inputs.texts, 256)]
    labels = {name: getattr(pairs, name) for name in ("image_ids", "caption_ids", "caption_image", "captions", "split")}
    return PairSet(torch.cat(images).clone(), torch.cat(texts).clone(), **labels)


def with_towers(model: MatchingModel, towers: MatchingModel) -> MatchingModel:
    """The trained heads and method on the towers: a model that reads photos and words."""
    config = towers.config.model_copy(update={"head": model.config.head})
    whole = MatchingModel(towers.backbone, model.method, config=config)
    whole.image_head, whole.text_head, whole.others = model.image_head, model.text_head, model.others
    return whole.eval()


def calibrate_saved(run: Path, split: Split, *, spec: str) -> None:
    """Calibrate a saved model on its dev pictures, so that its searches say which hits are confident.

    `vacsr calibrate` knows labels; here the truth of every pair is known, and a hit is right where it is true.
    """
    scorer, pairs, settings = PairScorer.from_pretrained(run, device="cpu"), split.world.pairs, CalibrateSettings()
    _, right, score = _lists(scorer.score_set(pairs), split.truth, settings.candidates)
    fitted = fit_direction([Lists(score, right, pairs.caption_image.numpy(), len(pairs.image_ids))], settings)
    asked = {name: getattr(settings, name) for name in ("precision", "confidence", "coverage", "seed")}
    done = Calibration(model=model_digest(scorer.model), data="", pairs=spec, split=pairs.split, t2i=fitted, **asked)
    write_json(calibration_path(run), done.model_dump(mode="json"))


def save_album(folder: Path, world: SceneWorld) -> None:
    """The pictures as a folder of photos, to search."""
    make_folder(folder)
    renderer = SceneRenderer(_ALBUM_SIDE)
    for row, scene in enumerate(world.scenes):
        Image.fromarray(renderer.render(scene)).save(folder / f"{row:04d}.jpg", quality=92)


def with_wrong_captions(split: Split, *, seed: int) -> Split:
    """A third of the captions are labelled with another image."""
    noise = make_noise("derange-captions", split.features.caption_image, ratio=WRONG_SHARE, seed=seed)
    features = apply_noise(split.features, noise)
    return split._replace(features=features, truth=exact_truth(split.truth.grades, features.caption_image))


def train(name: str, pairs: PairSet, *, seed: int, epochs: int) -> MatchingModel:
    """Heads and method on frozen features; nothing looks at dev."""
    plan = TrainConfig(
        epochs=epochs, batch_size=64, lr=1e-3, schedule="cosine", warmup_steps=20, ema=0.99, eval_every=0, seed=seed,
        device="cpu",
    )  # fmt: skip
    backbone = BackboneConfig(image_scaling="none", text_scaling="none", head=HEAD)
    model: MatchingModel = fit(METHODS[name], pairs, plan, backbone=backbone, progress=False).model
    return model


def measure(scorer: PairScorer, train: Split, dev: Split, test: Split) -> Measured:
    """Everything that the page shows of a method."""
    fitted, scores = scorer.score_set(dev.features), scorer.score_set(test.features)
    grades = fit_isotonic(fitted.score.flatten(), dev.truth.relevant.double().flatten())
    answers = answer(scores, test.truth, grades=grades, fitted=fitted, known=dev.truth)
    audited = audit_labels(scorer.score_set(train.features), train)
    unlabelled, missing = ~test.truth.labelled, test.truth.false_negative
    by_score = selective_risk(-scores.score[unlabelled], missing[unlabelled].double())
    wrong, right = int(audited.wrong.sum()), answers.right
    metrics = {
        "precision_at_1": 100 * right[:, 0].mean(),
        "precision_at_5": 100 * right[:, :_SHOWN].mean(),
        "map_at_r": exact_metrics(scores, test.truth)["map_at_r"] or 0.0,
        "wrong_by_audit": 100 * audited.by_audit[wrong - 1],
        "wrong_by_cosine": 100 * audited.by_cosine[wrong - 1],
        "missing_found": 100 * by_score[int(missing.sum()) - 1],
        "aurc": 100 * aurc(-answers.confidence, ~right[:, 0]),
        "grade_error": 100 * expected_calibration_error(
            grades.apply(scores.score.flatten()), test.truth.relevant.double().flatten()
        ),
    }  # fmt: skip
    return Measured(answers, audited, {name: float(value) for name, value in metrics.items()})


def answer(scores: PairScores, truth: Truth, *, grades: Isotonic, fitted: PairScores, known: Truth) -> Answers:
    """The best images of each caption. Confidences are fitted to ``fitted``, whose truth is ``known``."""
    (images, right, score), (_, was_right, known_score) = _lists(scores, truth), _lists(fitted, known)
    siblings = max(int(np.median(was_right.sum(1))) - 1, 0)
    confidence = fit_hits([(known_score, was_right)], siblings=siblings, depth=1).apply(score)[:, 0]
    return Answers(images, right, grades.apply(score.ravel()).reshape(score.shape), confidence)


def _lists(scores: PairScores, truth: Truth, count: int = _LIST) -> tuple[Tensor, Mask, Array]:
    """The best images of each caption, which are right, and their scores. [M, count] each"""
    top, columns = scores.topk(count, direction="t2i"), torch.arange(len(scores.texts.mean))[:, None]
    return top.index, truth.relevant[top.index, columns].numpy(), top.score.double().numpy()


def audit_labels(scores: PairScores, split: Split) -> Audited:
    """Rank the labelled pairs as `vacsr audit` does, and by their cosine; the share of wrong ones along both lists."""
    owner = split.features.caption_image
    signals, wrong = audit_signals(scores, owner), ~split.truth.relevant[owner, torch.arange(len(owner))]
    cosine = (scores.images.mean[owner] * scores.texts.mean).sum(1)
    along = [selective_risk(order, wrong.double()) for order in (-signals.suspicion, cosine)]
    return Audited(signals, wrong.numpy(), *along)


def to_json(
    measured: Mapping[str, Measured], train: Split, test: Split, *, seed: int, config: DemoConfig
) -> dict[str, Any]:
    """Every number, with the settings it came from."""
    lead = measured[OURS].answers.hits() - measured[USUAL].answers.hits()
    return {
        "schema": 4,
        "kind": KIND,
        "seed": seed,
        "pairs": config.pairs(seed),
        "split": "test",
        "settings": {
            "wrong_share": WRONG_SHARE,
            "epochs": config.epochs,
            "head": HEAD.model_dump(),
            "methods": METHODS,
        },
        "world": truth_facts(test.truth),
        "labels": {"captions": len(train.features), "wrong": int(measured[OURS].audited.wrong.sum())},
        "methods": {name: one.metrics for name, one in measured.items()},
        "captions": {"ahead": int((lead > 0).sum()), "behind": int((lead < 0).sum()), "even": int((lead == 0).sum())},
    }


def _rows(measured: Mapping[str, Measured]) -> list[Row]:
    """One row per metric, one cell per method; the best is bold."""
    rows = []
    for key, (name, best) in METRICS.items():
        texts = {method: f"{one.metrics[key]:.1f}" for method, one in measured.items()}
        first = (max if best == "high" else min)(texts.values(), key=float)
        rows.append(
            Row(f"{name} {'↑' if best == 'high' else '↓'}", [Cell(text, text == first) for text in texts.values()])
        )
    return rows


def _search(measured: Mapping[str, Measured], test: Split) -> list[tuple[str, dict[str, Any]]]:
    """Captions with the answers of both methods: where vacsr leads most, a typical one, and where it trails most."""
    lead = measured[OURS].answers.hits() - measured[USUAL].answers.hits()
    order = np.lexsort((-measured[OURS].answers.confidence, -lead))
    chosen = {
        "Where vacsr is furthest ahead": order[0],
        "A typical caption": order[len(order) // 2],
        "Where vacsr is furthest behind": order[-1],
    }
    return [(title, _query(measured, test, int(col))) for title, col in chosen.items()]


def _query(measured: Mapping[str, Measured], test: Split, col: int) -> dict[str, Any]:
    """A caption, and per method the pictures of the first answers, whether they are true, and their grades."""
    methods = []
    for name in (OURS, USUAL):
        one = measured[name].answers
        pictures = [_picture(test.world, row) for row in one.images[col, :_SHOWN].tolist()]
        cards = list(zip(pictures, one.right[col], one.grade[col], strict=False))
        said = {"name": name, "confidence": float(one.confidence[col]), "hits": int(one.hits()[col])}
        methods.append({**said, "cards": cards})
    return {"text": test.world.pairs.captions[col], "methods": methods}


def _audit(measured: Mapping[str, Measured], train: Split) -> dict[str, Any]:
    """The first suspects of vacsr's audit, and the first matches that it finds without a label.

    Of each: the caption, the picture it is labelled with or found for, another picture, and whether the audit is right.
    """
    signals, wrong = measured[OURS].audited.signals, measured[OURS].audited.wrong
    owner, rivals = train.features.caption_image.tolist(), signals.near.image.tolist()

    def card(col: int, row: int, other: int, really: bool) -> tuple[str, Picture, Picture, bool]:
        return train.world.pairs.captions[col], _picture(train.world, row), _picture(train.world, other), really

    suspected = signals.suspicion.argsort(descending=True, stable=True)[:_CARDS].tolist()
    first = signals.near.caption_agreement[:, 0].argsort(descending=True, stable=True)[:_CARDS].tolist()
    found = zip(first, signals.near.caption[first, 0].tolist(), strict=True)
    return {
        "suspects": [card(col, owner[col], rivals[col], bool(wrong[col])) for col in suspected],
        "missing": [card(col, row, owner[col], bool(train.truth.relevant[row, col])) for row, col in found],
    }


def _plots(measured: Mapping[str, Measured]) -> dict[str, list[Plot]]:
    """Precision along the audit's list, and risk against coverage."""
    wrong = int(measured[OURS].audited.wrong.sum())
    points = np.unique(np.linspace(1, wrong, 60).round().astype(int))
    found = [
        Line(f"{name}, {by}", points, 100 * along[points - 1], name, dashed=by == "cosine")
        for name in (OURS, USUAL)
        for by, along in (("audit", measured[name].audited.by_audit), ("cosine", measured[name].audited.by_cosine))
    ]
    risks = []
    for name, one in measured.items():
        risk = selective_risk(-one.answers.confidence, ~one.answers.right[:, 0])
        some = np.unique(np.linspace(0.02 * len(risk), len(risk), 50).round().astype(int).clip(1))
        risks.append(Line(name, 100 * some / len(risk), 100 * risk[some - 1], name))
    found_plot = line_plot(
        found, title="Precision of the suspects", x_label="captions checked, the most suspected first",
        y_label="really wrong, percent", y_range=(50, 101),
    )  # fmt: skip
    risk_plot = line_plot(
        risks, title="Risk against coverage", x_label="captions answered, the most confident first (percent)",
        y_label="first answer is not true, percent",
    )  # fmt: skip
    return {
        "audit": [Plot("Precision of the suspects", found_plot)],
        "risk": [Plot("Risk against coverage", risk_plot)],
    }


def _picture(world: SceneWorld, row: int) -> Picture:
    own = int((world.pairs.caption_image == row).nonzero()[0])
    uri = data_uri(render_scene(world.scenes[row], _SIDE))
    return Picture(world.pairs.image_ids[row], world.pairs.captions[own], uri)


def _commands(out: Path, world: SceneWorld, *, pairs: str, seed: int) -> dict[str, str]:
    """What to type next, by what it does."""
    run, picture, album = (shlex.quote(str(out / name)) for name in (OURS, PICTURE, ALBUM))
    index = shlex.quote(f"exact:{out / 'index'}")
    captions = world.pairs.captions
    texts = " ".join(f"--text {shlex.quote(caption)}" for caption in (captions[0], captions[-1]))
    return {
        "Put the test pictures into an index": f"vacsr index add {index} --run {run} --pairs {album}",
        "Search them": f"vacsr search {run} --index {index} --text 'a drawing of a red heart'",
        "Search them on a page": f"vacsr serve {run} --index {index}",
        "Evaluate the saved model": f"vacsr evaluate {run} --pairs {pairs} --split test",
        "Score any text for any picture": f"vacsr score {run} --image {picture} {texts}",
        "Repeat with another seed": f"vacsr demo --seed {seed + 1} --out {shlex.quote(f'{out}-{seed + 1}')}",
    }
