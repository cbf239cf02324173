"""Away from a terminal only lines that stay are written, to stderr; asked to be silent, nothing is."""

from __future__ import annotations

import pytest

from vacsr.demo.display import DemoProgress
from vacsr.demo.training import Progress
from vacsr.progress import Bars, PhotoProgress


@pytest.mark.parametrize("show", [True, False])
def test_lines_are_written_as_they_are(capfd: pytest.CaptureFixture[str], show: bool) -> None:
    with Bars(show=show) as progress:
        progress.say("vacsr: epoch 1/3, [bold] as it is")
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ("vacsr: epoch 1/3, [bold] as it is\n" if show else "")


def test_photos_are_counted_silently(capfd: pytest.CaptureFixture[str]) -> None:
    with PhotoProgress("photos", show=True) as progress:
        progress(1, 2)
        progress.named("captions")(2, 2)
    assert capfd.readouterr() == ("", "")


def test_the_demo_says_a_line_an_epoch(capfd: pytest.CaptureFixture[str]) -> None:
    with DemoProgress(["a"]) as progress:
        progress.listen("a", Progress(step=5, steps=20, epoch=1, epochs=4))
        progress.listen("a", Progress(step=5, steps=20, epoch=1, epochs=4, dev_rsum=101.25, rate=2.0))
    assert capfd.readouterr().err == "a: epoch 1/4, dev RSUM 101.2, 2.0 steps/s\n"
