"""At the sizes that are promised: a million vectors, and 64 clients for a minute; `make test-all` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from vacsr.search import open_index

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.timeout(900)
def test_a_million_vectors_are_searched_exactly(tmp_path: Path) -> None:
    count, dim, k = 1_000_000, 512, 20
    index = open_index(f"exact:{tmp_path / 'index'}", dim=dim, create=True, dtype="float16")
    generator = torch.Generator().manual_seed(0)
    queries = functional.normalize(torch.randn(3, dim, generator=generator), dim=1)
    scores = torch.empty(count, 3, dtype=torch.float64)
    for start in range(0, count, 50_000):
        vectors = functional.normalize(torch.randn(50_000, dim, generator=generator), dim=1)
        index.add([str(start + row) for row in range(len(vectors))], vectors)
        scores[start : start + len(vectors)] = vectors.half().double() @ queries.double().T
    index.settle()
    assert len(index) == count
    found = index.search(queries, k)
    best = scores.T.sort(dim=1, descending=True, stable=True)
    assert [[int(name) for name in row] for row in found.ids] == best.indices[:, :k].tolist()
    torch.testing.assert_close(found.scores.double(), best.values[:, :k], rtol=0, atol=1e-6)


@pytest.mark.timeout(600)
def test_sixty_four_clients_for_a_minute(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'vacsr[serve]'")
    told = load(tmp_path, clients=64, seconds=60)
    assert told["faults"] == {}
    assert set(told["statuses"]) == {"200"}
    assert max(told["mib"]["load"]) < told["mib"]["warm"] + 100, "the service sheds load rather than grow"


def load(folder: Path, *, clients: int, seconds: int) -> dict[str, Any]:
    """What the benchmark says."""
    out = folder / "load.json"
    script = ROOT / "benchmarks" / "service_load.py"
    command = [sys.executable, script, "--clients", str(clients), "--seconds", str(seconds), "--json", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found
