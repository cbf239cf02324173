"""What a newcomer copies must work: the recipes, and the commands and snippets of README.md and docs/."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from vacsr.cli import app, main
from vacsr.config import Recipe
from vacsr.data import load_pairs
from vacsr.recipes import read_yaml, recipe_from

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


class Line(NamedTuple):
    """A command that a page tells its reader to type."""

    page: str
    words: tuple[str, ...]


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(text)]


def fenced_commands(text: str) -> Iterator[str]:
    """Lines of fenced blocks that start with vacsr, perhaps after a prompt; continued lines joined."""
    for block in blocks(text):
        for line in block.text.replace("\\\n", " ").splitlines():
            command = line.strip().removeprefix("$ ")
            if command.startswith("vacsr ") and block.language != "python":
                yield command


def inline_commands(text: str) -> Iterator[str]:
    """Code spans such as `vacsr train FILE`, outside of fenced blocks."""
    yield from re.findall(r"`(vacsr [^`\n]+)`", FENCE.sub("", text))


def collect(source: Any) -> list[Line]:
    found = [(page.name, line) for page in PAGES for line in source(page.read_text(encoding="utf-8"))]
    return [Line(page, tuple(shlex.split(line, comments=True)[1:])) for page, line in found]


FENCED, INLINE = collect(fenced_commands), collect(inline_commands)
PARSER: Any = typer.main.get_command(app)


def named(line: Line) -> str:
    return f"{line.page}: {' '.join(line.words)}"


def flatten(fields: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested fields by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= flatten(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_is_valid(path: Path) -> None:
    assert isinstance(recipe_from(read_yaml(path)), Recipe)


def test_features_recipe_names_every_field_at_its_default() -> None:
    written = flatten(yaml.safe_load((ROOT / "recipes/features.yaml").read_text(encoding="utf-8")))
    default = flatten(recipe_from({}).model_dump(mode="json"))
    assert written.pop("data.pairs") != default.pop("data.pairs")
    assert written == default


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_line_of_a_recipe_has_a_comment(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    sections = {"data:", "backbone:", "method:", "train:", "evaluate:"} if path.name != "features.yaml" else set()
    bare = [line for line in lines if line not in sections and not re.search(r"(^|\s)#\s+\S", line)]
    assert bare == []


@pytest.mark.parametrize("method", ["vacsr-paper", "infonce", "sigmoid"])
def test_another_method_replaces_the_section_of_the_features_recipe(method: str) -> None:
    recipe = recipe_from(read_yaml(ROOT / "recipes/features.yaml"), [f"method.name={method}"])
    assert recipe.method == recipe_from({"method": {"name": method}}).method


def test_synthetic_recipe_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--set", "train.epochs=1", "--set", "data.pairs=synthetic:images=40"]
    recipe = str(ROOT / "recipes/synthetic.yaml")
    monkeypatch.setattr(sys, "argv", ["vacsr", "train", recipe, *short, "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert "| flickr | test |" in capsys.readouterr().out
    assert (tmp_path / "run/report.json").is_file()


@pytest.mark.shared
def test_flickr_recipe_names_files_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_from(read_yaml(ROOT / "recipes/flickr8k-features.yaml"))
    monkeypatch.chdir(ROOT)
    if not (ROOT / "../shared/data/flickr8k").is_dir():
        pytest.skip("no ../shared/data/flickr8k")
    assert len(load_pairs(recipe.data.pairs, split="train").image_ids) == 6000
    assert all(Path(path).is_file() for path in recipe.evaluate.judgments)


def test_pages_hold_commands() -> None:
    assert {"cli.md", "own-embeddings.md"} <= {line.page for line in FENCED}
    shown = {line.words[0] for line in FENCED if line.page == "cli.md"}
    assert shown == set(PARSER.commands), "docs/cli.md shows every command"


@pytest.mark.parametrize("line", FENCED, ids=named)
def test_fenced_command_parses(line: Line) -> None:
    """The command exists and takes these options and arguments; nothing is run."""
    name, *arguments = line.words
    if name.startswith("-"):
        assert name in {option for parameter in PARSER.params for option in parameter.opts} | {"--help"}
        return
    assert name in PARSER.commands
    if "--help" not in arguments:
        PARSER.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("line", INLINE, ids=named)
def test_inline_command_exists(line: Line) -> None:
    """A mention may be abridged, so only its command and its options are looked up."""
    name, *arguments = line.words
    if name == "COMMAND" or name.startswith("-"):
        return
    assert name in PARSER.commands
    known = {option for parameter in PARSER.commands[name].params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("line", FENCED + INLINE, ids=named)
def test_files_of_the_repository_that_a_command_names_exist(line: Line) -> None:
    ours = [word for word in line.words if word.startswith(("recipes/", "tables/"))]
    assert [word for word in ours if not (ROOT / word).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/own-embeddings.md", "docs/cli.md"])
def test_snippets_run_in_order(page: str, tmp_path: Path) -> None:
    """Every python and bash block of the page, one after the other in an empty folder."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    bash = shutil.which("bash")
    if bash is None or shutil.which("vacsr", path=here) is None:
        pytest.skip("needs bash and the installed command")
    runners = {"python": [sys.executable, "-c"], "bash": [bash, "-euc"]}
    chosen = [block for block in blocks((ROOT / page).read_text(encoding="utf-8")) if block.language in runners]
    assert chosen
    for block in chosen:
        command = [*runners[block.language], block.text]
        env = {**os.environ, "PATH": here, "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
