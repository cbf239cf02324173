"""`vacsr serve`: clear refusals, and a whole run as a process that a signal ends."""

import builtins
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.search import open_index
from vacsr.serve import bind

Patch = pytest.MonkeyPatch
Command = Callable[..., Any]
QUERY = b'{"text": "a dog"}'


@pytest.fixture
def run(monkeypatch: Patch) -> list[Any]:
    """Instead of running a server, keep what it would have run with."""
    kept: list[Any] = []
    monkeypatch.setattr("vacsr.serve.run_server", lambda app, _socket, limits: kept.append((app, limits)))
    return kept


@pytest.fixture
def serve(vacsr: Command, world: Any) -> Command:
    def started(*more: object, index: str = world.index) -> Any:
        return vacsr("serve", world.model, "--index", index, "--port", 0, "--device", "cpu", *more)

    return started


def test_it_starts_on_loopback_with_the_settings_given(serve: Command, world: Any, run: list[Any]) -> None:
    answer = serve("--set", "max_k=7")
    assert (answer.code, bool(re.fullmatch(r"http://127\.0\.0\.1:\d+\n", answer.out))) == (0, True)
    assert f"{len(world.searcher.index)} in the index" in answer.err
    assert "warning" not in answer.err
    _, limits = run[0]
    assert (limits.max_k, limits.token) == (7, None)
    assert "127.0.0.1" in limits.hosts


def test_photos_of_the_indexs_sources(serve: Command, world: Any, run: list[Any], tmp_path: Path) -> None:
    def shows(said: str, *more: object, index: str = world.index) -> bool:
        answer = serve(*more, index=index)
        assert answer.code == 0, answer.err
        assert said in answer.err if said else "photos" not in answer.err
        return run[-1][0].state.service.watch.photos is not None

    assert shows("hits show photos of scenes:images=24")
    assert not shows("", "--no-photos")
    assert shows("hits show photos of scenes:images=3", "--photos", "scenes:images=3,size=32")
    other = f"exact:{tmp_path / 'other'}"
    made = open_index(other, dim=8, create=True)
    made.add(["a"], torch.eye(8)[:1])
    assert not shows("--photos SPEC", index=other)
    made.note_source(f"folder:{tmp_path / 'gone'}")
    assert not shows(f"warning: hits show no photos of folder:{tmp_path / 'gone'}: ", index=other)
    made.note_source("scenes:images=3,size=32")
    assert shows("hits show photos of scenes:images=3", index=other)
    assert not shows("", index=f"exact:{world.texts.index.folder}")
    assert serve("--photos", "scenes:", "--no-photos").refused(2, "leave one out")


