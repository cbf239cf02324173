"""Which arithmetic a processor scores fastest in: what it says it has, and a short measurement where that misleads."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import torch

from vacsr.adapter import FoldedAdapter
from vacsr.scoring.int8 import Int8Adapter

_INSTRUCTIONS: dict[torch.dtype, frozenset[str]] = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}),
    torch.int8: frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"}),
}
"""Any of these in /proc/cpuinfo; without them int8 sums may even saturate on the way."""
_TEXTS, _ROUNDS = 512, 5
_GAIN = 1.25  # what a rougher arithmetic must gain over a finer one to be worth its error


@lru_cache
def cpu_flags() -> frozenset[str]:
    """What the processor says it can do; empty where the system does not tell."""
    return frozenset(" ".join(cpu_field("flags", "Features")).split())


def cpu_field(*names: str) -> list[str]:
    """The first processor's value of the first of these fields of /proc/cpuinfo; empty elsewhere."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    split = [line.partition(":") for line in lines]
    return [value.strip() for name, _, value in split if name.strip() in names][:1]


def offered_dtypes() -> list[torch.dtype]:
    """float32, and those that the processor has instructions for, from fine to rough."""
    return [torch.float32, *(dtype for dtype, names in _INSTRUCTIONS.items() if names & cpu_flags())]


def arithmetic(folded: FoldedAdapter, dtype: torch.dtype) -> FoldedAdapter | Int8Adapter:
    """The same adapter with its large product in ``dtype``, on the device where it is."""
    place = folded.trunk.device
    return Int8Adapter(folded.to(place, torch.float32)) if dtype == torch.int8 else folded.to(place, dtype)


def fastest_dtype(folded: FoldedAdapter) -> torch.dtype:
    """Measured once a process for each shape and number of threads; a rougher one is taken where it is
    1.25 times as fast."""
    width = 0 if folded.last is None else len(folded.small)
    return _fastest(len(folded.trunk), folded.trunk.shape[1], width, torch.get_num_threads())


@lru_cache
def _fastest(height: int, dim: int, width: int, threads: int) -> torch.dtype:
    """``threads`` is a part of what is remembered: torch has them set already."""
    generator = torch.Generator().manual_seed(0)
    probe = FoldedAdapter(
        torch.randn(height, dim, generator=generator), torch.zeros(height), torch.ones(max(1, width), height),
        torch.zeros(max(1, width)), torch.ones(width) if width else None, 0.0, torch.ones(2),
    )  # fmt: skip
    seconds = {dtype: _seconds(arithmetic(probe, dtype), dim, generator) for dtype in offered_dtypes()}
    best = torch.float32
    for dtype, needed in seconds.items():  # from fine to rough
        best = dtype if seconds[best] > _GAIN * needed else best
    return best


@torch.inference_mode()
def _seconds(adapter: FoldedAdapter | Int8Adapter, dim: int, generator: torch.Generator) -> float:
    """The fastest of a few rounds: what else the machine does only ever adds."""
    v, t = torch.randn(1, dim, generator=generator), torch.randn(_TEXTS, dim, generator=generator)
    adapter.logits(v, t)
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        adapter.logits(v, t)
        times.append(time.perf_counter() - started)
    return min(times)
