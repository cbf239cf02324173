"""A small trained model, an index of drawn pictures, and the service over both."""

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image
from starlette.testclient import TestClient

from vacsr import BackboneConfig, HeadConfig, TrainConfig, fit
from vacsr.data import PhotoSet, load_pairs
from vacsr.scoring import PairScorer
from vacsr.search import embedding_provenance, open_index
from vacsr.search.calibrate import CalibrateSettings, calibrate
from vacsr.search.fill import fill_index
from vacsr.search.searcher import Searcher
from vacsr.serve import ServiceSettings, create_app

PHOTOS = "scenes:images=24,held_out=4,per_image=2,size=32"
TINY = BackboneConfig(spec="tiny:width=16,depth=1,text_depth=1,heads=2,size=32", head=HeadConfig(dim=8))


class World(NamedTuple):
    """What a service stands on."""

    model: Path
    index: str
    photos: PhotoSet
    searcher: Searcher
    """Of images by text."""
    texts: Searcher
    """Of captions by image."""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("service")
    photos = load_pairs(PHOTOS, split="all")
    assert isinstance(photos, PhotoSet)
    run = fit("vacsr", photos, TrainConfig(epochs=1, batch_size=8, device="cpu"), backbone=TINY)
    run.model.save_pretrained(root / "model")
    scorer = PairScorer.from_pretrained(root / "model", device="cpu")
    index = open_index(f"exact:{root / 'index'}", dim=8, provenance=embedding_provenance(scorer.model), create=True)
    fill_index(index, scorer, photos, source=PHOTOS, workers=1)
    captions = open_index(
        f"exact:{root / 'texts'}", dim=8, provenance=embedding_provenance(scorer.model, "texts"), create=True
    )
    fill_index(captions, scorer, photos, source=PHOTOS, texts=True)
    return World(root / "model", f"exact:{root / 'index'}", photos, Searcher(scorer, index), Searcher(scorer, captions))


@pytest.fixture(scope="session")
def calibrated(world: World) -> Callable[..., Searcher]:
    """Makes searchers of images, calibrated on other pictures, with cutoffs of your choice."""
    pairs = load_pairs("scenes:images=128,held_out=4,per_image=1,size=32,seed=7", split="train")
    fitted = calibrate(world.searcher.scorer, pairs, CalibrateSettings(candidates=20))

    def make(cutoff: float | None, *, set_cutoff: float | None = None, size: int | None = None) -> Searcher:
        """``set_cutoff``: hits belong to the answer set from this grade on. ``size``: the largest checked gallery."""
        assert fitted.t2i is not None
        largest = size or fitted.t2i.sizes[-1].size
        both = {"cutoff": cutoff, "set_cutoff": set_cutoff}
        sizes = [one.model_copy(update=both) for one in fitted.t2i.sizes if one.size < largest]
        sizes.append(fitted.t2i.sizes[-1].model_copy(update={**both, "size": largest}))
        part = {"certified": 0 if cutoff is None else largest, "sizes": tuple(sizes)}
        calibration = fitted.model_copy(update={"t2i": fitted.t2i.model_copy(update=part)})
        return Searcher(world.searcher.scorer, world.searcher.index, calibration)

    return make


Opened = Callable[..., TestClient]


@pytest.fixture
def opened(world: World) -> Iterator[Opened]:
    """A client of a service with these settings, closed in the end."""
    clients: list[TestClient] = []

    def make(searcher: Searcher | None = None, *, photos: bool = True, **settings: Any) -> TestClient:
        app = create_app(
            searcher or world.searcher, ServiceSettings(**settings), photos=(lambda: [world.photos]) if photos else None
        )
        client = TestClient(app)
        client.__enter__()
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture(scope="session")
def client(world: World) -> Iterator[TestClient]:
    with TestClient(create_app(world.searcher, photos=lambda: [world.photos])) as made:
        yield made


@pytest.fixture(scope="session")
def image_client(world: World) -> Iterator[TestClient]:
    """Of a service that finds captions by image."""
    with TestClient(create_app(world.texts, ServiceSettings(max_pixels=10_000))) as made:
        yield made


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    def encoded(width: int = 40, height: int = 30, *, kind: str = "PNG") -> bytes:
        kept = io.BytesIO()
        Image.new("RGB", (width, height), (200, 30, 40)).save(kept, kind)
        return kept.getvalue()

    return encoded


class Live(NamedTuple):
    """A service on a port of this machine, in a thread."""

    port: int
    server: Any
    thread: threading.Thread

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, head: str, body: bytes = b"") -> bytes:
        """Send a request as it is written; all that comes back until the service closes."""
        with self.connect() as link:
            link.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
            return self.rest(link)

    @staticmethod
    def rest(link: socket.socket) -> bytes:
        parts = []
        while part := link.recv(65536):
            parts.append(part)
        return b"".join(parts)


@pytest.fixture
def live(world: World) -> Iterator[Callable[..., Live]]:
    import uvicorn

    from vacsr.serve.server import bind, server_config

    started: list[Live] = []

    def start(searcher: Searcher | None = None, *, photos: PhotoSet | None = None, **settings: Any) -> Live:
        limits = ServiceSettings(**settings)
        app = create_app(searcher or world.searcher, limits, photos=lambda: [photos or world.photos])
        listening = bind("127.0.0.1", 0)
        server = uvicorn.Server(server_config(app, limits))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        started.append(Live(listening.getsockname()[1], server, thread))
        while not server.started:
            time.sleep(0.01)
        return started[-1]

    yield start
    for one in started:
        one.server.should_exit = True
        one.thread.join(30)
        assert not one.thread.is_alive()
