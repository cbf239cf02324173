"""What costs a client little costs the service little: bodies, images, and clients that send or read slowly."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from starlette.testclient import TestClient

from vacsr.data.decode import decode_photo
from vacsr.search.service import ServiceSettings
from vacsr.search.service.connections import bounded
from vacsr.search.service.guard import Guard
from vacsr.search.service.images import MAX_SCANS, decode_upload
from vacsr.search.service.metrics import ServiceMetrics
from vacsr.search.service.problems import Problem
from vacsr.search.service.schemas import parse_score, parse_search
from vacsr.search.service.service import Service

Start = Callable[..., Any]
QUERY = b'{"text": "a dog"}'


@pytest.mark.parametrize("field", ["texts", "ids", "images"])
def test_one_error_is_made_of_a_list_in_which_all_is_wrong(field: str) -> None:
    lists = {"texts": '["a"]', field: f"[{','.join(['0'] * 1000)}]"}
    body = "{" + ",".join(f'"{name}":{value}' for name, value in lists.items()) + "}"
    with pytest.raises(Problem, match=rf"{field}\.0: ") as caught:
        parse_score(body.encode())
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() == 1


def test_fields_that_are_not_known_are_refused_before_any_is_read() -> None:
    body = b"{" + b",".join(b'"field%d":0' % i for i in range(1000)) + b"}"
    for parse, known in ((parse_search, "text, image, k, policy"), (parse_score, "texts, ids, images")):
        with pytest.raises(Problem, match=f"not known — use {known}") as caught:
            parse(body)
        assert (caught.value.status, caught.value.__cause__) == (422, None)
        assert "field0" not in caught.value.message


def _progressive() -> tuple[bytes, bytes]:
    """A JPEG without its end, and its last scan."""
    kept = io.BytesIO()
    Image.radial_gradient("L").save(kept, "JPEG", progressive=True)
    data = kept.getvalue()
    return data[:-2], data[data.rindex(b"\xff\xda") : -2]


@pytest.mark.parametrize(
    "before",
    [b"", b"\xff", b"\xff\x01", b"\xff\xfe\0\x04ab", b"\xff\xfe\0\0"],
    ids=["as it is", "filled", "a bare marker", "a comment", "a length of none"],
)
def test_a_jpeg_of_very_many_scans_is_not_decoded(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def unfold(*_args: object, **_named: object) -> None:
        raise AssertionError("the image was decoded")

    start, scan = _progressive()
    bomb = start + (before + scan) * 2 * MAX_SCANS + b"\xff\xd9"
    monkeypatch.setattr("vacsr.search.service.images.decode_photo", unfold)
    with pytest.raises(Problem, match="may have 100 scans") as caught:
        decode_upload(bomb, max_pixels=10**6)
    assert caught.value.status == 422


def test_jpegs_as_programs_and_phones_write_them_are_taken() -> None:
    start, scan = _progressive()
    video = b"\0\0\0\x18ftypmp42" + b"\xff\xda\0\x02" * 2 * MAX_SCANS
    comment = b"\xff\xfe\x03\xea" + b"\xff\xda" * 500
    plain = io.BytesIO()
    Image.effect_noise((300, 200), 90).save(plain, "JPEG", quality=98, restart_marker_rows=1)
    for data in (start + b"\xff\xd9", start + b"\xff\xd9" + video, start + scan * 50 + b"\xff\xd9", plain.getvalue()):
        assert decode_upload(data, max_pixels=10**6).size in ((256, 256), (300, 200))
        assert decode_upload(data[:2] + comment + data[2:], max_pixels=10**6)


def _plain_eight_bits(values: np.ndarray[Any, Any], *, whole: bool) -> np.ndarray[Any, Any]:
    """All at once."""
    grey = np.nan_to_num(values.astype(np.float64))
    scale = 1 / 257 if whole else (255.0 if grey.max(initial=0.0) <= 1 else 1.0)
    return np.clip(np.rint(grey * scale), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("strip", [1, 700, 2**18])
def test_grey_of_many_bits_is_the_same_in_strips(strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vacsr.data.decode._STRIP", strip)
    every = np.arange(2**16, dtype=np.uint16).reshape(128, 512)
    png, tiffs = io.BytesIO(), []
    Image.fromarray(every).save(png, "PNG")
    floats = np.linspace(-0.5, 1, 128 * 64, dtype=np.float32).reshape(64, 128)
    odd = floats.copy()
    odd[0, :3] = [np.nan, np.inf, -np.inf]
    for values in (every.astype(np.int32), floats, floats * 300, odd):
        kept = io.BytesIO()
        Image.fromarray(values).save(kept, "TIFF")
        tiffs.append((kept.getvalue(), values))
    for data, values in ((png.getvalue(), every), *tiffs):
        seen = np.asarray(decode_photo(data, name="grey"))
        wanted = _plain_eight_bits(values, whole=values.dtype.kind in "iu")
        assert (seen == wanted[..., None]).all()


def test_grey_of_sixteen_bits_takes_little_memory_beside_its_pixels() -> None:
    kept = io.BytesIO()
    Image.fromarray(np.zeros((2000, 1000), np.uint16)).save(kept, "PNG")
    tracemalloc.start()
    try:
        decode_upload(kept.getvalue(), max_pixels=10**7)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2_000_000, "float64 of all pixels"


def test_a_photo_is_decoded_no_larger_than_it_is_shown_and_no_memory_is_told(opened: Any, world: Any) -> None:
    client: TestClient = opened(photo_side=16)
    sides: list[int] = []

    class Large:
        def open(self, row: int, *, side: int = 0) -> Image.Image:
            sides.append(side)
            if row:
                raise MemoryError
            return Image.new("RGB", (32, 32))

    names = world.photos.image_ids
    kept = client.app.state.service.shelf._kept  # type: ignore[attr-defined]
    kept |= {name: (Large(), row) for row, name in enumerate(names[:2])}
    assert client.get(f"/photo/{names[0]}").status_code == 200
    answer = client.get(f"/photo/{names[1]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_memory")
    assert answer.headers["retry-after"] == "1"
    scored = {"texts": ["a"], "ids": [names[0]]}
    assert client.post("/score", json=scored).status_code == 200
    assert client.post("/score", json=scored | {"ids": [names[1]]}).status_code == 503
    assert sides == [16, 16, 0, 0], "the model sees all of a photo"


def test_a_stop_does_not_wait_for_images(world: Any) -> None:
    go, done = threading.Event(), []

    async def stop() -> None:
        service = Service(world.searcher, ServiceSettings())
        working = [asyncio.ensure_future(service._threaded(lambda: done.append(go.wait(20)))) for _ in range(9)]
        await asyncio.sleep(0)
        await service.close()
        assert not go.is_set()
        assert sum(work.cancelled() for work in await _settled(working)) >= 5, "what has not begun never will"

    async def _settled(working: list[asyncio.Future[None]]) -> list[asyncio.Future[None]]:
        go.set()
        await asyncio.wait(working)
        return working

    rescue = threading.Timer(10, go.set)
    rescue.start()
    asyncio.run(stop())
    rescue.cancel()


def _status(answer: bytes) -> int:
    return int(answer.split()[1])


def _post(length: int) -> str:
    return f"POST /search HTTP/1.1\nHost: localhost\nContent-Type: application/json\nContent-Length: {length}"


def test_who_is_still_sending_takes_no_place(live: Start) -> None:
    service = live(concurrency=2)
    slow = [service.connect() for _ in range(5)]
    for link in slow:
        link.sendall(_post(100).replace("\n", "\r\n").encode() + b"\r\n\r\n{")
    time.sleep(0.2)
    assert _status(service.ask(f"{_post(len(QUERY))}\nConnection: close", QUERY)) == 200
    for link in slow:
        link.close()


def test_who_does_not_read_is_cut_off(live: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = live(connections=3, write_seconds=0.5, deadline_seconds=0.2)
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)  # which tells nobody else
    deaf = [socket.socket() for _ in range(3)]
    for link in deaf:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        link.connect(("127.0.0.1", service.port))
        link.settimeout(0.2)
        try:
            for _ in range(2000):
                link.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        except TimeoutError:
            pass
    health = "GET /healthz HTTP/1.1\nHost: localhost\nConnection: close"
    end = time.monotonic() + 20
    while _status(service.ask(health)) != 200:
        assert time.monotonic() < end, "they keep everybody out"
        time.sleep(0.1)
    for link in deaf:
        link.close()
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.exc_info]


class Wire:
    """As much of a transport as a protocol sees."""

    def __init__(self) -> None:
        self.closing, self.aborted = False, asyncio.Event()

    def get_extra_info(self, _name: str) -> None:
        """Nothing is known."""

    def is_closing(self) -> bool:
        """After close."""
        return self.closing

    def close(self) -> None:
        """Begin to."""
        self.closing = True

    def abort(self) -> None:
        """At once."""
        self.aborted.set()


@pytest.mark.parametrize("way", ["closed", "paused", "resumed", "idle"])
def test_a_connection_ends_though_the_client_reads_nothing(way: str) -> None:
    async def go() -> bool:
        import uvicorn
        from uvicorn.server import ServerState

        kind = bounded(ServiceSettings(write_seconds=0.05))
        wire = Wire()
        protocol = kind(uvicorn.Config(lambda: None, log_config=None), ServerState(), {})  # type: ignore[arg-type]
        protocol.connection_made(wire)  # type: ignore[arg-type]
        if way == "closed":
            wire.close()
        if way in ("paused", "resumed"):
            protocol.pause_writing()
        if way == "resumed":
            protocol.resume_writing()
        try:
            async with asyncio.timeout(10 if way in ("closed", "paused") else 0.3):
                await wire.aborted.wait()
        except TimeoutError:
            return False
        finally:
            protocol.connection_lost(None)
        return True

    assert asyncio.run(go()) is (way in ("closed", "paused"))


@pytest.mark.parametrize("late", [True, False])
def test_an_answer_that_has_begun_is_cut_off_without_a_fuss(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A client that takes too long is no fault of ours; an error is, and is told once."""
    sent: list[str] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if not late:
            raise RuntimeError("broken")
        await asyncio.sleep(10)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    guard = Guard(app, settings=ServiceSettings(deadline_seconds=0.05), metrics=ServiceMetrics())
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    asyncio.run(guard(scope, receive, send))
    assert sent == ["http.response.start"]
    assert len([record for record in caplog.records if record.exc_info]) == (0 if late else 1)


def test_one_whose_client_reads_nothing_yet_is_told_of_the_deadline() -> None:
    """What waits to begin has not begun: the answer is 503 when the client reads at last."""
    sent: list[int] = []
    reads = SimpleNamespace(now=False)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if not reads.now:
            reads.now = True
            await asyncio.sleep(10)
        sent.append(message.get("status", 0))

    metrics = ServiceMetrics()
    guard = Guard(app, settings=ServiceSettings(deadline_seconds=0.05), metrics=metrics)
    asyncio.run(guard({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send))
    assert sent == [503, 0]
    assert 'status="503"} 1' in metrics.text()
