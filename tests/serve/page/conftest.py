"""A browser without a window, driven over DevTools' own pipe: no driver and no package is needed."""

import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vacsr.search.searcher import Searcher

QUERY = "a red boat"
PATIENCE = 60.0  # seconds for anything that a browser on a busy machine is asked for
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--lang=en",
)  # fmt: skip
WATCH = "window.refused = []; addEventListener('securitypolicyviolation', e => refused.push(e.violatedDirective));"


class Browser:
    """Sends commands and reads what comes back; both are JSON, ended by a zero byte."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # the sandbox refuses root
        command = [program, *FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", f'exec "$@" 3</dev/fd/{to_read} 4>/dev/fd/{to_write}', "sh", *command],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._came: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._count, self.events = 0, list[dict[str, Any]]()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        rest = b""
        while part := os.read(self._read, 2**16):
            *whole, rest = (rest + part).split(b"\0")
            for message in whole:
                self._came.put(json.loads(message))
        self._came.put(None)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            came = self._came.get(timeout=PATIENCE)
            assert came is not None, "the browser has ended"
            if came.get("id") == self._count:
                assert "error" not in came, f"{method}: {came.get('error')}"
                return dict(came["result"])
            self.events.append(came)

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait(PATIENCE)
        os.close(self._write)


class Tab:
    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._context = browser.send("Target.createBrowserContext")["browserContextId"]
        made = browser.send("Target.createTarget", url="about:blank", browserContextId=self._context)
        self._session = browser.send("Target.attachToTarget", targetId=made["targetId"], flatten=True)["sessionId"]
        browser.events.clear()
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self._do(f"{domain}.enable")
        self._do("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        self._do("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(1280)

    def _do(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def close(self) -> None:
        self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)

    def resize(self, width: int) -> None:
        self._do("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)

    def open(self, port: int, query: str = "") -> None:
        """Go to a service's page, until it is ready for a question or for a token."""
        self._do("Page.navigate", url=f"http://127.0.0.1:{port}/{query}")
        self.until("document.readyState == 'complete' && ['ask', 'gate', 'trouble'].some(id => !at(id).hidden)")

    def ask(self, words: str = QUERY) -> None:
        """Type words and Enter; wait for the hits, or for what is wrong."""
        self.js("at('text').focus(); at('text').select(); at('status').textContent = ''; at('trouble').hidden = true")
        self.write(words)
        self.press("Enter")
        self.until("!['', 'Searching …'].includes(at('status').textContent) || !at('trouble').hidden")

    def pick(self, policy: str) -> None:
        self.js("at('found').replaceChildren()")
        self.js(f"document.querySelector('input[value={policy}]').click()")
        self.until("at('results').getAttribute('aria-busy') == 'false' && at('found').childElementCount")

    def ids(self) -> list[str]:
        return list(self.js("[...document.querySelectorAll('.hit .id span')].map(span => span.textContent)"))

    def focus(self) -> str:
        return str(self.js("(node => node.id || node.value || node.tagName)(document.activeElement)"))

    def js(self, expression: str) -> Any:
        found = self._do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.js(f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"):
            assert time.monotonic() < end, f"{expression} did not come: {self.js('document.body.innerText')}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowRight": 39, "ArrowDown": 40}[key]
        letters = {"Enter": "\r", " ": " "}.get(key, "")
        known = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        known["modifiers"] = 8 if shift else 0
        self._do("Input.dispatchKeyEvent", type="keyDown" if letters else "rawKeyDown", text=letters, **known)
        self._do("Input.dispatchKeyEvent", type="keyUp", **known)

    def write(self, text: str) -> None:
        self._do("Input.insertText", text=text)

    def choose(self, selector: str, file: Path) -> None:
        found = self._do("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self._do("DOM.setFileInputFiles", files=[str(file)], objectId=found["result"]["objectId"])

    def violations(self) -> list[str]:
        self.js("0")
        logged = [event["params"]["entry"] for event in self._browser.events if event["method"] == "Log.entryAdded"]
        blocked = [entry["text"] for entry in logged if entry["source"] == "security"]
        return [*self.js("refused"), *blocked]

    def complaints(self) -> list[str]:
        self.js("0")
        found = []
        for event in self._browser.events:
            params = event["params"]
            if event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str(params["args"]))
        return found


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    made = Browser(program, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    made = Tab(browser)
    yield made
    made.close()


@pytest.fixture
def searcher(calibrated: Callable[..., Searcher]) -> Searcher:
    """Calibrated such that the first three hits of :data:`QUERY` are confident."""
    third = calibrated(None).search_texts([QUERY])[0].hits[2].grade
    return calibrated(third)


@pytest.fixture
def unsure(calibrated: Callable[..., Searcher]) -> Searcher:
    """Calibrated such that no hit is confident, and the first two of :data:`QUERY` hold the right one."""
    second = calibrated(None).search_texts([QUERY])[0].hits[1].grade
    return calibrated(None, set_cutoff=second)
