"""`vacsr calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vacsr.cli.options import Device
from vacsr.cli.runs import run_pairs

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
    risk: Annotated[float, typer.Option(help="Share of wrong first answers that abstain may give.")] = 0.1,
    confidence: Annotated[float, typer.Option(help="Probability with which that holds.")] = 0.9,
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
    settings = CalibrateSettings(
        risk=risk, confidence=confidence, gallery=gallery, candidates=candidates, depth=min(20, candidates), seed=seed
    )
    scorer = PairScorer.from_pretrained(run, device=device)
    found = fit(scorer, load_pairs(spec, split=split), settings, spec=spec)
    checked = check_calibration(scorer, load_pairs(spec, split=check), found) if check else {}
    target = calibration_path(run)
    save_calibration(target, found)
    lines = [f"**{split}**, {risk:.0%} risk with {confidence:.0%} confidence", "", *_head()]
    lines += [_fitted(_NAMES[direction], found.of(direction)) for direction in DIRECTIONS]
    if checked:
        lines += ["", f"**{check}**", "", *_check_head()]
        lines += [_checked(_NAMES[direction], checked[direction]) for direction in DIRECTIONS]
    typer.echo("\n".join(lines))
    typer.echo(f"wrote {target}", err=True)


def _head() -> list[str]:
    columns = ["", "gallery", "confidence by", "answered", "wrong", "bound", "λ", "R@1", "R@1 with λ", "ECE"]
    columns += ["temperature", "isotonic"]
    return ["| " + " | ".join(columns) + " |", "| --- " + "| ---: " * (len(columns) - 1) + "|"]


def _fitted(name: str, part: DirectionCalibration) -> str:
    rule = part.answer
    answered = "none certified" if rule.threshold is None else _percent(rule.answered / rule.certified)
    wrong = "–" if rule.threshold is None else _percent(rule.wrong / rule.answered)
    bound = "–" if rule.threshold is None else _percent(rule.bound)
    cells = [name, f"{part.gallery:,}", rule.measure, answered, wrong, bound, f"{part.lcb.weight:.3g}"]
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


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
