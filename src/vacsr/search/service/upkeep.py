"""An exact index that other processes change: what they add is found, and one made anew in its place is opened."""

from __future__ import annotations

import logging
import time

from vacsr.errors import VacsrError
from vacsr.search.engine import Searcher
from vacsr.search.exact import ExactIndex
from vacsr.search.service.problems import Problem, busy

log = logging.getLogger("vacsr.service")

_RETRY = 30  # seconds; until then somebody has to do something


def stale_index() -> Problem:
    """For whoever searches an index that is not the model's any more."""
    message = "the index was made anew with another model than the one that is served"
    action = "start the service again with that model, or fill the index with the model that is served"
    return Problem(503, "stale_index", f"stale index: {message} — {action}", headers={"retry-after": str(_RETRY)})


def empty_index() -> Problem:
    """For whoever searches while an index is made anew, or before it is filled."""
    message = "the index is empty — fill it: vacsr index add INDEX --run RUN --pairs SPEC"
    return busy(message, status=503, code="empty_index")


class IndexWatch:
    """Looks every few seconds. One thread looks, the one that searches; any may read what was found."""

    def __init__(self, searcher: Searcher, *, every: float) -> None:
        self._searcher, self._every = searcher, every
        self._next = time.monotonic() + every
        self._said = ""
        self.size = len(searcher.index)
        """As of the last look; asking the index may take a while, so others read it here."""
        self.sources = tuple(searcher.index.sources)
        """That it was filled from, as of the last look."""
        self.foreign = False
        """Another model's index lies there now: what was opened is gone, so nothing can be searched."""
        self.reopened = 0
        """Times that an index made anew, of the same model, was opened in the place of the old one."""

    @property
    def behind(self) -> bool:
        """Is what lies there not what answers?"""
        return bool(self._said)

    @property
    def contents(self) -> tuple[object, ...]:
        """Equal at two times where nothing says that other items are held."""
        return self.sources, self.size, self.reopened

    def look(self) -> None:
        """See what other processes have changed, if it is time. An index that cannot be read stays as it was."""
        index = self._searcher.index
        try:
            if not isinstance(index, ExactIndex):
                self._note(len(index))
                self._said = ""
            elif time.monotonic() >= self._next:
                self._next = time.monotonic() + self._every
                self._read_again(index)
        except (VacsrError, OSError) as error:
            self._say(f"the index could not be read again: {error}")

    def _read_again(self, index: ExactIndex) -> None:
        try:
            index.refresh()
        except (VacsrError, OSError):
            self._open_new(index)
        self.foreign, self._said = False, ""
        self._note(len(self._searcher.index))

    def _note(self, size: int) -> None:
        """Sources are asked for where the size has changed: a server is asked before every batch."""
        if size != self.size or isinstance(self._searcher.index, ExactIndex):
            self.sources = tuple(self._searcher.index.sources)
        self.size = size

    def _open_new(self, old: ExactIndex) -> None:
        """Raises where there is none, or where it is another model's."""
        new = ExactIndex(old.folder, patience=old.patience)
        try:
            self._searcher.use(new)
        except VacsrError:
            new.close()
            self.foreign = True
            raise
        old.close()
        self.reopened += 1
        log.warning("the index was made anew by the same model; the new one is served")

    def _say(self, words: str) -> None:
        """Once, not every few seconds."""
        if words != self._said:
            log.warning(words)
        self._said = words
