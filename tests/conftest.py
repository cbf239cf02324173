"""One thread for all tests; the command line, a small CLIP checkpoint and some photos as fixtures."""

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vacsr.cli import main

torch.set_num_threads(1)  # operations this small only wait for each other on several threads
_KINDS = ("Error:", "Mismatch:", "Extra:", "Problem:", "Split:", "Pixels:", "Run:")


class Answer(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> bool:
        """The exit code, one message on stderr that holds the words, and no data."""
        assert self.code == code, self.err
        assert self.out == ""
        assert "Traceback" not in self.err
        assert sum(any(kind in line for kind in _KINDS) for line in self.err.splitlines()) == 1, self.err
        assert all(word in self.err for word in words), self.err
        return True


@pytest.fixture
def vacsr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command line in this process."""
    monkeypatch.setenv("COLUMNS", "400")

    def command(*argv: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["vacsr", *map(str, argv)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        plain = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capsys.readouterr())  # some CI services force colours
        return Answer(int(left.value.code or 0), *plain)

    return command


def load_script(path: str) -> Any:
    """A script of the repository, such as tools/join_data.py, as a module."""
    file = Path(__file__).resolve().parents[1] / path
    name = f"script_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks up its annotations
    spec.loader.exec_module(module)
    return module


def clip_folder(folder: Path, *, seed: int = 0) -> Path:
    """A CLIP checkpoint of the real architecture, small, with random weights and a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    sides = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        vision_config={**sides, "image_size": 32, "patch_size": 8, "attention_dropout": 0.3},
        text_config={
            **sides,
            "hidden_size": 24,
            "vocab_size": 600,
            "max_position_embeddings": 20,
            "bos_token_id": 512,
            "eos_token_id": 513,  # after 512 bytes and their ends of words, and the start
        },
        projection_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.CLIPModel(config).save_pretrained(folder)
    byte_tokenizer(transformers).save_pretrained(folder)
    return folder


def byte_tokenizer(transformers: Any) -> Any:
    """CLIP's own class over an alphabet of bytes without merges; start and end come last, as in CLIP's."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])


@pytest.fixture(scope="session")
def clip_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("clip") / "small-clip")


@pytest.fixture(scope="session")
def photos() -> torch.Tensor:
    """uint8 [4, 3, 32, 32]"""
    return torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
