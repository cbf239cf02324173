"""A pool of processes: one that hangs is killed, one that dies is replaced."""

from __future__ import annotations

import os
import time
from concurrent.futures import CancelledError

import pytest

from vacsr.errors import EnvironmentProblem
from vacsr.processes import KillablePool


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
