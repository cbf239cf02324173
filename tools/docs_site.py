"""A hook of mkdocs.yml: reference pages from the code, the notebook, and the files outside docs/ that pages link to.

Generated at build time: every command and option (from typer), every recipe field (from the pydantic configuration) and
the public Python names (by mkdocstrings). A link to a source file leads to a copy of it as text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import griffe
import typer
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import vacsr
from vacsr.cli import app
from vacsr.config import Recipe
from vacsr.config.base import METHODS, method_entry
from vacsr.fewshot.config import FewshotRecipe
from vacsr.serve.schemas import ServiceSettings

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\w$])\$(\S(?:[^$\n]*\S)?)\$(?!\w)", re.DOTALL)
NOTEBOOK = ROOT / "examples/quickstart.ipynb"
FIRST = (
    "load_pairs", "load_model", "fit", "PairScorer", "PairScores", "Searcher", "open_index", "audit",
    "evaluate_retrieval", "RetrievalReport", "compare", "TrainConfig", "BackboneConfig", "HeadConfig", "Run",
)  # fmt: skip
"""Public names in the order in which a newcomer meets them; the others follow by the alphabet."""
METHOD_HEADING = re.compile(r'(<h3 id="vacsr\.[\w.]*?(\w+)\.\w+"[^>]*>\s*<span class="doc doc-object-name[^>]*>)')
MATH: list[str] = []
"""Formulas of the pages, put in after Markdown is done."""


def cell(text: str) -> str:
    """Of a Markdown table."""
    return " ".join(re.sub(r"\[/?\w+\]", "", text).split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, groups opened."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        yield from ((f"{name} {sub}", one) for sub, one in inner.items()) if inner else [(name, command)]


def option_row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or (parameter.name or "").upper()
        return f"| `{name}` | {cell(getattr(parameter, 'help', None) or '')} | |"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    shown = parameter.default if isinstance(parameter.default, (str, int, float, Path)) else None
    default = "" if shown in (None, "") or isinstance(shown, bool) else f"`{shown}`"
    return f"| {names} | {cell(parameter.help or '')} | {default} |"


def command_page() -> str:
    lines = [
        "# All options",
        "",
        "Generated from the command line itself. Exit codes, files and JSON: [the command line](../cli.md).",
    ]
    for name, command in commands():
        context = typer.Context(command, info_name=name)
        summary = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
        lines += ["", f"## {name}", "", f"```\nvacsr {name} {' '.join(command.collect_usage_pieces(context))}\n```", ""]
        rows = [option_row(p) for p in command.params if not getattr(p, "hidden", False)]
        lines += [
            summary.replace("<", "&lt;"),
            "",
            *(["| option | does | default |", "|---|---|---|"] if rows else []),
            *rows,
        ]
    return "\n".join(lines) + "\n"


def field_rows(config: type[BaseModel], prefix: str) -> Iterator[str]:
    """A row per field; sections inside are opened."""
    for name, field in config.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        sections = [
            t
            for t in (field.annotation, *get_args(field.annotation))
            if isinstance(t, type) and issubclass(t, BaseModel)
        ]
        if sections and not sections[0].__subclasses__():
            yield from field_rows(sections[0], path)
            continue
        default = field.get_default(call_default_factory=True)
        shown = "" if default is PydanticUndefined else f"`{str(default) or '(empty)'}`"
        choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
        said = cell(field.description or "") + (
            f" One of {', '.join(f'`{c}`' for c in choices)}." if len(choices) > 1 else ""
        )
        yield f"| `{path}` | {cell(shown)} | {said} |"


def field_table(config: type[BaseModel], prefix: str = "") -> list[str]:
    return ["| field | default | does |", "|---|---|---|", *field_rows(config, prefix), ""]


def recipe_page() -> str:
    """The fields of recipes of both tasks, of every method, and of the service."""
    method_entry("vacsr")
    lines = [
        "# Recipe fields",
        "",
        "Generated from the configuration classes. Set a field in a recipe, or with `--set SECTION.FIELD=VALUE`.",
        "",
    ]
    for task, recipe in (("retrieval", Recipe), ("fewshot", FewshotRecipe)):
        lines += [f"## {'vacsr train' if task == 'retrieval' else 'vacsr fewshot'}", ""]
        for name, field in recipe.model_fields.items():
            if name == "method":
                continue
            section = field.annotation
            if isinstance(section, type) and issubclass(section, BaseModel):
                lines += [
                    f"### {task}: {name}",
                    "",
                    " ".join((section.__doc__ or "").split()),
                    "",
                    *field_table(section, name),
                ]
        for name, entry in METHODS[task].items():  # type: ignore[index]
            lines += [f"### {task} method: {name}", "", *field_table(entry.config, "method")]
    lines += ["## vacsr serve", "", "Limits, set with `--set FIELD=VALUE`.", "", *field_table(ServiceSettings)]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    lines = ["# Python API", "", "The public names of `vacsr`. Everything else may change between releases.", ""]
    homes = {name: module for module, names in vacsr._HOMES.items() for name in names}
    for name in (*FIRST, *sorted(homes.keys() - set(FIRST))):
        lines += [f"::: vacsr.{homes[name]}.{name}", ""]
        if homes[name] == "config":  # its fields are on the page of recipes
            lines[-1:] = ["    options:", "      members: false", ""]
    return "\n".join(lines)


def notebook_page() -> str:
    """Its texts, its code and what that prints; links are those of a page in docs/get-started."""
    parts = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../docs/get-started/", "](").replace("](../docs/", "](../"))
            continue
        printed = "".join("".join(output["text"]) for output in cell["outputs"])
        parts += [f"```python\n{source}\n```"] + ([f"```\n{printed}```"] if printed else [])
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in (("commands", command_page()), ("recipe", recipe_page()), ("api", api_page())):
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    files.append(File.generated(config, "get-started/quickstart.md", content=notebook_page()))
    for source in sorted(linked_sources() - {NOTEBOOK}):
        path = f"source/{source.relative_to(ROOT).as_posix()}.txt"
        files.append(File.generated(config, path, content=source.read_text(encoding="utf-8")))
    return files


def linked_sources() -> set[Path]:
    """Files outside docs/ that pages link to."""
    found = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for _, link in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / link.partition("#")[0]).resolve()
            if (
                "://" not in link
                and target.is_file()
                and not target.is_relative_to(ROOT / "docs")
                and target.suffix != ".md"
            ):
                found.add(target)
    return found


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ lead to copies; those to folders become plain text. Fenced blocks stay as they are."""
    here = Path(config.docs_dir, page.file.src_uri).parent
    if page.file.src_uri == f"methods/{page.title}.md":
        page.meta.setdefault("title", f"Method {page.title}")

    def moved(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = (here / link.partition("#")[0]).resolve()
        if "://" in link or link.startswith("#") or (target.is_relative_to(config.docs_dir) and not target.is_dir()):
            return match.group(0)
        if target.is_file() and target.suffix != ".md":
            name = f"source/{target.relative_to(ROOT).as_posix()}.txt"
            copy = Path(config.docs_dir, "get-started/quickstart.md" if target == NOTEBOOK else name)
            return f"{text}({Path(os.path.relpath(copy, here)).as_posix()})"
        return text[1:-1]

    def formula(match: re.Match[str]) -> str:
        display = "block" if match.group(1) else "inline"
        MATH.append(f'<span class="{display}-math">{convert(match.group(1) or match.group(2), display=display)}</span>')
        return f"formula{len(MATH) - 1}formula"

    parts = (part if part.startswith(("```", "`")) else FORMULA.sub(formula, part) for part in CODE.split(markdown))
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in FENCE.split("".join(parts)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Tables of numbers get a mark for site.css; formulas become MathML, which browsers draw without a script.

    Headings of methods in the reference start with their class.
    """
    html = METHOD_HEADING.sub(r"\1\2.", html)
    html = re.sub(r"<table>(.*?)</table>", numbers_marked, html, flags=re.DOTALL)
    return re.sub(r"formula(\d+)formula", lambda match: MATH[int(match.group(1))], html)


def numbers_marked(match: re.Match[str]) -> str:
    """A table in which most cells are short numbers."""
    cells = [re.sub(r"<[^>]+>", "", text).strip() for text in re.findall(r"<td[^>]*>(.*?)</td>", match.group(1))]
    numbers = [text for text in cells if len(text) < 20 and re.fullmatch(r"–|[−+]?[\d.][−+\d.,±/%×†‡ ]*(ms)?", text)]
    return f"<table data-numbers>{match.group(1)}</table>" if 2 * len(numbers) > len(cells) else match.group(0)


class Doctests(griffe.Extension):
    """Examples in docstrings become code, and roles such as :func:`name` become plain names."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            text = text.replace("``", "`")
            obj.docstring.value = re.sub(
                r"(?:^>>> .*(?:\n(?!\n).*)*)", "```python\n\\g<0>\n```", text, flags=re.MULTILINE
            )
