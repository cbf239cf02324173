"""`vacsr serve`: clear refusals, and a whole run as a process that a signal ends."""

from __future__ import annotations

import builtins
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.search import open_index

Command = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Instead of running a server, keep what it would have run with."""
    kept: list[Any] = []
    monkeypatch.setattr(
        "vacsr.search.service.server.run_server", lambda app, _socket, limits: kept.append((app, limits))
    )
    return kept


def test_it_starts_on_loopback_with_the_settings_given(vacsr: Command, world: Any, run: list[Any]) -> None:
    answer = vacsr("serve", world.model, "--index", world.index, "--port", 0, "--device", "cpu", "--set", "max_k=7")
    assert (answer.code, bool(re.fullmatch(r"http://127\.0\.0\.1:\d+\n", answer.out))) == (0, True)
    assert f"{len(world.searcher.index)} in the index" in answer.err
    assert "warning" not in answer.err
    _, limits = run[0]
    assert (limits.max_k, limits.token) == (7, None)
    assert "127.0.0.1" in limits.hosts


def test_photos_are_those_that_the_index_was_filled_from(
    vacsr: Command, world: Any, run: list[Any], tmp_path: Path
) -> None:
    def serve(index: str, *more: object) -> Any:
        answer = vacsr("serve", world.model, "--index", index, "--port", 0, "--device", "cpu", *more)
        assert answer.code == 0, answer.err
        return answer.err

    def shown() -> bool:
        return run[-1][0].state.service.shelf is not None

    said = serve(world.index)
    assert "hits show photos of scenes:images=24" in said
    assert "--no-photos" in said
    assert shown()
    assert "photos" not in serve(world.index, "--no-photos")
    assert not shown()
    assert "hits show photos of scenes:images=3" in serve(world.index, "--photos", "scenes:images=3,size=32")
    assert shown()
    own = f"exact:{tmp_path / 'own'}"
    made = open_index(own, dim=8, create=True)
    made.add(["a"], torch.eye(8)[:1])
    assert "hits show no photos" in serve(own)
    assert not shown()
    made.note_source(f"folder:{tmp_path / 'gone'}")
    said = serve(own)
    assert f"warning: hits show no photos of folder:{tmp_path / 'gone'}: " in said
    assert not shown()
    made.note_source("scenes:images=3,size=32")
    assert "hits show photos of scenes:images=3" in serve(own)
    assert shown()
    assert "photos" not in serve(f"exact:{world.texts.index.folder}")
    both = vacsr("serve", world.model, "--index", own, "--photos", "scenes:", "--no-photos")
    assert both.refused(2, "leave one out")


def test_elsewhere_without_a_token_it_warns(
    vacsr: Command, world: Any, run: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ("serve", world.model, "--index", world.index, "--port", 0, "--host", "0.0.0.0", "--device", "cpu")
    said = vacsr(*start).err
    assert "may search and see the photos — set VACSR_TOKEN" in said
    monkeypatch.setenv("VACSR_TOKEN", "abc")
    answer = vacsr(*start)
    assert "warning" not in answer.err
    assert "abc" not in answer.err + answer.out
    assert [limits.token for _, limits in run] == [None, "abc"]
    assert run[0][1].hosts is None


def test_an_empty_token_is_a_mistake_and_what_is_asked_for_is_said(
    vacsr: Command, world: Any, run: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ("serve", world.model, "--index", world.index, "--port", 0, "--device", "cpu", "--no-photos")
    assert "; no token is asked for;" in vacsr(*start).err
    assert vacsr(*start, "--token", "").refused(2, "--token is empty")
    monkeypatch.setenv("VACSR_TOKEN", "")
    assert vacsr(*start).refused(2, "VACSR_TOKEN is set and empty", "unset VACSR_TOKEN")
    assert "; a token is asked for;" in vacsr(*start, "--token", "abc").err
    monkeypatch.setenv("VACSR_TOKEN", "abc")
    assert "; a token is asked for;" in vacsr(*start).err
    assert [limits.token for _, limits in run] == [None, "abc", "abc"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_names_that_are_given_come_beside_this_machines(vacsr: Command, world: Any, run: list[Any], host: str) -> None:
    start = ("serve", world.model, "--index", world.index, "--port", 0, "--device", "cpu", "--no-photos")
    vacsr(*start, "--host", host, "--set", "hosts=[Photos.example.org]")
    assert set(run[0][1].hosts) == {"localhost", "127.0.0.1", "::1", "photos.example.org"}
    vacsr(*start, "--host", host, "--set", "hosts=null")
    assert run[1][1].hosts is None


def test_refusals(vacsr: Command, world: Any, tmp_path: Path, run: list[Any]) -> None:
    def serve(*more: object, index: str = world.index) -> Any:
        return vacsr("serve", world.model, "--index", index, "--port", 0, "--device", "cpu", *more)

    other = f"exact:{tmp_path / 'other'}"
    open_index(other, dim=8, provenance="images:of another model", create=True).add(["a"], torch.eye(8)[:1])
    assert serve(index=other).refused(4, "another model")
    assert serve(index=f"exact:{tmp_path / 'none'}").refused(4)
    assert serve(index="photos").refused(2, "exact:FOLDER")
    assert serve("--set", "max_k=0").refused(2, "max_k")
    assert serve("--set", "max_j=1").refused(2, "max_k")
    said = serve("--token", "a secret")
    assert said.refused(2, "token", "without spaces")
    assert "a secret" not in said.err
    assert serve("--host", "no.such.host.invalid").refused(2, "--host")
    assert serve("--photos", "synthetic:images=5").refused(4, "no photos")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve("--port", taken.getsockname()[1]).refused(3, "is taken", "--port")
    assert not run


def test_without_the_extra_it_says_what_to_install(vacsr: Command, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *args, **named)

    for module in [name for name in sys.modules if name.startswith(("vacsr.search.service.server", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", absent)
    assert vacsr("serve", world.model, "--index", world.index).refused(3, "vacsr[serve]")


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_whole_run(world: Any, end: signal.Signals) -> None:
    command = [sys.executable, "-c", "from vacsr.cli import main; main()", "serve", str(world.model)]
    command += ["--index", world.index, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        asked = urllib.request.Request(
            f"{address}/search", json.dumps({"text": "a dog"}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert len(json.load(answer)["hits"]) == 10
        process.send_signal(end)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said
