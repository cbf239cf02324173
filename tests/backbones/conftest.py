from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 600


def clip_folder(folder: Path, *, tokenizer: bool = True) -> Path:
    """A CLIP checkpoint of the real architecture, small, with random weights and a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    sides = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        vision_config={**sides, "image_size": 32, "patch_size": 8, "attention_dropout": 0.3},
        text_config={
            **sides,
            "hidden_size": 24,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 20,
            "bos_token_id": 512,
            "eos_token_id": 513,  # after 512 bytes and their ends of words, and the start
        },
        projection_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.CLIPModel(config).save_pretrained(folder)
    if tokenizer:
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
