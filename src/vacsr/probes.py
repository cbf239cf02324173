"""What this machine is: probes that look and return facts, for `vacsr doctor` to judge."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple


class TorchFacts(NamedTuple):
    """What torch says of itself."""

    version: str = ""
    cuda: str | None = None
    """The CUDA it was built for; None for a CPU-only build."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs it sees."""
    threads: int = 1
    bf16: tuple[str, ...] = ()
    """Where bfloat16 is fast: `CPU`, `GPU`."""
    error: str = ""
    """Why it could not be imported or asked."""


class Requirement(NamedTuple):
    """One line of the package's requirements."""

    name: str
    low: str
    high: str
    extra: str

    def fits(self, version: str) -> bool:
        """At least ``low``, below ``high``; a package that does not tell its version is let through."""
        has = release(version)
        return not has or (has >= release(self.low) and (not self.high or has < release(self.high)))

    def spec(self) -> str:
        """As pip takes it.

        >>> Requirement("transformers", "5.18", "6", "clip").spec()
        'transformers>=5.18,<6'
        """
        bounds = [f"{sign}{bound}" for sign, bound in ((">=", self.low), ("<", self.high)) if bound]
        return self.name + ",".join(bounds)


def torch_facts() -> TorchFacts:
    """Import torch and ask it; that it fails is a fact as well."""
    try:
        return _ask_torch()
    except Exception as error:  # a broken library raises OSError, a broken package anything
        return TorchFacts(error=one_line(error))


def _ask_torch() -> TorchFacts:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cpu: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not say
    fast = {
        "CPU": any(cpu.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")),
        "GPU": count > 0 and torch.cuda.get_device_capability()[0] >= 8,
    }
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        threads=torch.get_num_threads(),
        bf16=tuple(name for name, is_fast in fast.items() if is_fast),
    )


def nvidia_present(*, which: Callable[[str], str | None] = shutil.which, device: Path = Path("/dev/nvidia0")) -> bool:
    """An NVIDIA GPU or its driver is here, whatever torch sees."""
    return which("nvidia-smi") is not None or device.exists()


def usable_cpus() -> int:
    """Processors that this process may use: a container or a batch system gives fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def installed(name: str) -> str | None:
    """Version of a distribution, `unknown` for a package without one, None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(name.replace("-", "_"))
        return "unknown" if spec is not None and spec.origin else None


def import_error(name: str, *, timeout: float = 120.0) -> str | None:
    """Why a package cannot be imported, None where it can. In a process of its own: a broken one may take it along."""
    code = "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); importlib.import_module(sys.argv[2])"
    command = [sys.executable, "-c", code, json.dumps(sys.path), name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"the import took longer than {timeout:.0f} s"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"the import ended with status {done.returncode}"


def requirements(lines: Iterable[str] | None = None) -> list[Requirement]:
    """What this package asks for, from its own metadata.

    >>> requirements(["numpy>=1.26", "transformers<6,>=5.18; extra == 'clip'"])[1]
    Requirement(name='transformers', low='5.18', high='6', extra='clip')
    """
    if lines is None:
        try:
            lines = importlib.metadata.requires("vacsr") or []
        except importlib.metadata.PackageNotFoundError:
            lines = []
    return [_requirement(line) for line in lines]


def _requirement(line: str) -> Requirement:
    spec, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", spec)
    bounds = dict(re.findall(r"(>=|<(?!=))\s*([\w.]+)", spec))
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
    return Requirement(
        name.group() if name else spec, bounds.get(">=", ""), bounds.get("<", ""), extra.group(1) if extra else ""
    )


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version that order it.

    >>> release("2.13.0+cpu"), release("5.18.0.dev0")
    ((2, 13, 0), (5, 18, 0))
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def one_line(error: BaseException) -> str:
    """An error as one line of text."""
    return " ".join(f"{type(error).__name__}: {error}".split())
