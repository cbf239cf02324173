"""What the paths do, without HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from PIL import Image

from vacsr import __version__
from vacsr.data import PhotoSet
from vacsr.errors import DataError, UsageError, VacsrError
from vacsr.search.engine import Searcher
from vacsr.search.rerank import POLICIES
from vacsr.search.results import Results
from vacsr.search.service.batching import Batch, Batcher
from vacsr.search.service.images import PhotoShelf, as_seen, decode_upload, from_base64
from vacsr.search.service.metrics import Reading, ServiceMetrics
from vacsr.search.service.problems import Problem
from vacsr.search.service.schemas import ScoreRequest, check_k, check_text, search_answer
from vacsr.search.service.settings import ServiceSettings
from vacsr.search.service.upkeep import IndexWatch, stale_index
from vacsr.search.service.work import Job, Outcome, ScoreJob, ScoreTable, SearchJob, Worker, weight

log = logging.getLogger("vacsr.service")

T = TypeVar("T")
_DECODERS = 4  # threads at most, so as many images in full size in memory at once
_LOOK = 0.5  # seconds between two looks at the index, at least


class Service:
    """A searcher behind limits and a queue."""

    def __init__(
        self,
        searcher: Searcher,
        settings: ServiceSettings,
        *,
        photos: Sequence[PhotoSet] = (),
        find_photos: Callable[[], Sequence[PhotoSet]] | None = None,
    ) -> None:
        backbone = searcher.scorer.model.backbone
        if backbone.cached:
            message = "the model reads cached features, so it can embed neither words nor photos"
            raise UsageError(f"{message} — train one with towers: see docs/own-photos.md")
        self.searcher, self.settings, self.metrics = searcher, settings, ServiceMetrics()
        self.shelf, self._find_photos = self._shelved(photos), find_photos
        self._transform = backbone.transform
        self._decoders = ThreadPoolExecutor(min(os.cpu_count() or 1, _DECODERS), thread_name_prefix="decode")
        self.watch = IndexWatch(searcher, every=settings.refresh_seconds)
        self._looking: asyncio.Task[None] | None = None
        self.queue: Batcher[Job, Outcome] = Batcher(
            Worker(searcher, self.watch),
            size=settings.batch,
            wait=settings.batch_ms / 1000,
            room=settings.concurrency,
            weigh=weight,
            done=self._count,
        )

    def start(self) -> None:
        """Look after the index, also while nobody asks."""
        self._looking = asyncio.create_task(self._keep_looking())

    async def close(self) -> None:
        """Finish what has begun."""
        if self._looking is not None:
            self._looking.cancel()
        await self.queue.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)  # nobody waits for these images any more

    async def search_text(self, text: str, *, k: int, policy: str) -> dict[str, Any]:
        """Words to images, or to texts like them."""
        return await self._search(SearchJob(check_text(text, self.settings), check_k(k, self.settings), policy))

    async def search_image(self, data: bytes, *, k: int, policy: str) -> dict[str, Any]:
        """An image to texts, or to images like it."""
        check_k(k, self.settings)
        return await self._search(SearchJob(await self._decoded(data), k, policy))

    async def score(self, asked: ScoreRequest) -> dict[str, Any]:
        """Every text with every image."""
        limits, count = self.settings, len(asked.ids) + len(asked.images)
        if not asked.texts or not count:
            raise Problem(422, "nothing_to_score", "give texts, and images or ids")
        if count > limits.max_images or count * len(asked.texts) > limits.max_pairs:
            allowed = f"{limits.max_images} images, and {limits.max_pairs} pairs of texts and images"
            raise Problem(422, "too_many_pairs", f"one call may have {allowed}")
        texts = tuple(check_text(text, limits) for text in asked.texts)
        images = [await self._seen(partial(self._shown().image, name)) for name in asked.ids]
        images += [await self._decoded(from_base64(data)) for data in asked.images]
        found = await self._ask(ScoreJob(texts, tuple(images)))
        assert isinstance(found, ScoreTable), "a score job gives a table"
        return {"schema": 1, **found._asdict()}

    async def photo(self, identity: str) -> bytes:
        """A photo of the index, as JPEG."""
        return await self._threaded(partial(self._shown().jpeg, identity))

    def health(self) -> dict[str, str]:
        """Whether it can search."""
        if self.watch.foreign:
            raise stale_index()
        return {"status": "ok"}

    def info(self) -> dict[str, Any]:
        """What may be asked."""
        fitted, limits = self.searcher.fitted, self.settings
        return {
            "version": __version__,
            "direction": self.searcher.direction,
            "index_size": self.watch.size,
            "policies": list(POLICIES if fitted is not None else POLICIES[:1]),
            "photos": self.shelf is not None,
            "calibrated": fitted is not None,
            "risk": None if fitted is None else fitted.answer.risk,
            "confidence": None if fitted is None else fitted.answer.confidence,
            "gallery": None if fitted is None else fitted.gallery,
            "max_k": limits.max_k,
            "max_text": limits.max_text,
            "max_body": limits.max_body,
            "max_pixels": limits.max_pixels,
        }

    def metrics_text(self) -> str:
        """For Prometheus."""
        watch = self.watch
        return self.metrics.text(
            Reading("vacsr_queue_length", "Queries that wait for the model.", len(self.queue)),
            Reading("vacsr_index_vectors", "Vectors that a search can find.", watch.size),
            Reading("vacsr_index_stale", "1 while the index that lies there is not the one in use.", watch.behind),
            Reading("vacsr_index_reopened_total", "Indexes made anew that were opened.", watch.reopened, "counter"),
        )

    async def _keep_looking(self) -> None:
        """At the index, and at its photos once it has changed and then stayed so for a look."""
        shown = seen = self.watch.contents
        while True:
            await asyncio.sleep(max(self.settings.refresh_seconds, _LOOK))
            try:
                await self.queue.aside(self.watch.look)
                before, seen = seen, self.watch.contents
                if self._find_photos is not None and seen == before != shown:
                    shown = seen
                    self.shelf = await self._threaded(partial(self._found, self._find_photos))
            except (VacsrError, OSError) as error:
                log.warning("the photos stay as they were: %s", error)
            except Exception:  # a client of a server may raise anything; the next look may go well
                log.exception("the index could not be looked at")

    def _found(self, find: Callable[[], Sequence[PhotoSet]]) -> PhotoShelf | None:
        return self._shelved(find())

    def _shelved(self, photos: Sequence[PhotoSet]) -> PhotoShelf | None:
        return PhotoShelf(photos, self.searcher, side=self.settings.photo_side) if photos else None

    async def _search(self, job: SearchJob) -> dict[str, Any]:
        found = await self._ask(job)
        assert isinstance(found, Results), "a search job gives results"
        if not found.answered:
            self.metrics.unanswered.add()
        shelf = self.shelf if self.searcher.direction == "t2i" else None
        return search_answer(found, shown=lambda name: shelf is not None and shelf.has(name))

    async def _ask(self, job: Job) -> Outcome:
        """Through the queue. What the model refuses is the asker's to change."""
        try:
            return await self.queue.submit(job)
        except UsageError as error:
            raise Problem(422, "refused", str(error)) from error
        except DataError as error:
            if isinstance(job, SearchJob) and isinstance(job.query, str):
                raise
            raise Problem(422, "bad_image", "the image cannot be used") from error

    async def _decoded(self, data: bytes) -> Image.Image:
        return await self._seen(partial(decode_upload, data, max_pixels=self.settings.max_pixels))

    async def _seen(self, opened: Callable[[], Image.Image]) -> Image.Image:
        """As much of an image as the model sees."""
        return await self._threaded(lambda: as_seen(opened(), self._transform))

    async def _threaded(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, work)

    def _shown(self) -> PhotoShelf:
        if self.watch.foreign:
            raise stale_index()
        if self.shelf is None:
            raise Problem(404, "no_photos", "the service was started without photos")
        return self.shelf

    def _count(self, batch: Batch) -> None:
        self.metrics.batches.add(batch.size)
        self.metrics.work.add(batch.seconds)
