"""A first signal is a wish, a second one an order, but for a worker that is told of one wish twice."""

from __future__ import annotations

import multiprocessing
import signal

import pytest

from vacsr.train.callbacks import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_stops_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        signal.raise_signal(number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_worker_that_is_told_twice_still_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
