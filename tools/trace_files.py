"""Print the files of src/vacsr whose functions run on each data path of docs/architecture.md, in order of first entry.

Run it as `python tools/trace_files.py`; it takes half a minute. Imports and other processes are not traced.
"""

import importlib
import json
import os
import pkgutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

import vacsr
from vacsr.cli import app

ROOT, PORT = f"{Path(vacsr.__file__).parent}/", "8799"
TOWERS = {"spec": "tiny:width=16,depth=1,text_depth=1,heads=2,size=32", "head": {"dim": 8}}
RECIPE = {"data": {"pairs": "csv:photos.csv"}, "backbone": TOWERS, "train": {"epochs": 1, "batch_size": 8}}
ROWS = [{"name": name, "set": {"method": {"name": name}}} for name in ("infonce", "vacsr")]
TABLE = {"title": "Two methods", "base": RECIPE, "rows": ROWS, "seeds": [0], "columns": [{"key": "test.rsum"}]}
MODEL = ("adapter", "backbones", "config", "distributions", "kernels", "methods", "model", "noise", "pretrained")
entered: dict[str, None] = {}


def hook(frame, event, _):
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if event == "call" and file.startswith(ROOT) and file.endswith(".py") and name != "<module>":
        entered[file.removeprefix(ROOT)] = None
        if name == "_one_step":
            sys.setprofile(None)


def trace(title, action, *apart):
    """Run a command or a function. Files of ``apart`` and of the command line are in a second list."""
    entered.clear()
    sys.setprofile(hook)
    with suppress(SystemExit):
        app(action.split()) if isinstance(action, str) else action()
    sys.setprofile(None)
    rest = [name for name in entered if name.startswith(("cli", *apart))]
    main = [name for name in entered if name not in rest]
    print(f"{title}: {len(main)} files\n  {' '.join(main)}\n  and {len(rest)}: {' '.join(rest)}\n", flush=True)


def search():
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/search", b'{"text": "picture 3"}')
    request.add_header("Content-Type", "application/json")
    time.sleep(10)  # until the service is up
    trace("HTTP search", lambda: urllib.request.urlopen(request).read(), *MODEL, "scoring")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    for module in pkgutil.walk_packages(vacsr.__path__, "vacsr."):
        if not module.name.startswith(("vacsr.kernels.", "vacsr.__main__")):
            importlib.import_module(module.name)
    threading.setprofile(hook)
    os.chdir(tempfile.mkdtemp())
    splits, names = ["train"] * 24 + ["dev"] * 8 + ["test"] * 8, [f"{n}" for n in range(8)]
    for n in range(40):
        Image.new("RGB", (32, 32), (6 * n, 255 - 6 * n, 90)).save(f"{n}.png")
    lines = "".join(f"{n}.png,picture {n},{split}\n" for n, split in enumerate(splits))
    Path("photos.csv").write_text(f"image,caption,split\n{lines}", encoding="utf-8")
    ids = {"images": names, "captions": names, "caption_image": names}
    for file, value in (("recipe.yaml", RECIPE), ("table.yaml", TABLE), ("ids.json", ids)):
        Path(file).write_text(json.dumps(value), encoding="utf-8")
    np.save("scores.npy", np.random.default_rng(0).normal(size=(8, 8)))
    trace("training, before step 0", "train recipe.yaml --out run", "data", "evaluate")
    trace("CSV → index", "index add exact:index --run run --pairs csv:photos.csv", *MODEL, "scoring")
    trace("scores → report", "evaluate --scores scores.npy --ids ids.json --uncertainty scores.npy", "config", "train")
    app(["compare", "table.yaml", "--out", "runs"], standalone_mode=False)
    trace("reports → HTML page", "compare table.yaml --out runs --only-collect --page", "config", "train")
    threading.Thread(target=search).start()
    sys.setprofile(hook)  # the service runs in this thread
    app(["serve", "run", "--index", "exact:index", "--no-photos", "--port", PORT], standalone_mode=False)
