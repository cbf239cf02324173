"""Uploads are decoded within limits, in processes that are killed when they hang."""

import asyncio
import io
import os
import pickle
import struct
import time
import zlib
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from vacsr.backbones.images import PhotoTransform
from vacsr.errors import EnvironmentProblem
from vacsr.serve import ServiceSettings
from vacsr.serve.decoding import Decoder, KillablePool, read_upload, resize_for_model
from vacsr.serve.schemas import Problem


def test_a_process_that_hangs_is_killed_and_one_that_dies_is_replaced() -> None:
    pool = KillablePool("test", 1, preload="vacsr.errors")
    assert pool.submit(len, b"abc", seconds=60).result(60) == 3
    with pytest.raises(EnvironmentProblem):
        pool.submit(os._exit, 3, seconds=60).result(60)
    with pytest.raises(TypeError):
        pool.submit(len, 3, seconds=60).result(60)
    with pytest.raises(TimeoutError):
        pool.submit(time.sleep, 600, seconds=0.5).result(60)
    assert pool.submit(len, b"abcd", seconds=60).result(60) == 4
    running, waiting = (pool.submit(time.sleep, 600, seconds=600) for _ in range(2))
    time.sleep(0.3)
    pool.close()
    with pytest.raises(EnvironmentProblem):
        running.result(10)
    with pytest.raises(CancelledError):
        waiting.result(10)


@pytest.mark.parametrize(
    ("error", "code"), [(TimeoutError(), "costly_image"), (EnvironmentProblem("it died"), "bad_image")]
)
def test_a_decoder_that_hangs_or_dies(error: Exception, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, seconds: float) -> Future[Image.Image]:
        future = Future[Image.Image]()
        future.set_exception(error)
        return future

    decoder = Decoder(ServiceSettings(), PhotoTransform(8))
    monkeypatch.setattr(decoder._processes, "submit", broken)
    with pytest.raises(Problem) as caught:
        asyncio.run(decoder.upload(b""))
    assert (caught.value.status, caught.value.code) == (422, code)


def test_a_problem_comes_back_whole_from_its_process() -> None:
    problem = Problem(413, "too_many_pixels", "make it smaller", {"retry-after": "1"})
    assert vars(pickle.loads(pickle.dumps(problem))) == vars(problem)


def _png() -> bytes:
    encoded = io.BytesIO()
    Image.radial_gradient("L").save(encoded, "PNG")
    return encoded.getvalue()


PNG, CHUNK = _png(), b"\0\0\0\0teXt" + struct.pack(">I", zlib.crc32(b"teXt"))
RLE_BMP = struct.pack("<2sIHHIIiiHHIIiiII", b"BM", 66, 0, 0, 54, 40, 2**25, 1, 1, 8, 1, 12, 0, 0, 0, 0)
COSTLY = {"a run-length encoded BMP": RLE_BMP + b"\1\1" * 2**22, "empty chunks": PNG[:33] + CHUNK * 500_000 + PNG[33:]}


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_a_client_little_costs_a_decoder_little(name: str) -> None:
    started = time.process_time()
    with pytest.raises(Problem, match="cannot be read") as caught:
        read_upload(COSTLY[name], PhotoTransform(8), 2**25)
    assert caught.value.status == 422
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "transform",
    [PhotoTransform(32), PhotoTransform(32, resize="center"), PhotoTransform(32, resize="center", short=40)],
)
@pytest.mark.parametrize("size", [(50, 70), (333, 64), (20, 20)])
def test_the_small_copy_looks_the_same_to_a_tower(transform: PhotoTransform, size: tuple[int, int]) -> None:
    noise = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    photo = Image.fromarray(noise.numpy())
    assert torch.equal(transform.pixels(resize_for_model(photo, transform)), transform.pixels(photo))


def test_a_photo_is_decoded_no_larger_than_it_is_shown(opened: Any, world: Any) -> None:
    """And where no memory is left for it, the client is asked to come back."""
    client: TestClient = opened(photo_side=16)
    sides: list[int] = []

    class Large:
        def open(self, row: int, *, side: int = 0) -> Image.Image:
            sides.append(side)
            if row:
                raise MemoryError
            return Image.new("RGB", (32, 32))

    names = world.photos.image_ids
    photos = client.app.state.service.watch.photos  # type: ignore[attr-defined]
    photos |= {name: (Large(), row) for row, name in enumerate(names[:2])}
    assert client.get(f"/photo/{names[0]}").status_code == 200
    answer = client.get(f"/photo/{names[1]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_memory")
    assert answer.headers["retry-after"] == "1"
    for name, status in ((names[0], 200), (names[1], 503)):
        assert client.post("/score", json={"texts": ["a"], "ids": [name]}).status_code == status
    assert sides == [16, 16, 0, 0], "the model sees all of a photo"
