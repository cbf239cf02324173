"""What a protocol trains, validates and tests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vacsr.data.fewshot import (
    FewshotSource,
    LabelledPhotos,
    Shots,
    base_and_new,
    draw_shots,
    load_classes,
    load_shots,
    take_shots,
)
from vacsr.data.fewshot.templates import check_template
from vacsr.data.karpathy import read_json
from vacsr.errors import DataError, UsageError
from vacsr.fewshot.config import FewshotDataConfig
from vacsr.fewshot.methods import ClassSet


class ReportSet(NamedTuple):
    """One test set, over its own classes."""

    split: str
    """Its name in the report."""
    photos: LabelledPhotos
    classes: ClassSet


class FewshotTask(NamedTuple):
    """All the data of a run."""

    source: FewshotSource
    shots: Shots
    train: LabelledPhotos
    """The shots to learn from."""
    val: LabelledPhotos
    """The shots to choose settings on, of the same classes; perhaps none."""
    classes: ClassSet
    """Those of training."""
    tests: tuple[ReportSet, ...]


def load_task(config: FewshotDataConfig) -> FewshotTask:
    """Load the data, draw the shots over all classes, and split by the protocol.

    ``base-to-novel`` trains on the base half and tests ``base`` and ``new``, each over its own half; ``domain`` trains
    on all classes and tests the ``source`` and every target over the target's own classes, all its photos where it has
    no splits; ``all`` tests the source.
    """
    check_targets(config)
    source = load_classes(config.spec)
    if config.shots_file:
        shots = load_shots(config.shots_file, source)
    else:
        shots = draw_shots(source, shots=config.shots, seed=config.seed)
    taken = take_shots(source, shots)
    train, val, tests = taken.train, taken.val, [("test", source.test)]
    if config.protocol == "base-to-novel":
        halves = base_and_new(len(source.test.classes))
        train, val = train.only(halves.base), val.only(halves.base)
        tests = [("base", source.test.only(halves.base)), ("new", source.test.only(halves.new))]
    elif config.protocol == "domain":
        tests = [("source", source.test)]
    if not len(train):
        raise DataError(f"{train.name}: no shots of the classes to train on — draw them again")
    report = [ReportSet(split, photos, class_set(photos, source, config)) for split, photos in tests]
    report += [_target(name, spec, config) for name, spec in config.targets.items()]
    for one in report:
        _check_tested(one.photos)
    classes = class_set(train, source, config)
    if config.sentences:
        classes = classes._replace(sentences=read_sentences(Path(config.sentences).expanduser(), classes.names))
    return FewshotTask(source, shots, train, val, classes, tuple(report))


def check_targets(config: FewshotDataConfig) -> None:
    """Refuse targets that the protocol does not test, missing targets, and a name that the report uses itself."""
    if (config.protocol == "domain") != bool(config.targets):
        wrong = "needs data.targets" if config.protocol == "domain" else "has no use for data.targets"
        raise UsageError(
            f"protocol {config.protocol!r} {wrong} — write e.g. targets: {{sketch: SPEC}} with domain only"
        )
    if "source" in config.targets:
        raise UsageError("a target is called 'source', as the report calls data.spec itself — give it another name")


def class_set(photos: LabelledPhotos, source: FewshotSource, config: FewshotDataConfig) -> ClassSet:
    """The classes of some photos with their template."""
    return ClassSet(photos.classes, check_template(config.template or source.template))


def _target(name: str, spec: str, config: FewshotDataConfig) -> ReportSet:
    target = load_classes(spec, whole=True)
    return ReportSet(name, target.test, class_set(target.test, target, config)._replace(shifted=True))


def _check_tested(photos: LabelledPhotos) -> None:
    if not len(photos):
        raise DataError(f"{photos.name} has no photos to test — check the data set")
    photos.check_files()


def read_sentences(path: Path, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Descriptions of these classes, in their order, from a JSON file {class name: [sentences]}.

    Names match regardless of case, and of underscores or spaces.
    """
    raw = read_json(path, keys=())
    if not isinstance(raw, Mapping):
        raise DataError(f"{path} is not a mapping — write {{class name: [sentences]}}")
    by_name = {_normalised(str(name)): sentences for name, sentences in raw.items()}
    missing = [name for name in names if not _are_sentences(by_name.get(_normalised(name)))]
    if missing:
        message = f"{path}: {len(missing):,} of {len(names):,} classes have no list of sentences, first {missing[0]!r}"
        raise DataError(f"{message} — add them as {{class name: [sentences]}}")
    return tuple(tuple(by_name[_normalised(name)]) for name in names)


def _normalised(name: str) -> str:
    return name.replace("_", " ").casefold().strip()


def _are_sentences(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one.strip() for one in value)
