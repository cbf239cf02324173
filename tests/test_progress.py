"""Away from a terminal only lines that stay are written, to stderr; asked to be silent, nothing is."""

import pytest

from vacsr.progress import Bars, PhotoProgress


@pytest.mark.parametrize("show", [True, False])
def test_lines_are_written_as_they_are(capfd: pytest.CaptureFixture[str], show: bool) -> None:
    with Bars(show=show) as progress:
        progress.say("vacsr: epoch 1/3, [bold] as it is")
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ("vacsr: epoch 1/3, [bold] as it is\n" if show else "")


def test_without_a_bar_each_step_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with Bars() as progress:
        start = progress.steps("demo", total=2)
        start("drawing")
        start("training")
    assert capfd.readouterr() == ("", "demo: step 1 of 2, drawing\ndemo: step 2 of 2, training\n")


def test_photos_are_counted_silently(capfd: pytest.CaptureFixture[str]) -> None:
    with PhotoProgress("photos", show=True) as progress:
        progress(1, 2)
        progress.named("captions")(2, 2)
    assert capfd.readouterr() == ("", "")
