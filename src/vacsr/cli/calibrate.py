"""`vacsr calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import run_pairs, run_section
from vacsr.errors import UsageError

if TYPE_CHECKING:
    from vacsr.search.calibrate import DirectionCheck
    from vacsr.search.calibration import DirectionCalibration

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
    confidence: Annotated[float, typer.Option(help="Probability with which a count of them keeps to it.")] = 0.9,
    gallery: Annotated[
        int | None, typer.Option(metavar="N", help="Images to search at a time; default: the whole split.")
    ] = None,
    candidates: Annotated[int, typer.Option(help="Nearest by cosine that the method scores.")] = 200,
    seed: Annotated[int, typer.Option(help="Of galleries and halves.")] = 0,
    device: Device = "auto",
) -> None:
    """Fit grades, λ and the thresholds of abstain to a dev split, and keep them in the model folder as search.json."""
    from vacsr.data import load_pairs
    from vacsr.scoring import PairScorer
    from vacsr.search.calibrate import DIRECTIONS, CalibrateSettings, check_calibration
    from vacsr.search.calibrate import calibrate as fit
    from vacsr.search.calibration import calibration_path, save_calibration

    spec = pairs or run_pairs(run)
    _check_splits(run, spec, split=split, check=check)
    settings = CalibrateSettings(
        risk=risk, confidence=confidence, gallery=gallery, candidates=candidates, depth=min(20, candidates), seed=seed
    )
    data, others = load_pairs(spec, split=split), load_pairs(spec, split=check) if check else None
    scorer = PairScorer.from_pretrained(run, device=device)
    found = fit(scorer, data, settings, spec=spec, selected_on=_selected_on(run, spec))
    target = calibration_path(run)
    save_calibration(target, found)
    typer.echo(f"wrote {target}", err=True)
    if found.selected_on == split:
        typer.echo(f"note: training chose the epoch on {split} too, so the model is a little better there", err=True)
    checked = {} if others is None else check_calibration(scorer, others, found)
    lines = [
        f"**{split}**, promised: at most {100 * risk:.3g}% of the answers are wrong, with {100 * confidence:.3g}% confidence",
        "",
        *_head(),
    ]
    lines += [_fitted(_NAMES[direction], found.of(direction)) for direction in DIRECTIONS]
    if checked:
        lines += ["", f"**{check}**", "", *_check_head()]
        lines += [_checked(_NAMES[direction], checked[direction]) for direction in DIRECTIONS]
        lines += ["", *(_kept(_NAMES[name], checked[name], found.of(name)) for name in DIRECTIONS)]
    typer.echo("\n".join(lines))


def _check_splits(run: Path, spec: str, *, split: str, check: str | None) -> None:
    """Neither promises nor their worth may come from pairs that were used before."""
    if check == split:
        message = f"--check {check} is the split of the fit, on which the promises look better than they are"
        raise UsageError(f"{message} — name another, e.g. --split dev --check test")
    data = run_section(run, "data")
    if spec == data.get("pairs") and split in (data.get("train", "train"), "all"):
        message = f"the run was trained on pairs of split '{split}', so it is too sure of them"
        raise UsageError(f"{message} — fit to others: --split dev, or --pairs SPEC with other data")


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
