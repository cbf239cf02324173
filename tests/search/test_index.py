"""What every backend must do: the same calls, contents, order and refusals, whatever stores the vectors."""

from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from vacsr.errors import DataError, ProvenanceMismatch, ShapeMismatch, UsageError
from vacsr.scoring import PairScorer
from vacsr.search import VectorIndex, embedding_provenance, model_digest, open_index
from vacsr.search.index import BACKENDS

DIM = 4
ODD_IDS = ['a "quoted" \\ id', "ü 🐈", "line\nbreak", "' or 1 == 1", "'] or key != '", "a/b.jpg", " ", '"],["']
BAD_ITEMS: list[tuple[Any, Tensor, Any, type[Exception]]] = [
    (["a", "b", "a"], torch.ones(3, DIM), None, DataError),
    (["a", ""], torch.ones(2, DIM), None, DataError),
    ("ab", torch.ones(2, DIM), None, DataError),
    (["a", "b"], torch.tensor([[1.0] * DIM, [float("nan")] * DIM]), None, DataError),
    (["a"], torch.full((1, DIM), float("inf")), None, DataError),
    (["a"], torch.full((1, DIM), 1e18), None, DataError),
    (["a"], torch.ones(1, DIM + 1), None, ShapeMismatch),
    (["a"], torch.ones(DIM), None, ShapeMismatch),
    (["a"], torch.ones(2, DIM), None, ShapeMismatch),
    (["a"], torch.ones(1, DIM), [], ShapeMismatch),
    (["a"], torch.ones(1, DIM), [{}, {}], ShapeMismatch),
    (["a"], torch.ones(1, DIM), [{"x": float("nan")}], DataError),
    (["a"], torch.ones(1, DIM), [{"x": object()}], DataError),
    (["a"], torch.ones(1, DIM), [7], DataError),
]
BAD_QUERIES: list[tuple[Tensor, int, type[Exception]]] = [
    (torch.ones(1, DIM), 0, UsageError),
    (torch.ones(1, DIM), 100_000, UsageError),
    (torch.ones(1, 3), 1, ShapeMismatch),
    (torch.ones(DIM), 1, ShapeMismatch),
    (torch.full((1, DIM), float("nan")), 1, DataError),
]


