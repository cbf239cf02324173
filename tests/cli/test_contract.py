"""What users and their scripts rely on: option names, JSON keys and the files of a run folder.

`contract.json` holds the names; after a deliberate change write it again with `python tests/cli/test_contract.py`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

PINNED = Path(__file__).with_name("contract.json")
PAIRS = "synthetic:images=20,held_out=15,per_image=2"
RECIPE: dict[str, Any] = {
    "data": {"pairs": PAIRS},
    "backbone": {"head": {"dim": 4}},
    "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
}
TOWERS: dict[str, Any] = {
    "data": {"pairs": "scenes:images=20,held_out=4,per_image=2,size=32", "dev": ""},
    "backbone": {
        "spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32",
        "image_output": "norm",
        "text_output": "norm",
        "pooling": "cls",
        "head": {"kind": "linear", "dim": 8},
    },
    "method": "infonce",
    "train": {"epochs": 1, "batch_size": 8, "device": "cpu", "eval_every": 0},
    "evaluate": {"splits": []},
}
FEWSHOT: dict[str, Any] = {
    "preset": "none",
    "data": {"spec": "scenes:classes=4,train=4,test=2,size=32", "shots": 2},
    "method": "coop",
    "train": {"epochs": 1, "batch_size": 2, "device": "cpu", "workers": 1},
}


@pytest.fixture(scope="module")
def pinned() -> Any:
    return json.loads(PINNED.read_text(encoding="utf-8"))


def test_option_names(pinned: Any) -> None:
    assert option_names() == pinned["options"]


def test_files_of_a_run_and_keys_of_its_evaluation(pinned: Any, tmp_path: Path) -> None:
    assert train_names(tmp_path) == {key: pinned[key] for key in ("run folder", "report", "evaluation")}


def test_files_of_a_fewshot_run_and_keys_of_its_report(pinned: Any, tmp_path: Path) -> None:
    assert fewshot_names(tmp_path) == {key: pinned[key] for key in ("fewshot folder", "fewshot report")}


@pytest.mark.parametrize("what", ["scoring", "training", "metrics"])
def test_keys_of_a_bench(pinned: Any, what: str, tmp_path: Path) -> None:
    assert bench_keys(what, tmp_path) == pinned["bench"][what]


def option_names() -> dict[str, list[str]]:
    """Options and arguments of every command, read from the parser itself."""
    from vacsr.cli import app

    return dict(sorted(_walk("vacsr", typer.main.get_command(app))))


def _walk(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
    yield name, sorted(option for param in command.params for option in (*param.opts, *param.secondary_opts))
    for word, child in getattr(command, "commands", {}).items():
        yield from _walk(f"{name} {word}", child)


def train_names(folder: Path) -> dict[str, list[str]]:
    """Of a run on cached features, its report and an evaluation with judgments."""
    run, file = folder / "run", folder / "out.json"
    _vacsr("train", _recipe(folder, RECIPE), "--out", run)
    expert, crowd = _judgments(folder)
    _vacsr("evaluate", run, "--pairs", PAIRS, "--judgments", expert, "--judgments", crowd, "--json", file)
    names = sorted(path.name for path in run.iterdir())
    return {"run folder": names, "report": key_paths(run / "report.json"), "evaluation": key_paths(file)}


def _judgments(folder: Path) -> tuple[Path, Path]:
    """Ratings of test images with their own captions and those of two neighbours."""
    from vacsr.data import load_pairs

    images = load_pairs(PAIRS, split="test").image_ids
    expert = ["image\tcaption_image\tcaption_index\trating_1\trating_2\trating_3"]
    crowd = ["image\tcaption_image\tcaption_index\tyes_share"]
    for n, image in enumerate(images):
        for step in (0, 1, 2):
            other = images[(n + step) % len(images)]
            expert.append(f"{image}\t{other}\t0\t{4 - step}\t{1 + (n + step) % 4}\t{4 - n % 2}")
            crowd.append(f"{image}\t{other}\t1\t{(n + step) % 7 / 6}")
    files = folder / "expert.tsv", folder / "crowd.tsv"
    for path, lines in zip(files, (expert, crowd), strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def fewshot_names(folder: Path) -> dict[str, list[str]]:
    """Of a few-shot run on tiny towers and its report."""
    start, run = folder / "start", folder / "run"
    _vacsr("train", _recipe(folder, TOWERS), "--out", start)
    _vacsr("fewshot", _recipe(folder, {**FEWSHOT, "backbone": {"start": str(start)}}), "--out", run)
    return {
        "fewshot folder": sorted(path.name for path in run.iterdir()),
        "fewshot report": key_paths(run / "report.json"),
    }


def bench_keys(what: str, folder: Path) -> list[str]:
    """Of the JSON that `vacsr bench` writes."""
    from vacsr.bench import metrics, scoring, training

    file = folder / f"{what}.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scoring.SIZES, "small", scoring.Sizes(images=3, texts=150, dim=16, edge=32))
        patch.setitem(training.SIZES, "small", training.Sizes(16, (8, 40)))
        patch.setitem(metrics.SIZES, "small", 12)
        _vacsr("bench", what, "--size", "small", "--device", "cpu", "--json", file)
    return key_paths(file)


def key_paths(file: Path) -> list[str]:
    """`results[].i2t.r1` and so on: each path once, whatever the lengths of lists."""

    def walk(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item, f"{path}[]")
        else:
            yield path

    return sorted(set(walk(json.loads(file.read_text(encoding="utf-8")), "")))


def _recipe(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def _vacsr(*argv: object) -> None:
    from vacsr.cli import app

    app([str(word) for word in argv], standalone_mode=False)


def generate() -> dict[str, Any]:
    """All names as the code has them now."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fewshot").mkdir()
        bench = {what: bench_keys(what, folder) for what in ("scoring", "training", "metrics")}
        runs = train_names(folder) | fewshot_names(folder / "fewshot")
    return {"options": option_names(), **runs, "bench": bench}


if __name__ == "__main__":
    PINNED.write_text(json.dumps(generate(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
