"""What users and their scripts rely on: option names, JSON keys and the files of a run folder.

`contract.json` holds the names; after a deliberate change write it again: `CONTRACT=write pytest -n 0` on this file.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from vacsr.bench import scoring
from vacsr.cli import app
from vacsr.data import load_pairs

SPEC = "synthetic:images=20,held_out=15,per_image=2"
PINNED = Path(__file__).with_name("contract.json")
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
Command = Callable[..., Any]


@pytest.fixture
def command(vacsr: Command) -> Command:
    def run(*argv: object) -> None:
        answer = vacsr(*argv)
        assert answer.code == 0, answer.err

    return run


def check(**names: Any) -> None:
    """These names are the pinned ones; or pin them, when asked to."""
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))
    if os.environ.get("CONTRACT") == "write":
        PINNED.write_text(json.dumps(pinned | names, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        assert names == {key: pinned[key] for key in names}


def test_option_names() -> None:
    """Options and arguments of every command, read from the parser itself."""
    options = {
        name: sorted(option for param in command.params for option in (*param.opts, *param.secondary_opts))
        for name, command in _walk("vacsr", typer.main.get_command(app))
    }
    check(options=dict(sorted(options.items())))


def test_flags_are_shown_without_a_type() -> None:
    for command in ([], ["index"], ["index", "add"], ["train"]):
        assert "bool" not in CliRunner().invoke(app, [*command, "--help"]).stdout


def test_every_help_ends_with_an_example_that_parses() -> None:
    for name, command in _walk("vacsr", typer.main.get_command(app)):
        if not getattr(command, "commands", {}):
            words = shlex.split(command.epilog.removeprefix("Example: "))
            assert words[: len(name.split())] == name.split()
            command.make_context(name, words[len(name.split()) :])


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, child in getattr(command, "commands", {}).items():
        yield from _walk(f"{name} {word}", child)


def test_a_run_and_its_evaluation(
    command: Command, trained: Callable[[str], Path], judgments: tuple[Path, Path], tmp_path: Path
) -> None:
    run, file = trained("features"), tmp_path / "out.json"
    images, captions = (load_pairs(SPEC, split="test").image_ids, load_pairs(SPEC, split="test").captions)
    assert captions is not None
    preferred, rival = tmp_path / "preferred.tsv", tmp_path / "rival.tsv"
    lines = [f"add\t{name}\t{captions[2 * n]}\t{captions[-1 - 2 * n]}" for n, name in enumerate(images)]
    preferred.write_text("\n".join(["kind\timage\tcaption\tnegative_caption", *lines]), encoding="utf-8")
    lines = [line.rpartition("\t")[0] for line in judgments[1].read_text(encoding="utf-8").splitlines()]
    scored = ["score", *map(str, range(len(lines) - 1))]
    both = (f"{line}\t{score}" for line, score in zip(lines, scored, strict=True))
    rival.write_text("\n".join(both), encoding="utf-8")
    files = ["--grades", judgments[0], "--judgments", f"crowd={judgments[1]}", "--preferences", f"p={preferred}"]
    command("evaluate", run, *files, "--rival", f"other={rival}", "--json", file)
    kept, again = (json.loads(path.read_text(encoding="utf-8"))["results"] for path in (run / "report.json", file))
    dev, test = (results[0]["signals"]["confidence"] for results in (kept, again))
    for name in ("temperature_i2t", "temperature_t2i", "fitted_on"):
        assert test[name] == dev[name], "evaluate takes what the run fitted to its dev split"
    assert dev["fitted_on"] == "dev"
    names = {"run folder": sorted(path.name for path in run.iterdir())}
    check(**names, report=key_paths(run / "report.json"), evaluation=key_paths(file))


def test_a_fewshot_run(command: Command, tmp_path: Path) -> None:
    start, run = tmp_path / "start", tmp_path / "run"
    for fields, out in ((TOWERS, start), ({**FEWSHOT, "backbone": {"start": str(start)}}, run)):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(fields), encoding="utf-8")
        command("train" if out is start else "fewshot", recipe, "--out", out)
    folder = sorted(path.name for path in run.iterdir())
    check(**{"fewshot folder": folder, "fewshot report": key_paths(run / "report.json")})


def test_benches(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scoring.SIZES, "small", {"images": 3, "texts": 150, "dim": 16})
    file = tmp_path / "bench.json"
    command("bench", "scoring", "--size", "small", "--device", "cpu", "--json", file)
    check(bench={"scoring": key_paths(file)})


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