@pytest.fixture(
    params=[
        "exact",
        "faiss",
        "qdrant",
        pytest.param("pgvector", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("milvus", marks=pytest.mark.slow),
    ]
)
def spec(request: pytest.FixtureRequest, new_spec: Callable[[str], str]) -> str:
    """The name of an index that does not exist yet."""
    return new_spec(request.param)


@pytest.fixture
def index(spec: str) -> Any:
    with closing(open_index(spec, dim=DIM, provenance="images:one", create=True)) as opened:
        yield opened


def units(count: int, seed: int = 0) -> Tensor:
    return normalize(torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_every_backend_is_tested() -> None:
    assert set(BACKENDS) == {"exact", "faiss", "milvus", "pgvector", "qdrant"}


def test_contents_and_order_are_those_of_a_dict(index: VectorIndex) -> None:
    rows = {f"image {n}": (vector, {"n": n, "captions": ["ü"]}) for n, vector in enumerate(units(60))}
    metadata = [item for _, item in rows.values()]
    assert index.add(list(rows), torch.stack([vector for vector, _ in rows.values()]), metadata) == (60, 0)
    index.optimize()
    new = units(2, seed=1)
    assert index.add(["image 3", "new"], new) == (1, 1)
    rows |= {"image 3": (new[0], {}), "new": (new[1], {})}
    assert index.delete(["image 5", "image 5", "none"]) == 1
    del rows["image 5"]
    assert (len(index), index.known(["image 3", "image 5", "none", "new"])) == (60, [True, False, False, True])
    assert dict(index.records()) == {name: item for name, (_, item) in rows.items()}
    assert index.metadata(["new", "image 7", "none", "new"]) == {"new": {}, "image 7": {"n": 7, "captions": ["ü"]}}
    entries = index.get(["image 8", "none", "image 8"])
    assert {name: entry.metadata for name, entry in entries.items()} == {"image 8": rows["image 8"][1]}
    assert torch.equal(entries["image 8"].vector, rows["image 8"][0])
    queries = units(4, seed=2)
    for k in (1, 7, 1000):
        hits = index.search(queries, k)
        assert hits.scores.dtype == hits.vectors.dtype == torch.float32
        for n, query in enumerate(queries):
            best = sorted(rows, key=lambda name, query=query: -float(rows[name][0].double() @ query.double()))[:k]
            assert (list(hits.ids[n]), list(hits.metadata[n])) == (best, [rows[name][1] for name in best])
            assert torch.equal(hits.vectors[n], torch.stack([rows[name][0] for name in best]))
            torch.testing.assert_close(hits.scores[n], hits.vectors[n] @ query, atol=1e-5, rtol=0)


def test_an_empty_index_and_no_queries(index: VectorIndex) -> None:
    hits = index.search(torch.ones(2, DIM), 5)
    assert (hits.ids, hits.metadata) == ([[], []], [[], []])
    assert (hits.scores.shape, hits.vectors.shape) == ((2, 0), (2, 0, DIM))
    assert (index.add([], torch.empty(0, DIM)), index.delete(["a"]), len(index)) == ((0, 0), 0, 0)
    index.add(["a"], torch.ones(1, DIM))
    assert len(index.search(torch.empty(0, DIM), 5).scores) == 0
    assert (index.delete(["a", "a"]), len(index), index.search(torch.ones(1, DIM), 5).ids) == (1, 0, [[]])


def test_odd_ids_and_metadata_come_back(index: VectorIndex) -> None:
    items: list[dict[str, Any]] = [{"caption": name, "deep": [1, 2.5, None, True, {"x": name}]} for name in ODD_IDS]
    index.add(ODD_IDS, units(len(ODD_IDS)), items)
    hits = index.search(torch.ones(1, DIM), 100)
    assert dict(zip(hits.ids[0], hits.metadata[0], strict=True)) == dict(zip(ODD_IDS, items, strict=True))
    assert index.known(ODD_IDS) == [True] * len(ODD_IDS)
    assert index.delete(["' or 1 == 1", "none' or 1 == 1"]) == 1
    assert index.delete(ODD_IDS) == len(ODD_IDS) - 1


def test_what_cannot_be_added_or_asked_changes_nothing(index: VectorIndex) -> None:
    index.add(["old"], torch.ones(1, DIM), [{"n": 1}])
    for ids, vectors, metadata, kind in BAD_ITEMS:
        with pytest.raises(kind):
            index.add(ids, vectors, metadata)
    for queries, k, kind in BAD_QUERIES:
        with pytest.raises(kind):
            index.search(queries, k)
    assert list(index.records()) == [("old", {"n": 1})]


def test_a_check_sees_what_exists_and_may_refuse_all(index: VectorIndex) -> None:
    index.add(["a"], torch.ones(1, DIM), [{"source": "there"}])
    seen: list[dict[str, Any]] = []

    def refuse(stored: dict[str, Any]) -> None:
        seen.append(stored)
        raise DataError("another source — stop")

    with pytest.raises(DataError, match="another source"):
        index.add(["b", "a"], torch.ones(2, DIM), check=refuse)
    assert seen == [{"a": {"source": "there"}}]
    assert index.known(["a", "b"]) == [True, False]
    assert index.add(["b"], torch.ones(1, DIM), check=refuse) == (1, 0), "nothing exists, so nothing is checked"


def test_opened_again_it_is_the_same_and_others_are_refused(spec: str, index: VectorIndex) -> None:
    index.add(["a", "b"], units(2), [{"n": 1}, {"n": 2}])
    for source in ("folder:/b", "folder:/a'", "folder:/b"):
        index.note_source(source)
    index.close()
    with closing(open_index(spec, dim=DIM, provenance="images:one")) as again:
        assert again.search(units(1), 1).metadata == [[{"n": 1}]]
        info = again.info()
        assert (info.bytes or 0) > 0
        assert info._replace(bytes=None, where="")._asdict() == {
            "kind": spec.partition(":")[0], "where": "", "vectors": 2, "dim": DIM, "dtype": "float32",
            "provenance": "images:one", "dead": 0, "parts": 1, "bytes": None, "holds": "images", "exact": True,
            "sources": ("folder:/b", "folder:/a'"),
        }  # fmt: skip
    for create in (True, False):
        with pytest.raises(ProvenanceMismatch, match=r"another model.*index add .* --pairs folder:/b"):
            open_index(spec, provenance="images:two", dim=DIM, create=create)
        with pytest.raises(ProvenanceMismatch, match="holds images, these are texts — fill another"):
            open_index(spec, provenance="texts:one", dim=DIM, create=create)
        with pytest.raises(ShapeMismatch, match="dimension 4, not 5"):
            open_index(spec, provenance="images:one", dim=5, create=create)
    with pytest.raises(UsageError, match="float32"):
        open_index(spec, dim=DIM, create=True, dtype="float16")


def test_an_index_that_does_not_exist(spec: str) -> None:
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(spec)
    for options in ({}, {"dim": 4, "dtype": "float64"}):
        with pytest.raises(UsageError, match="dim=512"):
            open_index(spec, create=True, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="vacsr index add"):
        open_index(spec)


@pytest.mark.parametrize("name", ["", "annoy:photos", "exact:", ":x", "milvus:"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="write exact:FOLDER"):
        open_index(name)


def test_provenance_follows_what_embeds_and_nothing_else(scorer: PairScorer) -> None:
    plain, adapted, other = scorer.model, deepcopy(scorer.model), deepcopy(scorer.model)
    with torch.no_grad():
        next(adapted.method.parameters()).add_(1)  # type: ignore[attr-defined]
        next(other.image_head.parameters()).add_(1)
    assert embedding_provenance(plain) == embedding_provenance(deepcopy(plain)) == embedding_provenance(adapted)
    assert embedding_provenance(plain, "texts") == embedding_provenance(plain).replace("images", "texts")
    assert embedding_provenance(other) != embedding_provenance(plain)
    assert model_digest(plain) == model_digest(deepcopy(plain))
    assert len({model_digest(model) for model in (plain, adapted, other)}) == 3
