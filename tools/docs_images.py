"""Make the images of README.md and docs/: a screenshot of the search page, and a plot of stored results.

    python tools/docs_images.py plot               # docs/images/noise.svg, from docs/results/
    python tools/docs_images.py search             # docs/images/search.png: runs `vacsr demo` first (a minute)
    python tools/docs_images.py search --demo DIR  # the same with a demo that is there

`search` needs chromedriver and chromium; the first run's demo stays in runs/docs-images and is used again.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
VACSR = [sys.executable, "-m", "vacsr"]
LINES = {
    "vacsr-ensemble": "#3a3fb5",
    "ncr": "#0b7a4b",
    "bicro": "#6fb98f",
    "infonce": "#b3541e",
    "pcmepp": "#b9a2e8",
}


def plot() -> Path:
    """RSUM along the share of wrong captions, of the methods in README's table."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    cells = json.loads((ROOT / "docs/results/ensembles/results.json").read_text(encoding="utf-8"))["cells"]
    mpl.rcParams.update({"svg.hashsalt": "vacsr", "font.size": 11})
    figure, panels = plt.subplots(1, 2, figsize=(7.6, 3.2), layout="constrained")
    for axes, title, features in zip(panels, ("Flickr8k", "part of COCO"), ("clip", "coco"), strict=True):
        settings = {features: 0, f"{features}-20": 20, f"{features}-50": 50}
        for name, colour in LINES.items():
            seeds = [
                [c["values"]["test.rsum"] for c in cells if (c["row"], c["setting"]) == (name, setting)]
                for setting in settings
            ]
            means, spread = [statistics.fmean(s) for s in seeds], [statistics.stdev(s) for s in seeds]
            axes.errorbar(list(settings.values()), means, spread, color=colour, marker="o", capsize=3, label=name)
        axes.set(title=title, xlabel="captions shuffled before training, %", xticks=list(settings.values()))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="RSUM on test")
    panels[0].legend(frameon=False, fontsize=9.5, loc="lower left")
    path = IMAGES / "noise.svg"
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    return path


def finished(folder: Path) -> Path:
    """The folder of a demo, which runs unless it is there."""
    if not (folder / "results.json").is_file():
        subprocess.run([*VACSR, "demo", "--out", str(folder)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


@contextmanager
def served(demo: Path, folder: Path) -> Iterator[str]:
    """The address of a service for the demo's vacsr model and its album."""
    run, index = str(demo / "vacsr"), f"exact:{folder}/index"
    subprocess.run([*VACSR, "index", "add", index, "--run", run, "--pairs", str(demo / "album")], check=True)
    command = [*VACSR, "serve", run, "--index", index, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if line.startswith("http"))
    finally:
        process.terminate()
        process.wait()


class Browser:
    """A headless browser, by the WebDriver protocol."""

    def __init__(self, *, width: int, height: int, dark: bool) -> None:
        self.process = subprocess.Popen(["chromedriver", "--port=9517"], stdout=subprocess.DEVNULL)
        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-background-networking",
        ]
        arguments += [f"--window-size={width},{height}", *(["--force-dark-mode"] if dark else [])]
        wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}}}
        self.session = ""
        for _ in range(50):
            try:
                self.session = "/session/" + self.ask("/session", {"capabilities": wanted})["sessionId"]
                break
            except ConnectionError:
                time.sleep(0.2)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:9517{self.session}{path}", data=data)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.URLError as error:
            raise ConnectionError(str(error)) from error

    def run(self, script: str) -> Any:
        return self.ask("/execute/sync", {"script": script, "args": []})

    def wait(self, condition: str) -> None:
        for _ in range(150):
            if self.run(f"return Boolean({condition})"):
                return
            time.sleep(0.2)
        raise TimeoutError(f"the page never came to: {condition}")

    def picture(self, path: Path) -> None:
        """As a PNG of 256 colours, a sixth of the size."""
        shot = Image.open(io.BytesIO(base64.b64decode(self.ask("/screenshot"))))
        shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def search(demo: Path, query: str, *, width: int, height: int, dark: bool, out: Path) -> Path:
    """The page with the hits of a query."""
    with tempfile.TemporaryDirectory() as folder, served(finished(demo), Path(folder)) as address:
        browser = Browser(width=width, height=height, dark=dark)
        try:
            browser.ask("/url", {"url": address})
            browser.wait("document.querySelector('input[type=search]')?.offsetParent")
            box = f"const box = document.querySelector('input[type=search]'); box.value = {json.dumps(query)};"
            browser.run(f"{box} box.dispatchEvent(new Event('input', {{bubbles: true}})); box.form.requestSubmit()")
            photos = "[...document.querySelectorAll('img')].filter(i => i.offsetParent && i.src)"
            browser.wait(f"{photos}.length >= 5 && {photos}.every(i => i.complete || i.loading == 'lazy')")
            browser.run("document.activeElement.blur(); window.scrollTo(0, 0)")
            time.sleep(0.5)
            browser.picture(out)
        finally:
            browser.close()
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", choices=["plot", "search"])
    parser.add_argument("--demo", type=Path, default=ROOT / "runs/docs-images", help="where `vacsr demo` is or goes")
    parser.add_argument("--query", default="a drawing of a red heart")
    parser.add_argument("--size", default="1280x1023", metavar="WIDTHxHEIGHT")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", type=Path, default=IMAGES / "search.png")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    size = {"width": width, "height": height, "dark": options.dark}
    print(plot() if options.image == "plot" else search(options.demo, options.query, **size, out=options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