def test_the_token_of_the_option_or_the_environment(serve: Command, run: list[Any], monkeypatch: Patch) -> None:
    """An empty one is a mistake, and elsewhere than on loopback it is missed."""
    assert "; no token required;" in serve().err
    assert "set VACSR_TOKEN" in serve("--host", "0.0.0.0").err
    assert run[-1][1].hosts is None
    assert serve("--token", "").refused(2, "--token")
    assert "; token required;" in serve("--token", "abc").err
    monkeypatch.setenv("VACSR_TOKEN", "abc")
    answer = serve("--host", "0.0.0.0")
    assert "; token required;" in answer.err
    assert "warning" not in answer.err
    assert "abc" not in answer.err + answer.out
    monkeypatch.setenv("VACSR_TOKEN", "")
    assert serve().refused(2, "unset VACSR_TOKEN")
    assert [limits.token for _, limits in run] == [None, None, "abc", "abc"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_names_that_are_given_come_beside_this_machines(serve: Command, run: list[Any], host: str) -> None:
    serve("--host", host, "--set", "hosts=[Photos.example.org]")
    assert set(run[0][1].hosts) == {"localhost", "127.0.0.1", "::1", "photos.example.org"}
    serve("--host", host, "--set", "hosts=null")
    assert run[1][1].hosts is None


def test_refusals(serve: Command, tmp_path: Path, run: list[Any]) -> None:
    other = f"exact:{tmp_path / 'other'}"
    open_index(other, dim=8, provenance="images:of another model", create=True).add(["a"], torch.eye(8)[:1])
    assert serve(index=other).refused(4, "another model")
    assert serve(index=f"exact:{tmp_path / 'none'}").refused(4)
    assert serve(index="photos").refused(4, "exact:photos")
    assert serve("--set", "max_k=0").refused(2, "max_k")
    assert serve("--set", "max_j=1").refused(2, "max_k")
    said = serve("--token", "a secret")
    assert said.refused(2, "token", "without spaces")
    assert "a secret" not in said.err
    assert serve("--photos", "synthetic:images=5").refused(4, "no photos")
    assert not run


def test_addresses_that_cannot_be_had() -> None:
    with bind("127.0.0.1", 0) as held, pytest.raises(EnvironmentProblem, match="--port"):
        bind("127.0.0.1", held.getsockname()[1])
    for host in ("no.such.host.invalid", "203.0.113.1", "a..b", "x" * 300):
        with pytest.raises(UsageError, match="--host"):
            bind(host, 0)
    if socket.has_ipv6:
        with bind("::1", 0) as six:
            assert six.family == socket.AF_INET6


def test_without_the_extra_it_says_what_to_install(serve: Command, monkeypatch: Patch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *args, **named)

    for module in [name for name in sys.modules if name.startswith(("vacsr.serve", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", absent)
    assert serve().refused(3, "vacsr[serve]")


@contextmanager
def running(world: Any, *more: str, before: str = "pass") -> Iterator[tuple[subprocess.Popen[str], Callable[..., int]]]:
    """The command as a process, and a way to ask it; killed in the end, if need be."""
    command = [sys.executable, "-c", f"{before}; from vacsr.cli import main; main()", "serve", str(world.model)]
    command += ["--index", world.index, "--port", "0", "--device", "cpu", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])

        def ask(body: bytes, kind: str = "application/json") -> int:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            link.request("POST", "/search", body, {"content-type": kind})
            return link.getresponse().status

        yield process, ask
    finally:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[str], by: signal.Signals = signal.SIGTERM) -> None:
    process.send_signal(by)
    _, said = process.communicate(timeout=3 + 5 + 20)  # deadline, grace, and some for a busy machine
    assert process.returncode == 0, said
    assert "Traceback" not in said


@pytest.mark.slow
def test_ctrl_c_ends_it(world: Any) -> None:
    with running(world, "--set", "deadline_seconds=3") as (process, ask):
        while ask(QUERY) != 200:  # the first one may take longer than the deadline
            time.sleep(0.5)
        end(process, signal.SIGINT)


def _children(pid: int) -> list[int]:
    """By Linux; a thread may have started them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux to find the decoders")
@pytest.mark.parametrize("hung", ["decoder", pytest.param("model", marks=pytest.mark.slow)])
def test_a_signal_ends_it_in_time_whatever_hangs(world: Any, picture: Callable[..., bytes], hung: str) -> None:
    hang = "import time, vacsr.search as s; s.Searcher.search_texts = lambda *_, **__: time.sleep(600)"
    limits = ("--set", "deadline_seconds=3", "--set", "decode_seconds=600", "--no-photos")
    with running(world, *limits, before=hang if hung == "model" else "pass") as (process, ask):
        query = (picture(), "image/png") if hung == "decoder" else (QUERY,)
        if hung == "decoder":
            while ask(*query) != 200:  # the first one may take longer than the deadline to start
                time.sleep(0.5)
            for decoder in [decoder for forker in _children(process.pid) for decoder in _children(forker)]:
                os.kill(decoder, signal.SIGSTOP)
        assert ask(*query) == 503
        end(process)
