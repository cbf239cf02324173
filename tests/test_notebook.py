"""examples/quickstart.ipynb runs from top to bottom, and stores no large outputs."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/quickstart.ipynb"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel where there is one, otherwise cell by cell in one namespace."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    if all(importlib.util.find_spec(name) for name in ("nbclient", "nbformat", "ipykernel")):
        import nbclient
        import nbformat

        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
        return
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for cell in code_cells():
        exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    assert namespace["found"].double().mean() > 0.5, "the audit finds wrong captions"


def test_outputs_are_short_texts() -> None:
    outputs = [output for cell in code_cells() for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream"}
    assert NOTEBOOK.stat().st_size < 15_000
