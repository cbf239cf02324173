"""The calibration of a run: ``search.json`` in its model folder, fitted to data that the model was not trained on.

Leakage is checked by the names of splits, and then by images, however data and splits are spelled.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

from vacsr.config import DataConfig
from vacsr.config.io import parse
from vacsr.data import PairSet, PhotoSet, load_pairs, read_split
from vacsr.data.formats import OnError
from vacsr.data.pairs import LabelledPairs
from vacsr.errors import ConfigError, DataError, UsageError, VacsrError
from vacsr.evaluate.report import markdown_table
from vacsr.files import read_json, write_json
from vacsr.pretrained import encoder_spec, model_folder
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search.calibrate import (
    CalibrateSettings,
    Calibration,
    DirectionCalibration,
    DirectionCheck,
    calibrate,
    check_calibration,
)
from vacsr.search.certify import verdict
from vacsr.train.checkpoint import run_pairs, run_section

_ARROWS: dict[Direction, str] = {"i2t": "image → text", "t2i": "text → image"}


class CalibratedRun(NamedTuple):
    """What was fitted and stored, and what a check on another split counted."""

    calibration: Calibration
    path: Path
    checks: dict[Direction, DirectionCheck]  # empty without a check
    check_split: str = ""

    def to_markdown(self) -> str:
        rule = self.calibration.t2i.answer
        bound = f"at most {100 * rule.risk:.4g}% of the answers are wrong, with {100 * rule.confidence:.4g}% confidence"
        head = ["", "gallery", "confidence by", "answered", "wrong", "R@1, held out", "ECE", "temperature", "isotonic"]
        rows = [_fitted_row(name, self.calibration.of(direction)) for direction, name in _ARROWS.items()]
        lines = [f"**{self.calibration.split}**, guaranteed: {bound}", "", markdown_table(head, rows, align="---:")]
        if self.checks:
            head = ["", "gallery", "answered", "wrong", "answered without a match", "R@1", "ECE", "calibrated"]
            rows = [_check_row(name, self.checks[direction]) for direction, name in _ARROWS.items()]
            lines += ["", f"**{self.check_split}**", "", markdown_table(head, rows, align="---:"), ""]
        for direction, check in self.checks.items():
            rule, name = self.calibration.of(direction).answer, _ARROWS[direction]
            result = verdict(check.answers, risk=rule.risk, confidence=rule.confidence, images=rule.images)
            lines.append(f"{name}, galleries of {check.gallery:,}: {result}")
        return "\n".join(lines)


def _fitted_row(name: str, part: DirectionCalibration) -> list[str]:
    rule = part.answer
    answered = "none certified" if rule.threshold is None else f"{rule.answered / rule.certified:.1%}"
    wrong = "–" if rule.threshold is None else f"{rule.wrong / rule.answered:.1%}"
    shares = [_share(value) for value in (part.r1, part.ece_own, part.ece_temperature, part.ece_isotonic)]
    return [name, f"{part.gallery:,}", rule.measure, answered, wrong, *shares]


def _check_row(name: str, part: DirectionCheck) -> list[str]:
    wrong = f"{part.answers.risk:.1%}" if part.answers.answered else "–"
    shares = [_share(value) for value in (part.absent.coverage, part.r1, part.ece_own, part.ece)]
    return [name, f"{part.gallery:,}", f"{part.answers.coverage:.1%}", wrong, *shares]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def calibrate_run(
    run: Path,
    settings: CalibrateSettings | None = None,
    *,
    pairs: str | None = None,
    split: str = "dev",
    check: str | None = None,
    on_error: OnError = "fail",
    device: str = "auto",
) -> CalibratedRun:
    """Calibrate a run or model folder on a split of ``pairs`` (default: its own data) and store search.json in it.

    ``check``: another split, to count on. Data that the model was trained on are refused.
    """
    if encoder_spec(run) is not None:
        save = f"python -c \"import vacsr; vacsr.load_model('{run}').save_pretrained('DIR')\""
        raise UsageError(f"{run} is not a folder that can store a calibration — save the model first: {save}")
    home = _enclosing_run(run)
    spec = pairs or run_pairs(home)
    _check_splits(home, spec, split=split, check=check)
    source = DataConfig(pairs=spec, on_error=on_error)
    data, others = read_split(source, split), read_split(source, check) if check else None
    _check_images(home, data, others)
    scorer = PairScorer.from_pretrained(run, device=device)
    calibration = calibrate(scorer, data, settings, spec=spec, selected_on=_selection_split(home, spec))
    checks = {} if others is None else check_calibration(scorer, others, calibration)
    path = calibration_path(run)
    write_json(path, calibration.model_dump(mode="json"))
    if calibration.selected_on == split:
        warnings.warn(f"training chose the epoch on {split} too, so the model is slightly better there", stacklevel=2)
    return CalibratedRun(calibration, path, checks, check or "")


def calibration_path(run: Path) -> Path:
    return model_folder(run) / "search.json"


def load_calibration(run: Path, *, model: str) -> Calibration | None:
    """Read it; None if there is none. One that was fitted to other weights is an error.

    ``model``: the digest of the model that is to search, see :func:`vacsr.search.model_digest`.
    """
    path = None if encoder_spec(run) is not None else calibration_path(run)
    if path is None or not path.is_file():
        return None
    action = f"fit it again: vacsr calibrate {run} --pairs SPEC"
    try:
        calibration = parse(Calibration, read_json(path))
    except (DataError, ConfigError) as error:
        raise DataError(f"{path} cannot be read ({error}) — {action}") from error
    if calibration.model != model:
        raise DataError(f"{path} was fitted to other weights than those beside it — {action}")
    return calibration


def _enclosing_run(folder: Path) -> Path:
    """The run folder around a run's ``model`` folder: it says what the model was trained on."""
    parent = folder.resolve().parent
    return parent if folder.resolve() == parent / "model" and (parent / "config.yaml").is_file() else folder


