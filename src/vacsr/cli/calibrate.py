"""`vacsr calibrate`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import run_pairs, run_section
from vacsr.errors import UsageError, VacsrError

if TYPE_CHECKING:
    from vacsr.data import PairSet, PhotoSet
    from vacsr.search.calibrate import DirectionCheck
    from vacsr.search.calibration import Calibration, DirectionCalibration

_OTHER = {"--split": "dev", "--check": "test"}
_HUBS = 0.3  # share of the wrong answers from which on it is said
_NAMES = {"i2t": "image → text", "t2i": "text → image"}


def calibrate(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    pairs: Annotated[str | None, typer.Option(metavar="SPEC", help="Labelled pairs; default: the run's.")] = None,
    split: Annotated[str, typer.Option(metavar="S", help="Split to fit to; not the one trained on.")] = "dev",
    check: Annotated[
        str | None, typer.Option(metavar="S", help="Another split, on which to print what the promises are worth.")
    ] = None,
    risk: Annotated[
        float, typer.Option(help="Largest share of wrong ones among the first answers that abstain gives.")
    ] = 0.1,
    confidence: Annotated[
        float, typer.Option(help="Probability with which a count of them keeps to it, 0.5 to 0.9999.")
    ] = 0.9,
    gallery: Annotated[
        int | None, typer.Option(metavar="N", help="Images to search at a time; default: the whole split.")
    ] = None,
    candidates: Annotated[int, typer.Option(help="Nearest by cosine that the method scores.")] = 200,
    seed: Annotated[
        int, typer.Option(help="Of galleries and parts. Fix it before looking: the best of several promises nothing.")
    ] = 0,
    skip: Annotated[bool, typer.Option("--skip", help="Leave out what cannot be read instead of stopping.")] = False,
    device: Device = "auto",
) -> None:
    """Fit grades, λ and the thresholds of abstain to a dev split, and keep them in the model folder as search.json."""
    from vacsr.config import DataConfig
    from vacsr.scoring import PairScorer
    from vacsr.search.calibrate import DIRECTIONS, CalibrateSettings, check_calibration, check_size
    from vacsr.search.calibrate import calibrate as fit
    from vacsr.search.calibration import calibration_path, save_calibration
    from vacsr.train.data import read_split

    home = _run_folder(run)
    spec = pairs or run_pairs(home)
    _check_splits(home, spec, split=split, check=check)
    settings = CalibrateSettings(
        risk=risk, confidence=confidence, gallery=gallery, candidates=candidates, depth=min(20, candidates), seed=seed
    )
    source = DataConfig(pairs=spec, on_error="skip" if skip else "fail")
    data, others = read_split(source, split), read_split(source, check) if check else None
    _check_images(home, data, others)
    if others is not None:
        check_size(others, gallery or len(data.image_ids))
    scorer = PairScorer.from_pretrained(run, device=device)
    found = fit(scorer, data, settings, spec=spec, selected_on=_selected_on(home, spec))
    checked = {} if others is None else check_calibration(scorer, others, found)
    target = calibration_path(run)
    save_calibration(target, found)
    typer.echo(f"wrote {target}", err=True)
    for note in _notes(found):
        typer.echo(f"note: {note}", err=True)
    promise = f"at most {100 * risk:.4g}% of the answers are wrong, with {100 * confidence:.4g}% confidence"
    lines = [f"**{split}**, promised: {promise}", "", *_head()]
    lines += [_fitted(_NAMES[direction], found.of(direction)) for direction in DIRECTIONS]
    if checked:
        lines += ["", f"**{check}**", "", *_check_head()]
        lines += [_checked(_NAMES[direction], checked[direction]) for direction in DIRECTIONS]
        lines += ["", *(_kept(_NAMES[name], checked[name], found.of(name)) for name in DIRECTIONS)]
    typer.echo("\n".join(lines))


def _run_folder(run: Path) -> Path:
    """The folder that says what a model was trained on: of a run's model folder, the run."""
    around = run.resolve().parent
    inside = run.resolve() == around / "model" and (around / "config.yaml").is_file()
    return around if inside else run


