"""Every command of docs/training.md runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "training.md"


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}  # small steps on several threads wait for each other
    assert any("torchrun" in line for line in commands())
    for line in commands():
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
        expected = (124, 0) if line.startswith("timeout") else (0,)
        assert done.returncode in expected, f"{line}\n{done.stderr}"
    finished = {path.parent.name for path in tmp_path.glob("runs/*/report.json")}
    assert finished == {"whole", "stopped", "two", "fast", "logged", "scenes"}
    assert (tmp_path / "runs" / "logged" / "metrics.csv").is_file()