def _selection_split(run: Path, spec: str) -> str:
    """The split of these data by which the run chose its best epoch; "" if there is none, or it is unknown."""
    data, train = run_section(run, "data"), run_section(run, "train")
    chosen = train.get("select", "best") == "best" and train.get("eval_every", 1) and not data.get("dev_share", 0)
    return str(data.get("dev", "dev")) if chosen and spec == data.get("pairs") else ""


def _check_splits(run: Path, spec: str, *, split: str, check: str | None) -> None:
    """Refuse splits by name: the check must differ from the fit, and neither may be the run's training split."""
    data = run_section(run, "data")
    trained = str(data.get("train", "train")) if spec == data.get("pairs") else None
    used = set() if trained is None else {trained, "all"}
    for option, name, others in (("--split", split, used), ("--check", check, {*used, split, "all"})):
        if name in others or (name is not None and trained == "all"):
            reason = "the model was trained on such pairs" if name in used or trained == "all" else "the fit uses them"
            message = f"{option} {name}: {reason}, so the guarantees would look better than they are"
            raise UsageError(f"{message} — choose others: --split dev --check test, or --pairs SPEC with other data")


def _check_images(run: Path, fit: LabelledPairs, check: LabelledPairs | None) -> None:
    """Refuse images that were trained on, and a check on images that the fit has seen."""
    both = set() if check is None else set(fit.image_ids).intersection(check.image_ids)
    if check is not None and both:
        message = f"splits '{fit.split}' and '{check.split}' share {len(both):,} images (first {min(both)})"
        raise DataError(f"{message} — name two that share none, e.g. --split dev --check test")
    trained = training_pairs(run)
    if trained is None:
        message = "the training data of the model are unknown or cannot be read"
        warnings.warn(f"{message}, so it may have been trained on these pairs", stacklevel=3)
        return
    for pairs in (fit,) if check is None else (fit, check):
        seen = seen_images(pairs, trained)
        if seen:
            message = f"{len(seen):,} of {len(pairs.image_ids):,} images of split '{pairs.split}' were trained on"
            action = "give images that the model has not seen: another split, or --pairs SPEC with other data"
            raise DataError(f"{message} (first {seen[0]}), so the model is too sure of them — {action}")


def training_pairs(run: Path) -> PairSet | PhotoSet | None:
    """The whole training split, with any share that was held out; None if it is unknown or cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing photos; only names are compared
            split = str(run_section(run, "data").get("train", "train"))
            return load_pairs(run_pairs(run), split=split, on_error="skip")
    except VacsrError:
        return None


def seen_images(pairs: LabelledPairs, trained: LabelledPairs) -> list[str]:
    """The images that are among the trained ones: they have the same id, and share a caption.

    Other data may have other images of the same name, which is what the caption tells. Where a side knows no captions
    the name decides.
    """
    known, asked = _captions(trained), _captions(pairs)
    alike = pairs.captions is None or trained.captions is None
    return [name for name in pairs.image_ids if name in known and (alike or asked[name] & known[name])]


def _captions(pairs: LabelledPairs) -> dict[str, set[str]]:
    """What is said of each image; empty sets where the words are not known."""
    words: dict[str, set[str]] = {name: set() for name in pairs.image_ids}
    for text, row in zip(pairs.captions or (), pairs.caption_image.tolist(), strict=False):
        words[pairs.image_ids[row]].add(text.strip())
    return words
