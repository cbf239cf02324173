"""A million vectors; `make test-all` runs it."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from vacsr.search import open_index

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
    assert len(index) == count
    hits = index.search(queries, k)
    best = scores.T.sort(dim=1, descending=True, stable=True)
    assert [[int(name) for name in row] for row in hits.ids] == best.indices[:, :k].tolist()
    torch.testing.assert_close(hits.scores.double(), best.values[:, :k], rtol=0, atol=1e-6)
