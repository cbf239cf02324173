"""What is peculiar to FAISS; test_index.py has what all backends share."""

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vacsr.errors import DataError, MissingExtra, UsageError
from vacsr.search import open_index
from vacsr.search.faiss import FaissIndex

DIM = 8


def units(count: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)), dim=1)


@pytest.fixture
def folder(new_spec: Callable[[str], str]) -> Path:
    return Path(new_spec("faiss").removeprefix("faiss:"))


def opened(folder: Path, options: str = "") -> FaissIndex:
    index = open_index(f"faiss:{folder}{options}", dim=DIM, provenance="images:one", create=True)
    assert isinstance(index, FaissIndex)
    return index


def built(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.glob("*.faiss"))


@pytest.mark.parametrize("options", ["", ",index=HNSW8", ",index=IVF4,Flat,search=nprobe=4", ",index=OPQ4,IVF4,PQ4x4"])
def test_new_deleted_and_replaced_rows_are_searched_beside_the_file(folder: Path, options: str) -> None:
    """Where every list is visited and the candidates are many, hits are those of the exact index of the same folder."""
    with closing(opened(folder, options)) as index:
        index.add([f"old {n}" for n in range(500)], units(500))
        index.optimize()
        index.add([f"new {n}" for n in range(20)], units(20, seed=1))
        index.add(["old 3"], units(1, seed=2))
        index.delete([f"old {n}" for n in range(100, 200)])
        hits, queries = index.search(units(6, seed=3), 200), units(6, seed=3)
        with closing(open_index(f"exact:{folder}")) as exact:
            truth = exact.search(queries, 200)
            assert hits.ids == truth.ids or "PQ" in options
            shared = [len({*ours} & {*right}) / 200 for ours, right in zip(hits.ids, truth.ids, strict=True)]
            assert min(shared) > 0.9
        assert index.search(units(20, seed=1)[:1], 1).ids == [["new 0"]], "a row that the file lacks"
        assert index.search(units(1, seed=2), 1).ids == [["old 3"]], "a row that was replaced"
        assert not {f"old {n}" for n in range(100, 200)} & {name for row in hits.ids for name in row}
        torch.testing.assert_close(hits.scores[0], hits.vectors[0] @ queries[0], atol=1e-6, rtol=0)


def test_where_the_neighbours_were_deleted_the_query_is_searched_exactly(folder: Path) -> None:
    centre = torch.nn.functional.normalize(torch.ones(1, DIM), dim=1)
    with closing(opened(folder, ",index=IVF4,Flat,search=nprobe=1")) as index:
        index.add([f"near {n}" for n in range(30)], centre + 0.01 * units(30))
        index.add([f"far {n}" for n in range(270)], units(270, seed=1) - centre)
        index.optimize()
        index.delete([f"near {n}" for n in range(30)])
        with closing(open_index(f"exact:{folder}")) as exact:
            assert index.search(centre, 5).ids == exact.search(centre, 5).ids


def test_another_process_sees_the_file_once_it_refreshes(folder: Path) -> None:
    with closing(opened(folder, ",index=HNSW8")) as writer, closing(opened(folder)) as reader:
        writer.add([f"{n}" for n in range(50)], units(50))
        assert (reader.index, reader.exact, len(reader)) == ("HNSW8", False, 0) or reader.index == "Flat"
        writer.optimize()
        with closing(opened(folder)) as later:
            assert (later.index, later.exact, later.info().where) == ("HNSW8", False, f"{folder},index=HNSW8")
            writer.delete([f"{n}" for n in range(40)])  # so many that the rows move into new files
            assert later.refresh()
            assert later.search(units(50)[45:46], 1).ids == [["45"]]
            assert len(later.search(units(2), 100).ids[0]) == 10
        writer.optimize()
        assert built(folder) == ["HNSW8"], "the file of the old rows is removed"


def test_an_exact_folder_gets_a_file_and_may_change_its_kind(folder: Path) -> None:
    with closing(open_index(f"exact:{folder}", dim=DIM, create=True)) as exact:
        exact.add([f"{n}" for n in range(100)], units(100))
    for kind in ("Flat", "HNSW8"):
        with closing(open_index(f"faiss:{folder},index={kind}")) as index:
            index.optimize()
            assert (built(folder), index.exact) == ([kind], kind == "Flat")
            assert index.search(units(100)[:1], 1).ids == [["0"]]
    with closing(open_index(f"faiss:{folder}")) as index:
        assert index.info().where.endswith("index=HNSW8")


def test_too_few_vectors_to_train_are_searched_exactly(folder: Path) -> None:
    with closing(opened(folder, ",index=IVF64,Flat")) as index:
        index.add([f"{n}" for n in range(10)], units(10))
        with pytest.warns(UserWarning, match="too few to train"):
            index.optimize()
        assert (index.search(units(10), 1).ids, built(folder)) == ([[f"{n}"] for n in range(10)], [])


def test_it_is_trained_anew_once_new_rows_are_the_majority(folder: Path) -> None:
    import faiss

    def centroids() -> Tensor:
        (file,) = folder.glob("*.faiss")
        stored = faiss.read_index(str(file))
        return torch.from_numpy(stored.quantizer.reconstruct_n(0, 4))

    with closing(opened(folder, ",index=IVF4,Flat")) as index:
        index.add([f"old {n}" for n in range(200)], units(200))
        index.optimize()
        before = centroids()
        index.add([f"new {n}" for n in range(200)], units(200, seed=1))
        index.optimize()
        assert torch.equal(centroids(), before), "the new ones are half of all"
        index.add([f"newest {n}" for n in range(401)], units(401, seed=3))
        index.optimize()
        assert not torch.equal(centroids(), before)


def test_a_file_that_is_ahead_of_what_a_reader_knows_is_left_alone(folder: Path) -> None:
    with closing(opened(folder, ",index=HNSW8")) as writer:
        writer.add([f"{n}" for n in range(50)], units(50))
        with closing(opened(folder, ",index=HNSW8")) as reader:
            writer.add([f"{n}" for n in range(50, 90)], units(90)[50:])
            writer.optimize()
            reader._load()  # between two refreshes, as another thread's refresh may
            assert reader.search(units(90)[[3, 70]], 60).ids[0][0] == "3"
            assert len(reader.search(units(90)[[70]], 60).ids[0]) == 50


def test_a_file_that_asks_for_more_than_it_holds(folder: Path) -> None:
    with closing(opened(folder)) as index:
        index.add([f"{n}" for n in range(50)], units(50))
        index.optimize()
    (file,) = folder.glob("*.faiss")
    count = (50 * DIM).to_bytes(8, "little")  # of the floats that follow
    assert count in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(count, (1 << 38).to_bytes(8, "little"), 1))
    with pytest.raises(DataError, match="damaged"):
        open_index(f"faiss:{folder}")


def test_a_broken_file_is_named(folder: Path) -> None:
    with closing(opened(folder)) as index:
        index.add([f"{n}" for n in range(50)], units(50))
        index.optimize()
    (file,) = folder.glob("*.faiss")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        open_index(f"faiss:{folder}")


@pytest.mark.parametrize("options", [",index=Tree7", ",index=../Flat", ",index=Flat,search=colour=red"])
def test_kinds_and_settings_that_faiss_does_not_know(folder: Path, options: str) -> None:
    with pytest.raises(UsageError, match="index=HNSW32"):
        opened(folder, options)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingExtra, match=r"vacsr\[faiss\]"):
        open_index(f"faiss:{tmp_path / 'i'}", dim=2, create=True)
    assert not (tmp_path / "i").exists()
