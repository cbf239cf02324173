"""Calibrations on disk: ``search.json`` in a model folder, or in the folder of the index that was the gallery.

Beside the latter lie the vectors of the labelled pairs, so :func:`refit` follows an index that grows.
Leakage is checked by the names of splits, and then by images, however data and splits are spelled.
"""

import warnings
from collections.abc import Sequence
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
from vacsr.hub import hub_id
from vacsr.pretrained import encoder_spec
from vacsr.scoring import PairScorer
from vacsr.scoring.topk import Direction
from vacsr.search.calibrate import (
    CalibrateSettings,
    Calibration,
    DirectionCalibration,
    SizeCheck,
    calibrate,
    check_calibration,
)
from vacsr.search.galleries import Labelled
from vacsr.search.index import (
    VectorIndex,
    calibration_path,
    calibration_paths,
    check_fits,
    direction_of,
    embedding_provenance,
    held_kind,
    index_calibration_path,
    model_digest,
)
from vacsr.train.checkpoint import run_pairs, run_section

_ARROWS: dict[Direction, str] = {"i2t": "image → text", "t2i": "text → image"}


class CalibratedRun(NamedTuple):
    """What was fitted and stored, and what a check on another split counted."""

    calibration: Calibration
    path: Path
    checks: dict[Direction, list[SizeCheck]]  # empty without a check
    check_split: str = ""

    def to_markdown(self) -> str:
        one = self.calibration
        labels = "the indexed photos' own captions, which nobody checked" if one.own_captions else f"split {one.split}"
        lines = [f"Calibrated on {labels}. {_percent(one.coverage)} of the answer sets hold a right hit."]
        if any(fitted is not None and fitted.certified for fitted in map(one.of, _ARROWS)):
            sure = f"with {_percent(one.confidence)} confidence"
            lines += [f"Of the confident hits at least {_percent(one.precision)} are right, {sure}."]
        for direction, name in _ARROWS.items():
            fitted = one.of(direction)
            if fitted is not None:
                lines += ["", f"**{name}**: {fitted.queries:,} queries of {fitted.images:,} images. {_limits(fitted)}"]
                lines += ["", _table(fitted.sizes)]
            if direction in self.checks:
                lines += ["", f"Checked on split {self.check_split}:", "", _table(self.checks[direction])]
        return "\n".join(lines)


def _limits(fitted: DirectionCalibration) -> str:
    if not fitted.certified:
        return "No cutoff could be shown to hold: give more pairs, or ask for less precision."
    return f'Hits are confident from the grade "cutoff" on, certified for up to {fitted.certified:,} items.'


def _table(sizes: Sequence[SizeCheck]) -> str:
    head = [
        "items", "cutoff", "with a confident hit", "precision", "silent without a match", "answer set",
        "sets that hold", "R@1",
    ]  # fmt: skip
    rows = [
        [
            f"{one.size:,}", "–" if one.cutoff is None else f"{one.cutoff:.2f}",
            *map(_share, (one.answered, one.precision, one.silent)),
            "–" if one.set_size is None else f"{one.set_size:.1f} hits", _share(one.held), _share(one.r1),
        ]
        for one in sizes
    ]  # fmt: skip
    return markdown_table(head, rows, align="---:")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"


def calibrate_run(
    run: Path,
    settings: CalibrateSettings | None = None,
    *,
    index: VectorIndex | None = None,
    pairs: str | None = None,
    split: str = "dev",
    check: str | None = None,
    out: Path | None = None,
    on_error: OnError = "fail",
    device: str = "auto",
) -> CalibratedRun:
    """Calibrate a model on a split of ``pairs`` (default: the run's own data) and store the result.

    ``index``: search this one instead of the labelled items alone. ``check``: another split, to count on. Data that the
    model was trained on are refused; nobody knows what pretrained encoders have seen. The result goes to ``out``, or to
    search.json in the folder of the index or of the model.
    """
    encoders = encoder_spec(run)
    trained, home = encoders is None, _enclosing_run(run)
    if pairs is None and encoders is not None and not encoders.startswith("features:"):
        raise UsageError(f"{run} has no data of its own — name labelled pairs: --pairs SPEC")
    path = out or index_calibration_path(index) or (calibration_path(run) if trained and hub_id(run) is None else None)
    if path is None:
        message = f"{run} has no folder for a calibration"
        raise UsageError(f"{message} — fit it to an index (--index exact:FOLDER), or name a file: --out search.json")
    spec = pairs or run_pairs(home)
    source = DataConfig(pairs=spec, on_error=on_error)
    if trained:
        _check_splits(home, spec, split=split, check=check)
    data, others = read_split(source, split), read_split(source, check) if check else None
    _check_images(home if trained else None, data, others)
    scorer = PairScorer.from_pretrained(run, device=device)
    if index is not None:
        provenance = embedding_provenance(scorer.model, held_kind(index.provenance))
        check_fits("the index", index, dim=scorer.model.dim, provenance=provenance)
    selected_on = _selection_split(home, spec) if trained else ""
    labelled = Labelled.of(scorer, data)
    calibration = calibrate(scorer, labelled, settings, index=index, spec=spec, selected_on=selected_on)
    checks = {} if others is None else check_calibration(scorer, others, calibration)
    write_json(path, calibration.model_dump(mode="json"))
    if path == index_calibration_path(index):
        labelled.write(path.with_suffix(".safetensors"))
    if selected_on == split:
        warnings.warn(f"training chose the epoch on {split} too, so the model is slightly better there", stacklevel=2)
    return CalibratedRun(calibration, path, checks, check or "")


