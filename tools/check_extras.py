"""Install each extra alone in a fresh environment beside the CPU build of torch, and import what it brings.

python tools/check_extras.py [EXTRA …]   # default: all but dev and docs; half a minute to two minutes each

An extra that replaces torch, misses a package, or breaks `import vacsr` is listed at the end, with exit code 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"pyyaml": "yaml", "faiss-cpu": "faiss", "milvus-lite": "milvus_lite", "qdrant-client": "qdrant_client"}
"""Packages whose module has another name than theirs with - as _."""


def modules(requirements: list[str]) -> list[str]:
    """What the packages of requirement lines are imported as."""
    names = [re.match(r"[\w-]+", line)[0] for line in requirements]
    return [MODULES.get(name, name.replace("-", "_")) for name in names]


def problem(extra: str, requirements: list[str], torch: str) -> str:
    """What is wrong with one extra; "" if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt"]
        imports = "; ".join(f"import {name}" for name in ("vacsr", *modules(requirements)))
        check = f"import torch; before = torch.__version__; {imports}; assert before == {torch!r}, before"
        steps = [
            [sys.executable, "-m", "venv", folder],
            [*pip, "torch"],
            [*pip, f".[{extra}]"],
            [python, "-m", "pip", "check"],
            [python, "-c", check],
        ]
        for step in steps:
            done = subprocess.run(step, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                return (done.stdout + done.stderr).strip()[-2000:] or f"exit code {done.returncode}"
    return ""


def main() -> int:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    ).stdout.strip()
    failed = []
    for extra in sys.argv[1:] or [name for name in extras if name not in ("dev", "docs")]:
        message = problem(extra, extras[extra], torch)
        print(f"{extra}: {message or 'ok'}", flush=True)
        failed += [extra] if message else []
    print(f"failed: {', '.join(failed)}" if failed else "every extra installs alone", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
