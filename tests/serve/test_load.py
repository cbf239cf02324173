"""64 clients for a minute; `make test-all` runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_sixty_four_clients_for_a_minute(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'vacsr[serve]'")
    command = [sys.executable, ROOT / "benchmarks" / "service_load.py", "--clients", "64", "--seconds", "60", "--json"]
    done = subprocess.run([*command, tmp_path / "load.json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "load.json").read_text(encoding="utf-8"))
    assert measured["faults"] == {}
    assert set(measured["statuses"]) == {"200"}
    assert max(measured["mib"]["load"]) < measured["mib"]["warm"] + 100, "the service sheds load rather than grow"
