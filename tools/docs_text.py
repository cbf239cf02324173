"""Find long sentences and words that we do not use in README.md and docs/.

python tools/docs_text.py          # list them; exit 1 where there are any
python tools/docs_text.py --all    # long sentences of every page, not only of README.md, get-started and how-to
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 35
"""Words of a sentence in README.md, docs/get-started and docs/how-to."""
WORDS = {
    r"\bvouch\w*": "guarantee",
    r"\bpromises?\b": "guarantee, risk bound",
    r"\b(anew|afresh)\b": "again",
    r"\bfor want of\b": "missing",
    r"\bstands twice\b": "duplicate",
    r"\bcannot be had\b": "not available",
    r"\bat rest\b": "frozen",
    r"\bwakes?\b": "unfreeze",
    r"\bramped\b": "warm-up",
    r"\bfigures?\b": "number, metric, plot",
    r"\bworked out again\b": "recomputed",
}
"""Word: what to write instead."""


def sentences(text: str) -> Iterator[str]:
    """Of the running text: without code blocks, headings, formulas and HTML; a cell of a table is a text of its own."""
    text = re.sub(r"^(```.*?^```|#.*?$|\$\$.*?\$\$|<!--.*?-->|!\[.*?$)", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "Code", text))
    for block in re.split(r"\n\s*\n|^\s*[-*] |^\s*\d+\. |\|", text, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z\"*(`σ]|vacsr)", " ".join(block.split()))


def length(sentence: str) -> int:
    return len(re.findall(r"[\w'’σ]+(?:-\w+)*", sentence))


def main() -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = [page for page in pages if page.name != "table.md"]
    tutorials = ("README.md", "docs/get-started", "docs/how-to")
    found = 0
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        for sentence in sentences(page.read_text(encoding="utf-8")):
            if length(sentence) > LONGEST and (name.startswith(tutorials) or "--all" in sys.argv):
                print(f"{name}: {length(sentence)} words: {sentence}")
                found += 1
            for word, better in WORDS.items():
                if re.search(word, sentence, re.IGNORECASE):
                    print(f"{name}: write {better}: {sentence[:120]}")
                    found += 1
    print(f"{found} to mend" if found else "no long sentence, no unwanted word", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
