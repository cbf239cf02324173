"""Whatever is sent, the answer is clean: a status in the 400s, JSON in one form, nothing of our insides."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from starlette.testclient import TestClient

from vacsr.serve.schemas import ScoreRequest

Opened = Callable[..., TestClient]
Picture = Callable[..., bytes]
JSON = {"content-type": "application/json"}


def refused(answer: Any, status: int, code: str | None = None) -> bool:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    said = answer.json()
    assert set(said) == {"error"}
    assert set(said["error"]) == {"code", "message"}
    assert code is None or said["error"]["code"] == code
    for word in ("Traceback", ".py", "site-packages", "vacsr.errors", "/tmp", "/home", "/work"):
        assert word not in answer.text
    return True


NOT_JSON = [
    b"", b"{", b"nothing", b"\xff\xfe\x00", b'{"text": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000,
]  # fmt: skip
NO_QUERY = [
    b"null", b"[]", b"{}", b'"text"', b'{"text": null}', b'{"text": 3}', b'{"text": ["a"]}', b'{"text": ""}',
    b'{"text": " \\n\\t"}', b'{"text": "a", "image": "AAAA"}', b'{"text": "a", "extra": 1}',
    b'{"text": "a", "policy": "best"}', b'{"text": "a", "policy": ["score"]}', b'{"text": "' + b"a" * 1001 + b'"}',
    *(b'{"text": "a", "min_grade": %s}' % grade for grade in (b"-0.1", b"1.1", b"NaN", b'"0.5"', b"null", b"true")),
    *(b'{"text": "a", "k": %s}' % k for k in (
        b"0", b"-1", b"101", b"1e400", b"NaN", b"Infinity", b"-Infinity", b"2.5", b'"5"', b"true", b"9" * 20,
    )),
]  # fmt: skip
EITHER = [b'{"text": "a", "k": ' + b"9" * 5000 + b"}", b'{"text": "\\ud800"}']


@pytest.mark.parametrize(
    ("body", "statuses"),
    [*((body, {400}) for body in NOT_JSON), *((body, {422}) for body in NO_QUERY), *((b, {400, 422}) for b in EITHER)],
)
def test_bodies_that_are_no_query(client: TestClient, body: bytes, statuses: set[int]) -> None:
    answer = client.post("/search", content=body, headers=JSON)
    assert answer.status_code in statuses, answer.text
    assert refused(answer, answer.status_code)


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", "\u202e", "e\u0301" * 400, "\N{DOG}" * 1000, "𝔘" * 999, "🏳️‍🌈", "a" * 1000]
)
def test_odd_words_are_words(client: TestClient, text: str) -> None:
    assert client.post("/search", json={"text": text}).status_code == 200


BAD = [f"k={k}" for k in ("0", "-1", "101", "nan", "inf", "", "1e9")] + ["policy=x", "policy="]
BAD += [f"min_grade={grade}" for grade in ("-0.1", "1.1", "nan", "")]


@pytest.mark.parametrize("query", BAD)
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


BROKEN = [
    b"", b"this is no image", bytes(1000), _png(0, 0, zlib.compress(b"")), _png(9, 9, b""), _png(9, 9, b"\xff" * 40),
    b"<svg xmlns='http://www.w3.org/2000/svg' width='9'/>", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    b"II*\0" + bytes(100), b"GIF89a" + bytes(3), b"RIFF\x20\0\0\0WEBPVP8 " + bytes(20), b"\xff\xd8\xff\xe0" + bytes(30),
]  # fmt: skip


def test_broken_images(image_client: TestClient, picture: Picture) -> None:
    good = picture()
    for data in (*BROKEN, good[: len(good) // 2], good[:20]):
        for kind in ("image/png", "image/jpeg"):
            answer = image_client.post("/search", content=data, headers={"content-type": kind})
            assert refused(answer, 422, "bad_image"), data
        answer = image_client.post("/search", json={"image": base64.b64encode(data).decode()})
        assert refused(answer, 422, "bad_image"), data


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
        struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 1000, 0, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0),
    ],
    ids=["one row over", "400 million zeros", "2^62", "gif", "bmp"],
)
def test_decompression_bombs_are_not_decoded(image_client: TestClient, data: bytes) -> None:
    answer = image_client.post("/search", content=data, headers={"content-type": "image/png"})
    assert refused(answer, 413, "too_many_pixels")


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1), (1, 1), (100, 100)])
def test_odd_shapes_are_answered(image_client: TestClient, picture: Picture, size: tuple[int, int]) -> None:
    answer = image_client.post("/search", content=picture(*size), headers={"content-type": "image/png"})
    assert answer.status_code == 200, answer.text


def test_large_bodies_with_and_without_their_length(opened: Opened) -> None:
    client = opened(max_body=2000)
    fitting = json.dumps({"text": "a"}).ljust(2000).encode()
    assert client.post("/search", content=fitting, headers=JSON).status_code == 200
    for body in (fitting + b" ", iter([b" " * 500] * 2000)):
        assert refused(client.post("/search", content=body, headers=JSON), 413, "body_too_large")
    for path in ("/healthz", "/info", "/metrics", "/"):
        answer = client.request("GET", path, content=b"x")
        assert refused(answer, 413, "body_too_large")
        assert "has no body" in answer.json()["error"]["message"]
        assert client.request("GET", path, headers={"content-length": "0"}).status_code == 200
    for length in ("99999999999999999999999999", "9" * 5000):
        assert refused(client.post("/search", content=b"{}", headers={**JSON, "content-length": length}), 413)


@pytest.mark.parametrize("path", ["/search", "/score"])
def test_wrong_methods(client: TestClient, path: str) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "ODD"):
        answer = client.request(method, path)
        assert refused(answer, 405)
        assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize("field", ["texts", "ids", "images"])
def test_one_error_is_made_of_a_list_in_which_all_is_wrong(client: TestClient, field: str) -> None:
    answer = client.post("/score", json={"texts": ["a"], field: [0] * 1000})
    assert refused(answer, 422, "bad_field")
    assert answer.json()["error"]["message"].startswith(f"{field}.0: ")
    with pytest.raises(ValidationError) as caught:
        ScoreRequest.model_validate({"texts": ["a"], field: [0] * 1000})
    assert caught.value.error_count() == 1


def test_unknown_fields_are_one_error_however_many(client: TestClient) -> None:
    for path, known in (("/search", "text, image, k, policy"), ("/score", "texts, ids, images")):
        answer = client.post(path, json={f"field{number}": 0 for number in range(1000)})
        assert refused(answer, 422, "bad_field")
        assert known in answer.json()["error"]["message"]
        assert "field0" not in answer.text


TOKEN = "s3cret-token"


@pytest.mark.parametrize(
    "sent", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic s3cret-token", TOKEN, f"Bearer {TOKEN}x", "Bearer é"]
)
def test_without_the_token_nothing_is_told(opened: Opened, sent: str | None) -> None:
    client = opened(token=TOKEN)
    headers = {} if sent is None else {"authorization": sent.encode("latin-1")}
    for path in ("/search", "/score", "/info", "/metrics", "/openapi.json", "/photo/x", "/nothing"):
        answer = client.request("POST" if path in ("/search", "/score") else "GET", path, headers=headers)
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
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", "[", "localhost@evil.ex"):
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
