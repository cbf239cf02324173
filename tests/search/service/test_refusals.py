"""Whatever is sent, the answer is clean: a status in the 400s, JSON in one form, nothing of our insides."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

Opened = Callable[..., TestClient]
Picture = Callable[..., bytes]
JSON = {"content-type": "application/json"}


def refused(answer: Any, status: int, code: str | None = None) -> bool:
    """One form for all."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    said = answer.json()
    assert set(said) == {"error"}
    assert set(said["error"]) == {"code", "message"}
    assert code is None or said["error"]["code"] == code
    for word in ("Traceback", ".py", "site-packages", "vacsr.errors", "/tmp", "/home", "/work"):
        assert word not in answer.text
    return True


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"nothing", 400),
        (b"\xff\xfe\x00", 400),
        (b'{"text": "\xff"}', 400),
        (b'{"text": "a", "k": ' + b"9" * 5000 + b"}", (400, 422)),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b"null", 422),
        (b"[]", 422),
        (b"{}", 422),
        (b'"text"', 422),
        (b'{"text": null}', 422),
        (b'{"text": 3}', 422),
        (b'{"text": ["a"]}', 422),
        (b'{"text": ""}', 422),
        (b'{"text": " \\n\\t"}', 422),
        (b'{"text": "a", "image": "AAAA"}', 422),
        (b'{"text": "a", "extra": 1}', 422),
        (b'{"text": "a", "k": 0}', 422),
        (b'{"text": "a", "k": -1}', 422),
        (b'{"text": "a", "k": 101}', 422),
        (b'{"text": "a", "k": 1e400}', 422),
        (b'{"text": "a", "k": NaN}', 422),
        (b'{"text": "a", "k": Infinity}', 422),
        (b'{"text": "a", "k": -Infinity}', 422),
        (b'{"text": "a", "k": 2.5}', 422),
        (b'{"text": "a", "k": "5"}', 422),
        (b'{"text": "a", "k": true}', 422),
        (b'{"text": "a", "k": 99999999999999999999}', 422),
        (b'{"text": "a", "policy": "best"}', 422),
        (b'{"text": "a", "policy": ["score"]}', 422),
        (b'{"text": "\\ud800"}', (400, 422)),
        (b'{"text": "' + b"a" * 1001 + b'"}', 422),
    ],
)
def test_bodies_that_are_no_query(client: TestClient, body: bytes, status: int | tuple[int, ...]) -> None:
    answer = client.post("/search", content=body, headers=JSON)
    assert answer.status_code in (status if isinstance(status, tuple) else (status,)), answer.text
    assert refused(answer, answer.status_code)


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", "\u202e", "e\u0301" * 400, "\N{DOG}" * 1000, "𝔘" * 999, "🏳️‍🌈", "a" * 1000]
)
def test_odd_words_are_words(client: TestClient, text: str) -> None:
    assert client.post("/search", json={"text": text}).status_code == 200


@pytest.mark.parametrize("query", ["k=0", "k=-1", "k=101", "k=nan", "k=inf", "k=", "k=1e9", "policy=x", "policy="])
def test_bad_parameters(image_client: TestClient, picture: Picture, query: str) -> None:
    answer = image_client.post(f"/search?{query}", content=picture(), headers={"content-type": "image/png"})
    assert refused(answer, 422)


@pytest.mark.parametrize(
    "kind", ["text/plain", "multipart/form-data; boundary=x", "image/svg+xml", "application/xml", "", "é"]
)
def test_wrong_types(client: TestClient, kind: str) -> None:
    for path in ("/search", "/score"):
        headers = {"content-type": kind.encode("latin-1")}
        assert refused(client.post(path, content=b'{"text": "a"}', headers=headers), 415, "wrong_type")


