"""The index while it is served: what other processes change in it, and the photos of its items."""

import asyncio
import io
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from PIL import Image
from prometheus_client import Counter

from vacsr.data import PhotoSet, load_images
from vacsr.data.photos import Photos
from vacsr.errors import DataError, VacsrError
from vacsr.search.index import open_index
from vacsr.search.local import ExactIndex
from vacsr.search.searcher import Searcher
from vacsr.serve.schemas import Problem, busy, stale_index

log = logging.getLogger("vacsr.serve")

_LOOK = 0.05  # seconds between two looks, at least
FindPhotos = Callable[[], Sequence[PhotoSet]]
Between = Callable[[Callable[[], Any]], Awaitable[Any]]  # runs something in a certain thread
PhotosById = dict[str, tuple[Photos, int]]
"""Where the photo of an id is. They are found at the start, and a request only picks one."""


def find_photos(searcher: Searcher, specs: Sequence[str], *, report: Callable[[str], None]) -> list[PhotoSet]:
    """The photos of these SPECs; without any, those that an index of images was filled from and that can be read."""
    if specs:
        named = [_load(spec) for spec in specs]
        report(f"hits show photos of {', '.join(specs)}")
        return named
    photos: list[PhotoSet] = []
    if searcher.direction != "t2i":
        return photos
    for spec in searcher.index.sources:
        try:
            photos.append(_load(spec))
        except (VacsrError, OSError) as error:
            report(f"warning: hits show no photos of {spec}: {error}")
        else:
            report(f"hits show photos of {spec}, from which the index was filled; --no-photos hides them")
    if not searcher.index.sources:
        report("hits show no photos: the index does not say where they are — name them: --photos SPEC")
    return photos


def _load(spec: str) -> PhotoSet:
    photos = load_images(spec, split="all", on_error="skip")
    if not isinstance(photos, PhotoSet):
        raise DataError(f"{spec} holds cached features and no photos — give photos: --photos DIR")
    return photos


class IndexWatch:
    """``look`` runs in the thread that searches, ``update_photos`` in any. All threads may read the attributes."""

    def __init__(self, searcher: Searcher, find: FindPhotos | None = None) -> None:
        self._searcher, self._find, self._trouble = searcher, find, ""
        self.size, self.sources = len(searcher.index), tuple(searcher.index.sources)
        """At the last look: asking an index on a server takes a while."""
        self.foreign = False
        """The index was rebuilt with another model, so nothing can be searched."""
        self.photos: PhotosById | None = None
        self.reopened = Counter("vacsr_index_reopened_total", "Rebuilt indexes that were opened.", registry=None)
        self._seen = self._shown = self._contents()
        self.update_photos()

    @property
    def stale(self) -> bool:
        """Does the index in use differ from the one on the disk?"""
        return bool(self._trouble)

    def look(self) -> bool:
        """Refresh the index and its calibration; what cannot be read stays as it was.

        Whether photos should be looked for again: the index has changed, and has then stayed so for a look.
        """
        try:
            if isinstance(self._searcher.index, ExactIndex):
                self._refresh(self._searcher.index)
            index = self._searcher.index
            self.size, self.sources = len(index), tuple(index.sources)
            self._searcher.refresh_calibration()
            self._trouble = ""
        except (VacsrError, OSError) as error:
            trouble = f"the index or its calibration could not be read again: {error}"
            if trouble != self._trouble:  # once, not every few seconds
                log.warning(trouble)
            self._trouble = trouble
        before, self._seen = self._seen, self._contents()
        return self._find is not None and self._seen == before != self._shown

    async def keep_looking(self, *, every: float, between: Between, in_thread: Between) -> None:
        """Look ``every`` so many seconds, also while nobody asks; photos are found in a thread of their own."""
        while True:
            await asyncio.sleep(max(every, _LOOK))
            try:
                if await between(self.look):
                    await in_thread(self.update_photos)
            except (VacsrError, OSError) as error:
                log.warning("the photos stay as they were: %s", error)
            except Exception:  # a client of a server may raise anything; the next look may go well
                log.exception("the index could not be checked")

    def _contents(self) -> tuple[object, ...]:
        """Equal at two times where nothing says that the index holds other items."""
        return self.sources, self.size, self._searcher.index

    def _refresh(self, index: ExactIndex) -> None:
        try:
            index.refresh()
        except (VacsrError, OSError):
            rebuilt = open_index(f"{index.kind}:{index.where}")
            try:
                self._searcher.use(rebuilt)
            except VacsrError:
                rebuilt.close()
                self.foreign = True
                raise
            index.close()
            self.reopened.inc()
            log.warning("the index was rebuilt with the same model; the new one is served")
        self.foreign = False

    def update_photos(self) -> None:
        """Find the photos of the index as it is now; where that fails, those of before stay."""
        self._shown = self._seen
        photos: PhotosById = {}
        for one in () if self._find is None else self._find():
            photos = one.by_id() | photos  # of two with one id, the first
        self.photos = photos or None

    def open_photo(self, name: str, *, side: int = 0) -> Image.Image:
        """The photo of an id that the index holds; ``side``: so many pixels of it are enough, 0 for all."""
        if self.foreign:
            raise stale_index()
        if self.photos is None:
            raise Problem(404, "no_photos", "the service was started without photos")
        if name not in self.photos or not self._searcher.index.known([name])[0]:
            raise Problem(404, "no_such_id", "the index has no photo with this id")
        photos, row = self.photos[name]
        try:
            return photos.open(row, side=side)
        except DataError as error:
            raise Problem(404, "photo_unreadable", "the photo with this id cannot be read") from error
        except MemoryError as error:
            raise busy("not enough memory for this photo", status=503, code="no_memory") from error

    def jpeg(self, name: str, side: int) -> bytes:
        """Small enough to show; encoded again, so without the place and camera that a photo's file may name."""
        image = self.open_photo(name, side=side)
        image.thumbnail((side, side))
        image.info = {}  # Pillow would write some of it again
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=85)
        return encoded.getvalue()