def _check_splits(run: Path, spec: str, *, split: str, check: str | None) -> None:
    """Neither promises nor their worth may come from pairs that were used before: by the names of the splits."""
    if check in (split, "all"):
        message = f"--check {check} holds the split of the fit, on which the promises look better than they are"
        raise UsageError(f"{message} — name another, e.g. --split dev --check test")
    data = run_section(run, "data")
    if spec != data.get("pairs"):
        return
    trained = str(data.get("train", "train"))
    if trained == "all":
        message = "the run was trained on all of these pairs, so it is too sure of them"
        raise UsageError(f"{message} — fit to other data: --pairs SPEC")
    for option, name in (("--split", split), ("--check", check)):
        if name in (trained, "all"):
            message = f"{option} {name}: the run was trained on pairs of split '{trained}', so it is too sure of them"
            raise UsageError(f"{message} — take others: {option} {_OTHER[option]}, or --pairs SPEC with other data")


def _check_images(run: Path, data: PairSet | PhotoSet, others: PairSet | PhotoSet | None) -> None:
    """The same by images, which have one name however data and splits are spelled."""
    from vacsr.search.unseen import check_apart, check_unseen

    if others is not None:
        check_apart(data, others)
    trained = _training_pairs(run)
    if trained is None:
        message = "note: the pairs that the model was trained on are not known or cannot be read"
        typer.echo(f"{message}, so nobody checks that it has not seen these", err=True)
        return
    for pairs in (data, others):
        if pairs is not None:
            check_unseen(pairs, trained)


def _training_pairs(run: Path) -> PairSet | PhotoSet | None:
    """All of the split that was trained on, whether or not a share was held out; None where it cannot be had."""
    from vacsr.data import load_pairs

    data = run_section(run, "data")
    if "pairs" not in data:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of photos that are gone; only names are wanted
            return load_pairs(str(data["pairs"]), split=str(data.get("train", "train")), on_error="skip")
    except VacsrError:
        return None


def _notes(found: Calibration) -> list[str]:
    """What weakens the promise, as far as it shows."""
    notes = []
    if found.selected_on == found.split:
        notes.append(f"training chose the epoch on {found.split} too, so the model is a little better there")
    for direction, part in (("i2t", found.i2t), ("t2i", found.t2i)):
        if part.hub_share >= _HUBS:
            hubs = f"1% of the items take {_percent(part.hub_share)} of the wrong answers that would be given"
            notes.append(f"{_NAMES[direction]}: {hubs}; such hubs make images fail together, so the promise is weaker")
    return notes


def _selected_on(run: Path, spec: str) -> str:
    """The split of these data by which the run chose its epoch; empty where none did, or nobody knows."""
    data, plan = run_section(run, "data"), run_section(run, "train")
    chosen = plan.get("select", "best") == "best" and plan.get("eval_every", 1) and not data.get("dev_share", 0)
    return str(data.get("dev", "dev")) if chosen and spec == data.get("pairs") else ""


def _head() -> list[str]:
    columns = ["", "gallery", "confidence by", "answered", "wrong", "λ"]
    columns += ["R@1, held out", "R@1 with λ, held out", "ECE", "temperature", "isotonic"]
    return ["| " + " | ".join(columns) + " |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]


def _fitted(name: str, part: DirectionCalibration) -> str:
    rule = part.answer
    answered = "none certified" if rule.threshold is None else _percent(rule.answered / rule.certified)
    wrong = "–" if rule.threshold is None else _percent(rule.wrong / rule.answered)
    cells = [name, f"{part.gallery:,}", rule.measure, answered, wrong, f"{part.lcb.weight:.3g}"]
    cells += [_percent(value) for value in (part.lcb.r1, part.lcb.r1_fitted)]
    cells += [_percent(value) for value in (part.ece_own, part.ece_temperature, part.ece_isotonic)]
    return "| " + " | ".join(cells) + " |"


def _check_head() -> list[str]:
    columns = ["", "gallery", "answered", "wrong", "answered without a match", "R@1", "R@1 with λ", "ECE", "calibrated"]
    return ["| " + " | ".join(columns) + " |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]


def _checked(name: str, part: DirectionCheck) -> str:
    wrong = _percent(part.answers.risk) if part.answers.answered else "–"
    cells = [name, f"{part.gallery:,}", _percent(part.answers.coverage), wrong, _percent(part.absent.coverage)]
    cells += [_percent(value) for value in (part.first.by_score, part.first.by_lcb, part.ece_own, part.ece)]
    return "| " + " | ".join(cells) + " |"


def _kept(name: str, part: DirectionCheck, fitted: DirectionCalibration) -> str:
    from vacsr.search.counted import verdict

    return f"{name}, galleries of {part.gallery:,}: {verdict(part.answers, fitted.answer)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
