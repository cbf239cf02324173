"""README.md and docs/ hold together: links lead somewhere, commands exist, every method has its page."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from vacsr.cli import app
from vacsr.compare import read_table
from vacsr.config import Recipe
from vacsr.config.base import METHODS as REGISTRY
from vacsr.config.base import method_entry
from vacsr.config.io import read_recipe
from vacsr.fewshot import read_fewshot
from vacsr.fewshot.config import FewshotRecipe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
method_entry("vacsr")
SHELL = ("bash", "sh", "console")
METHODS = sorted(REGISTRY["retrieval"])
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"^cat > (\S+) <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


# ----------------------------------------------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them: small letters, no marks, dashes for spaces, twins numbered."""
    names: list[str] = []
    for title in re.findall(r"^#+ +(.*?) *$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        names.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return {f"{name}-{names[:n].count(name)}" if name in names[:n] else name for n, name in enumerate(names)}


def broken(page: Path, text: str) -> list[str]:
    """Relative links in a text of this page that lead nowhere."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]
    wrong = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors(target))):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, prose(page)) == []


def test_the_index_leads_to_every_page() -> None:
    """From docs/README.md, over links between pages."""
    seen: set[Path] = set()
    todo = [DOCS / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or not page.is_file():
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", prose(page))
        todo += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert [name_of(page) for page in DOCS.rglob("*.md") if page not in seen] == []


# -------------------------------------------------------------------------------------------------------- commands


class Command(NamedTuple):
    """A command that a page tells its reader to type."""

    page: Path
    words: tuple[str, ...]
    whole: bool
    """Stands in a block of its own, so that it can be typed as it is; a mention in a sentence may be abridged."""

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {' '.join(self.words)}"


def typed(line: str) -> tuple[str, ...] | None:
    """The words after `vacsr` of a shell line, whatever starts it: a prompt, variables, timeout, torchrun."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:
        return None
    before = re.match(r"(\w+=\S+ |timeout (-\S+ \S+ )*\d+ |torchrun .* )*vacsr ", line.removeprefix("$ "))
    if before is None:
        return None
    after = words[words.index("vacsr") + 1 :]
    end = next((n for n, word in enumerate(after) if word in ("&", "&&", "|", "||", ";", ">")), len(after))
    return tuple(after[:end])


def commands(page: Path) -> Iterator[Command]:
    for language, text in fences(page):
        if language not in ("", *SHELL):
            continue
        for line in HEREDOC.sub("", text).replace("\\\n", " ").splitlines():
            words = typed(line.strip())
            if words is not None:
                yield Command(page, words, True)
    for mention in re.findall(r"`(vacsr [^`\n]+)`", prose(page)):
        yield Command(page, tuple(shlex.split(mention)[1:]), False)


ALL = [command for page in PAGES for command in commands(page)]


def test_the_reference_shows_every_command() -> None:
    assert {command.words[0] for command in ALL if command.page == DOCS / "cli.md"} >= set(COMMANDS)


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_command_parses(command: Command) -> None:
    """It exists and knows these options; one that can be typed as it stands is parsed whole. Nothing is run."""
    name, *arguments = command.words
    if name == "COMMAND" or name.startswith("-"):
        assert command.words in (("COMMAND", "--help"), ("--version",), ("--help",))
        return
    assert name in COMMANDS
    asked: Any = COMMANDS[name]
    if hasattr(asked, "commands") and arguments and not arguments[0].startswith("-"):  # a group: `vacsr index add`
        name, *arguments = arguments
        assert name in asked.commands
        asked = asked.commands[name]
    known = {option for parameter in asked.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)}
    assert given <= known | {"--help"}
    if command.whole and "--help" not in arguments:
        asked.make_context(name, list(arguments))
    ours = [word for word in command.words if word.startswith(("recipes/", "tables/"))]
    assert [word for word in ours if not (ROOT / word).is_file()] == []


# ------------------------------------------------------------------------------------------------ recipes, methods


def check_fields(text: str, folder: Path) -> None:
    """A recipe of either task, or a table, is valid beside the files that it refers to."""
    fields = yaml.safe_load(text)
    (folder / "shown.yaml").write_text(text, encoding="utf-8")
    if "rows" in fields:
        table = read_table(folder / "shown.yaml")
        kind = FewshotRecipe if table.task == "fewshot" else Recipe
        assert all(isinstance(table.recipe(row, table.settings[0], seed=0), kind) for row in table.rows)
    elif fields.get("task") == "fewshot":
        assert isinstance(read_fewshot(folder / "shown.yaml"), FewshotRecipe)
    else:
        assert isinstance(read_recipe(folder / "shown.yaml"), Recipe)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_recipes_and_tables_of_a_page_are_valid(page: Path, tmp_path: Path) -> None:
    written = dict(HEREDOC.findall(page.read_text(encoding="utf-8")))
    for name, text in written.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for folder in ("recipes", "tables"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for text in (*written.values(), *(text for language, text in fences(page) if language == "yaml")):
        check_fields(text, tmp_path)


def links(page: Path) -> set[str]:
    """Where a page's links lead, as paths in the repository."""
    targets = re.findall(r"\]\(([^)\s#:]+)", prose(page))
    return {os.path.relpath((page.parent / target).resolve(), ROOT) for target in targets}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_page_with_its_source(method: str) -> None:
    assert f"docs/methods/{method}.md" in links(DOCS / "methods/README.md")
    source = "adapter.py" if method == "vacsr" else f"methods/{method}.py"
    assert f"src/vacsr/{source}" in links(DOCS / f"methods/{method}.md")


@pytest.mark.parametrize("method", REGISTRY["fewshot"])
def test_every_few_shot_method_has_a_section_with_its_source(method: str) -> None:
    page = DOCS / "methods/fewshot.md"
    assert method in anchors(page)
    assert f"src/{REGISTRY['fewshot'][method].method.__module__.replace('.', '/')}.py" in links(page)