def follow_growth(run: Path, scorer: PairScorer, index: VectorIndex) -> str:
    """Fit the calibration of a local index again, to the same pairs, once the index has outgrown what was checked.

    What was done, or what is to be typed for an index that searches with the run's calibration; "" where all holds.
    """
    try:
        return _follow(run, scorer, index)
    except VacsrError as error:  # the items are stored all the same
        return f"warning: the calibration cannot follow the index: {error}"


def _follow(run: Path, scorer: PairScorer, index: VectorIndex) -> str:
    before, path = load_calibration(run, index, model=model_digest(scorer.model)), index_calibration_path(index)
    fitted = None if before is None else before.of(direction := direction_of(index.provenance))
    if before is None or fitted is None or fitted.covers(len(index)):
        return ""
    message = f"grades were checked with up to {fitted.sizes[-1].size:,} items, and the index holds {len(index):,}"
    if path is None or not (path.is_file() and path.with_suffix(".safetensors").is_file()):
        if not before.data:  # of the demo, which knows the truth of every pair: labels would spoil it
            return f"warning: {message}, so they may be too high"
        again = f"vacsr calibrate {run} --pairs {before.pairs} --split {before.split}"
        return f"warning: {message} — check them there: {again} --index {index.kind}:{index.where}"
    labelled = Labelled.read(path.with_suffix(".safetensors"), device=scorer.device)
    asked = {name: getattr(before, name) for name in ("precision", "confidence", "coverage", "seed")}
    settings = CalibrateSettings(**asked, candidates=fitted.candidates)
    after = calibrate(scorer, labelled, settings, index=index, spec=before.pairs, selected_on=before.selected_on)
    write_json(path, after.model_dump(mode="json"))
    return f"{message}, so they were fitted again to the same pairs. {_limits(after.of(direction) or fitted)}"


def load_calibration(run: Path, index: VectorIndex | None = None, *, model: str) -> Calibration | None:
    """That of the index if it has one, else that of the run; None if neither has. One of other weights is an error.

    ``model``: the digest of the model that is to search, see :func:`vacsr.search.model_digest`.
    """
    path = next((path for path in calibration_paths(run, index) if path.is_file()), None)
    return None if path is None else read_calibration(path, model=model)


def read_calibration(path: Path, *, model: str) -> Calibration:
    """A file that ``vacsr calibrate`` wrote for the model with this digest."""
    action = "fit it again: vacsr calibrate RUN --pairs SPEC --index INDEX"
    try:
        calibration = parse(Calibration, read_json(path))
    except (DataError, ConfigError) as error:
        raise DataError(f"{path} cannot be read ({error}) — {action}") from error
    if calibration.model != model:
        raise DataError(f"{path} was fitted to other weights than those of the model — {action}")
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


def _check_images(run: Path | None, fit: LabelledPairs, check: LabelledPairs | None) -> None:
    """Refuse images that this run was trained on, and a check on images that the fit has seen."""
    both = set() if check is None else set(fit.image_ids).intersection(check.image_ids)
    if check is not None and both:
        message = f"splits '{fit.split}' and '{check.split}' share {len(both):,} images (first {min(both)})"
        raise DataError(f"{message} — name two that share none, e.g. --split dev --check test")
    if run is None:  # nobody knows what pretrained encoders have seen
        return
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