def _png(width: int, height: int, data: bytes) -> bytes:
    """A PNG of any size with any pixels, however few bytes these take."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _gif(width: int, height: int) -> bytes:
    """A GIF that says it is larger than it is."""
    kept = io.BytesIO()
    Image.new("P", (8, 8)).save(kept, "GIF")
    return kept.getvalue()[:6] + struct.pack("<HH", width, height) + kept.getvalue()[10:]


def _broken(good: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "words", b"this is no image"
    yield "cut", good[: len(good) // 2]
    yield "header only", good[:20]
    yield "zeros", bytes(1000)
    yield "no pixels", _png(0, 0, zlib.compress(b""))
    yield "no data", _png(10, 10, b"")
    yield "wrong data", _png(10, 10, b"\xff" * 40)
    yield "svg", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    yield "eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "tiff", b"II*\0" + bytes(100)
    yield "gif", b"GIF89a" + bytes(3)
    yield "webp", b"RIFF\x20\0\0\0WEBPVP8 " + bytes(20)
    yield "jpeg", b"\xff\xd8\xff\xe0" + bytes(30)


def test_broken_images(image_client: TestClient, picture: Picture) -> None:
    for name, data in _broken(picture()):
        for kind in ("image/png", "image/jpeg"):
            answer = image_client.post("/search", content=data, headers={"content-type": kind})
            assert refused(answer, 422, "bad_image"), name
        answer = image_client.post("/search", json={"image": base64.b64encode(data).decode()})
        assert refused(answer, 422, "bad_image"), name


@pytest.mark.parametrize("text", ["!", "AAA", "AA==\n", "data:image/png;base64,AAAA", "ü", "A" * 5])
def test_no_base64(image_client: TestClient, text: str) -> None:
    assert refused(image_client.post("/search", json={"image": text}), 422)


@pytest.mark.parametrize(
    "data",
    [
        _png(101, 100, zlib.compress(bytes(101 * 303))),
        _png(20_000, 20_000, zlib.compress(bytes(10_000_000), 9)),
        _png(2**31 - 1, 2**31 - 1, b""),
        _gif(65535, 65535),
        b"BM"
        + struct.pack("<IHHI", 1000, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0),
    ],
    ids=["one row over", "400 million zeros", "2^62", "gif", "bmp"],
)
def test_decompression_bombs_are_not_unfolded(
    image_client: TestClient, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfold(*_args: object, **_named: object) -> None:
        raise AssertionError("the image was decoded")

    monkeypatch.setattr("vacsr.search.service.images.decode_photo", unfold)
    answer = image_client.post("/search", content=data, headers={"content-type": "image/png"})
    assert refused(answer, 413, "too_many_pixels")


@pytest.mark.filterwarnings("error")
def test_pillows_own_warning_is_a_refusal_too(opened: Opened, world: Any) -> None:
    client = opened(world.texts, max_pixels=10**9)
    data = _png(10_000, 10_000, b"")
    answer = client.post("/search", content=data, headers={"content-type": "image/png"})
    assert refused(answer, 413, "too_many_pixels")


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1), (1, 1), (100, 100)])
def test_odd_shapes_are_answered(image_client: TestClient, picture: Picture, size: tuple[int, int]) -> None:
    answer = image_client.post("/search", content=picture(*size), headers={"content-type": "image/png"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_images_of_any_mode(image_client: TestClient, mode: str) -> None:
    kept = io.BytesIO()
    Image.new(mode, (20, 20)).save(kept, "PNG")
    answer = image_client.post("/search", content=kept.getvalue(), headers={"content-type": "image/png"})
    assert answer.status_code == 200


def test_large_bodies_with_and_without_their_length(opened: Opened) -> None:
    client = opened(max_body=2000)
    fitting = json.dumps({"text": "a"}).ljust(2000).encode()
    assert client.post("/search", content=fitting, headers=JSON).status_code == 200

    def parts(total: int) -> Iterator[bytes]:
        for _ in range(total // 500):
            yield b" " * 500

    assert refused(client.post("/search", content=fitting + b" ", headers=JSON), 413, "body_too_large")
    assert refused(client.post("/search", content=parts(1_000_000), headers=JSON), 413, "body_too_large")
    for path in ("/healthz", "/info", "/metrics", "/"):
        answer = client.request("GET", path, content=b"x")
        assert refused(answer, 413, "body_too_large")
        assert "has no body" in answer.json()["error"]["message"]
        assert client.request("GET", path, headers={"content-length": "0"}).status_code == 200
    for length in ("99999999999999999999999999", "9" * 5000):
        assert refused(client.post("/search", content=b"{}", headers={**JSON, "content-length": length}), 413)
    for length in ("-1", "x", "1.5", "²"):
        headers = {**JSON, "content-length": length.encode("latin-1")}
        assert refused(client.post("/search", content=b"{}", headers=headers), 400)


@pytest.mark.parametrize("path", ["/search", "/score"])
def test_wrong_methods(client: TestClient, path: str) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "ODD"):
        answer = client.request(method, path)
        assert refused(answer, 405)
        assert "POST" in answer.headers["allow"]


TOKEN = "s3cret-token"


@pytest.mark.parametrize(
    "sent",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic s3cret-token",
        "s3cret-token",
        f"Bearer {TOKEN}x",
        "Bearer é",
    ],
)
def test_without_the_token_nothing_is_told(opened: Opened, sent: str | None) -> None:
    client = opened(token=TOKEN)
    headers = {} if sent is None else {"authorization": sent.encode("latin-1")}
    for method, path in (
        ("POST", "/search"),
        ("POST", "/score"),
        ("GET", "/info"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/photo/x"),
        ("GET", "/nothing"),
    ):
        answer = client.request(method, path, headers=headers)
        assert refused(answer, 401, "no_token")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/healthz", headers=headers).status_code == 200


def test_with_the_token(opened: Opened) -> None:
    client = opened(token=TOKEN)
    for scheme in ("Bearer", "bearer"):
        answer = client.post("/search", json={"text": "a"}, headers={"authorization": f"{scheme} {TOKEN}"})
        assert answer.status_code == 200
        assert TOKEN not in answer.text


def test_other_names_are_refused(opened: Opened) -> None:
    client = opened(hosts=("LocalHost", "127.0.0.1", "::1"))
    for host in ("localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:9"):
        assert client.get("/healthz", headers={"host": host}).status_code == 200
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "",
        "[",
        "localhost@evil.example",
    ):
        assert refused(client.get("/healthz", headers={"host": host}), 421, "wrong_host")


def test_a_fault_of_ours_is_not_shown(opened: Opened, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = opened()

    def fail(*_args: object, **_named: object) -> None:
        raise RuntimeError("a secret at /home/someone/file.py")

    monkeypatch.setattr(type(world.searcher), "search_texts", fail)
    answer = client.post("/search", json={"text": "a"})
    assert refused(answer, 500, "internal")
    assert "secret" not in answer.text
    monkeypatch.undo()
    assert client.post("/search", json={"text": "a"}).status_code == 200
