"""The code blocks of README.md and docs/ run, in order, as they stand.

A block tagged `python`, `bash` or `console` (lines after `$ `) needs nothing but an empty folder with recipes/ and
tables/, one tagged `sh` also what only the reader has: weights of CLIP, and photos. Small ones stand in for them here,
and a server on loopback for the Hub. Recipes (`yaml`) are validated by test_docs.py; output and layouts have no tag.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from .conftest import clip_folder
from .fake_hub import PUSH, FakeHub, serve_hub
from .test_docs import DOCS, PAGES, ROOT, SHELL, fences, name_of

GROUPS = [
    ["README", "how-to/search", "how-to/serve"],  # on the same demo
    ["how-to/train", "how-to/audit", "compare"],  # in the folder of the first
]
"""Pages that go on where another ends; the others start in a folder of their own."""
NEEDS = {
    "how-to/hub": ("sentence_transformers", "onnxruntime"), "how-to/mteb": ("mteb",), "how-to/train": ("peft",),
    "scale": ("ray",), "get-started/photos": ("transformers",), "get-started/few-shot": ("transformers",),
}  # fmt: skip
"""Packages of extras that a page's blocks import."""
QUICK = ("data", "evaluation", "extending", "how-to/fast-scoring", "how-to/library")
"""The others take minutes together."""
LARGE = "needs the data sets of the papers, and hours on a GPU"
NOT_RUN = {
    "git clone ADDRESS": "installs vacsr, as `make venv` does",
    "vacsr fewshot recipes/base2novel-oxford_pets": LARGE,
    "CUDA_VISIBLE_DEVICES=0 vacsr compare tables/noise.yaml": LARGE,
    "python tools/join_data.py": LARGE,
    "export VACSR_TOKEN=$(openssl": "needs Docker",
}
"""Blocks with commands that are not run, by their beginning, and why."""
COMMAND = re.compile(r"^(\$ |\w+=\S+ )*(vacsr|python|pip|git|docker|torchrun) ", re.MULTILINE)
PRELUDE = """
vacsr() {  # in the foreground a service would run until Ctrl-C
  [ "$1" = serve ] || { command vacsr "$@"; return; }
  command vacsr "$@" --port 0 > served.txt & local pid=$!
  while ! grep -qs http served.txt; do kill -0 $pid || return 1; sleep 0.2; done
  kill $pid; wait $pid
}
"""


def key(page: Path) -> str:
    return "README" if page.name == "README.md" and page.parent == ROOT else str(page.relative_to(DOCS).with_suffix(""))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Those that are run."""
    return [(tag, text) for tag, text in fences(page) if tag in ("python", *SHELL)]


def groups() -> Iterator[list[Path]]:
    pages = {key(page): page for page in PAGES if blocks(page)}
    for names in GROUPS:
        yield [pages.pop(name) for name in names]
    yield from ([page] for page in pages.values())


def test_every_other_block_with_commands_has_a_reason() -> None:
    left = [text for page in PAGES for tag, text in fences(page) if tag not in ("python", *SHELL)]
    begins = {text for text in left if COMMAND.search(text)}
    known = {start: [text for text in begins if text.startswith(start)] for start in NOT_RUN}
    assert begins - {text for found in known.values() for text in found} == set()
    assert [start for start, found in known.items() if not found] == [], "these reasons are not needed any more"


def stand_ins(page: Path, folder: Path, hub: FakeHub) -> None:
    """What only the reader has: a CLIP by its id and in a folder, photos in PHOTOS, photos of two classes."""
    if key(page) == "README" and shutil.which("vacsr"):
        subprocess.run(["vacsr", "demo"], cwd=folder, check=True, capture_output=True)
    if any(tag == "sh" for tag, _ in fences(page)):
        clip = clip_folder(folder / "clip-vit-base-patch32")
        for size in (16, 32):
            hub.add(f"openai/clip-vit-base-patch{size}", clip)
    for name in ("PHOTOS", "photos/night_heron", "photos/grey_heron"):
        if key(page) == "get-started/few-shot" or (name == "PHOTOS" and key(page) == "get-started/photos"):
            (folder / name).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (40, 40), (40 * number, 90, 30)).save(folder / name / f"{number}.jpg")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "pages",
    [
        pages if key(pages[0]) in QUICK else pytest.param(pages, marks=pytest.mark.long, id=name_of(pages[0]))
        for pages in groups()
    ],
    ids=lambda pages: name_of(pages[0]),
)
def test_blocks_run_in_order(pages: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python blocks in a row are one program, and so are those of one shell tag."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    for package in (name for page in pages for name in NEEDS.get(key(page), ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs the package {package}")
    bash = shutil.which("bash")
    if bash is None or shutil.which("vacsr") is None:
        pytest.skip("needs bash and the installed command")
    for name in ("recipes", "tables"):
        shutil.copytree(ROOT / name, tmp_path / name)
    runners = {"python": [sys.executable, "-c"]} | {tag: [bash, "-euc"] for tag in SHELL}
    with serve_hub() as hub:
        hf = {"HF_ENDPOINT": hub.url, "HF_HOME": f"{tmp_path}/hf", "HF_TOKEN": PUSH, "HF_HUB_DISABLE_XET": "1"}
        for name, value in {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1", **hf}.items():
            monkeypatch.setenv(name, value)
        for page in pages:
            stand_ins(page, tmp_path, hub)
            for tag, group in itertools.groupby(blocks(page), key=lambda block: block[0]):
                text = "\n".join(text for _, text in group)
                if tag == "console":
                    text = "\n".join(line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
                text = PRELUDE + text if tag in ("sh", "console") else text
                done = subprocess.run([*runners[tag], text], cwd=tmp_path, capture_output=True, text=True)
                assert done.returncode == 0, f"{name_of(page)}\n{text}\n{done.stdout[-2000:]}\n{done.stderr}"
