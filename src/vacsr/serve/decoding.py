"""Images that requests bring or name: uploads are decoded within limits, in processes that can be killed."""

import asyncio
import base64
import binascii
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple, TypeVar

from PIL import Image

from vacsr.backbones.images import PhotoTransform
from vacsr.data.decode import TooManyPixels, decode_photo
from vacsr.errors import DataError, EnvironmentProblem
from vacsr.serve.schemas import Problem, ServiceSettings

T = TypeVar("T")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF")  # of uploads: fewer than a person's own files may have
_WORKERS = 4  # at most, so as many images in full size in memory at once
_MAX_RESIZED = 2**24  # pixels of a long, narrow image at the size from which the centre is cut


class Decoder:
    """Decodes uploads in processes, and runs in threads what reads the photos of the index."""

    def __init__(self, settings: ServiceSettings, transform: PhotoTransform) -> None:
        self._settings, self._transform, workers = settings, transform, min(os.cpu_count() or 1, _WORKERS)
        self._processes = KillablePool("decoder", workers, preload=__name__)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="vacsr-photos")

    async def upload(self, data: bytes) -> Image.Image:
        """As :func:`read_upload`, in a process that is killed when its time is over."""
        limits = self._settings
        arguments = data, self._transform, limits.max_pixels
        try:
            future = self._processes.submit(read_upload, *arguments, seconds=limits.decode_seconds)
            return await asyncio.wrap_future(future)
        except TimeoutError as error:
            message = f"the image takes more than {limits.decode_seconds:g} seconds to decode"
            raise Problem(422, "costly_image", f"{message} — save it as a plain JPEG") from error
        except EnvironmentProblem as error:  # the decoder crashed
            raise _unreadable() from error

    async def photo(self, read: Callable[[], Image.Image]) -> Image.Image:
        """What the model sees of a photo that is read in a thread."""
        return await self.in_thread(lambda: resize_for_model(read(), self._transform))

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Kill the processes; what has not begun in a thread never will."""
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Worker(NamedTuple):
    """A process and this side of the pipe to it."""

    process: BaseProcess
    channel: Connection


class KillablePool:
    """Runs functions in a few processes, started when needed. One that is over its time is killed, as no thread can be.

    ``preload``: the module of the functions, which one process imports and then forks, so that workers start at once.
    """

    def __init__(self, name: str, workers: int, *, preload: str) -> None:
        self._name, self._closed = name, False
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload])
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"vacsr-{name}")  # each waits for one process
        self._workers, self._idle = set[_Worker](), list[_Worker]()

    def submit(self, function: Callable[..., T], *arguments: object, seconds: float) -> Future[T]:
        """The result of ``function(*arguments)``. TimeoutError: it was killed. EnvironmentProblem: its process died."""
        return self._threads.submit(self._run, function, arguments, seconds)

    def close(self) -> None:
        self._closed = True
        for worker in list(self._workers):
            worker.process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), name=self._name, daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is the parent's
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()  # the worker holds the other end: however it ends, this end then reads an end of file
        worker = _Worker(process, here)
        self._workers.add(worker)
        return worker

    def _run(self, function: Callable[..., T], arguments: tuple[object, ...], seconds: float) -> T:
        worker = self._idle.pop() if self._idle else self._start()
        try:
            worker.channel.send((function, arguments))
            if not worker.channel.poll(0 if self._closed else seconds):
                raise TimeoutError(f"{self._name}: killed after {seconds:g} seconds")
            outcome = worker.channel.recv()
        except (EOFError, OSError) as error:
            worker.process.kill()
            worker.channel.close()
            self._workers.discard(worker)
            if isinstance(error, TimeoutError):
                raise
            message = f"{self._name}: its worker process died, perhaps out of memory"
            raise EnvironmentProblem(f"{message} — close other programs and try again") from error
        self._idle.append(worker)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]


def _serve(channel: Connection) -> None:
    """Run functions until killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to all; the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        function, arguments = channel.recv()
        outcome: object
        try:
            outcome = function(*arguments)
        except Exception as error:
            outcome = error
        channel.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this runs in a worker"
    parent.join()
    os._exit(1)


def read_upload(data: bytes, transform: PhotoTransform, max_pixels: int) -> Image.Image:
    """As much of an encoded image as the model sees, or a :class:`Problem`."""
    try:
        photo = decode_photo(data, name="the image", formats=FORMATS, max_pixels=max_pixels)
    except TooManyPixels as error:
        allowed = f"an image may have at most {max_pixels:,} pixels — make it smaller"
        raise Problem(413, "too_many_pixels", allowed) from error
    except (DataError, MemoryError) as error:
        raise _unreadable() from error
    return resize_for_model(photo, transform)


def _unreadable() -> Problem:
    return Problem(422, "bad_image", f"the image cannot be read; supported formats: {', '.join(FORMATS)}")


def resize_for_model(photo: Image.Image, transform: PhotoTransform) -> Image.Image:
    """A small copy of which a tower sees the same pixels: what waits for the model takes little memory.

    The square itself, which a transform leaves as it is; or, where it cuts the centre from a larger one, the whole at
    the size from which it is cut.
    """
    try:
        short = transform.shorter_side()
        if transform.resize == "whole" or short == transform.size:
            return Image.fromarray(transform.pixels(photo).permute(1, 2, 0).numpy())
        width, height = photo.size
        scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
        if scaled[0] * scaled[1] > _MAX_RESIZED:
            raise DataError("too long and narrow")
        return photo.resize(scaled, Image.Resampling[transform.resample.upper()])
    except (DataError, ArithmeticError, MemoryError, ValueError) as error:
        raise Problem(422, "bad_image", "the image has a shape that cannot be used") from error


def from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Problem(422, "bad_base64", "images in JSON must be base64 without line breaks") from error
