"""What may be wrong with this machine, and what to do about it: `vacsr doctor`.

A probe looks at the machine and returns facts; a check turns facts into a finding and looks at nothing. A check can
therefore be tried with the facts of any machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Status = Literal["ok", "warn", "fail"]
Version = Callable[[str], str | None]
"""The installed version of a distribution, None where it is absent."""

_PYTHON, _TORCH = (3, 11), (2, 6)
_NEEDS_TORCHVISION = (5, 4), (5, 18)  # these transformers, first to last (exclusive), import it for image processors
_DISK_GB = 2.0
_PURPOSE = {
    "clip": "CLIP and other towers",
    "eval": "ECCV Caption",
    "paper": "the paper's optimiser AdamP",
    "shards": "webdataset shards",
    "milvus": "a Milvus index",
    "serve": "the web service",
    "tensorboard": "TensorBoard logs",
    "wandb": "Weights & Biases logs",
    "onnx": "ONNX export",
}


class Finding(NamedTuple):
    """What one check says."""

    status: Status
    subject: str
    message: str

    def line(self) -> str:
        """For a person.

        >>> Finding("ok", "torch", "2.13.0, CPU only").line()
        'ok    torch        2.13.0, CPU only'
        """
        return f"{self.status:<5} {self.subject:<12} {self.message}"


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
        has = _release(version)
        return not has or (has >= _release(self.low) and (not self.high or has < _release(self.high)))

    def spec(self) -> str:
        """As pip takes it.

        >>> Requirement("transformers", "5.18", "6", "clip").spec()
        'transformers>=5.18,<6'
        """
        bounds = [f"{sign}{bound}" for sign, bound in ((">=", self.low), ("<", self.high)) if bound]
        return self.name + ",".join(bounds)


def examine() -> list[Finding]:
    """Every check on this machine; a check that breaks is a finding too."""
    torch, needed, visible = torch_facts(), requirements(), os.environ.get("CUDA_VISIBLE_DEVICES")
    checks: dict[str, Callable[[], Finding | list[Finding]]] = {
        "python": lambda: check_python(tuple(sys.version_info[:3])),
        "torch": lambda: check_torch(torch),
        "gpu": lambda: [] if torch.error else check_gpu(torch, nvidia=nvidia_present(), visible=visible),
        "torchvision": lambda: check_torchvision(installed("torchvision"), import_error),
        "bf16": lambda: [] if torch.error else check_bf16(torch),
        "threads": lambda: [] if torch.error else check_threads(torch, cpus=usable_cpus()),
        "disk": lambda: check_disk(shutil.disk_usage(Path.cwd()).free),
        "packages": lambda: check_packages(needed, installed),
        "extras": lambda: check_extras(needed, installed),
    }
    return [finding for subject, check in checks.items() for finding in _guarded(subject, check)]


def _guarded(subject: str, check: Callable[[], Finding | list[Finding]]) -> list[Finding]:
    try:
        found = check()
    except Exception as error:
        return [Finding("warn", subject, f"could not be checked: {_one_line(error)}")]
    return [found] if isinstance(found, Finding) else found


# Probes: they look at the machine.


def torch_facts() -> TorchFacts:
    """Import torch and ask it; that it fails is a fact as well."""
    try:
        return _ask_torch()
    except Exception as error:  # a broken library raises OSError, a broken package anything
        return TorchFacts(error=_one_line(error))


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


# Checks: facts in, findings out.


def check_python(version: tuple[int, ...]) -> Finding:
    """Is it new enough?"""
    shown = ".".join(map(str, version))
    if version < _PYTHON:
        return Finding("fail", "python", f"{shown}; vacsr needs 3.11 or newer — make a new environment with one")
    return Finding("ok", "python", shown)


def check_torch(torch: TorchFacts) -> Finding:
    """Does it import, is it new enough, and for which hardware was it built?"""
    if torch.error:
        return Finding("fail", "torch", f"does not work ({torch.error}) — pip install --force-reinstall torch")
    if _release(torch.version) < _TORCH:
        return Finding("fail", "torch", f"{torch.version}; vacsr needs 2.6 or newer — pip install --upgrade torch")
    build = f"CUDA {torch.cuda}" if torch.cuda else "CPU only"
    return Finding("ok", "torch", f"{torch.version.partition('+')[0]}, {build}")


def check_gpu(torch: TorchFacts, *, nvidia: bool, visible: str | None = None) -> Finding:
    """Do the machine's GPU and torch know of each other? ``visible`` is CUDA_VISIBLE_DEVICES."""
    if torch.gpus:
        return Finding("ok", "gpu", ", ".join(torch.gpus))
    if not nvidia:
        extra = "; a CPU-only torch would do and is several GB smaller" if torch.cuda else ""
        return Finding("ok", "gpu", f"none found, the CPU is used{extra}")
    if not torch.cuda:
        where = "choose the command at https://pytorch.org/get-started/locally/ and add --force-reinstall"
        return Finding("warn", "gpu", f"NVIDIA GPU here, but torch is a CPU-only build — install a CUDA build: {where}")
    if visible is not None and visible.strip() in ("", "-1"):
        return Finding("warn", "gpu", f"hidden by CUDA_VISIBLE_DEVICES='{visible}' — unset it to use the GPU")
    why = f"NVIDIA GPU or driver here, but torch (CUDA {torch.cuda}) does not see it"
    what = "run nvidia-smi, then update the driver or install a torch built for an older CUDA"
    return Finding("warn", "gpu", f"{why} — {what}")


def check_torchvision(version: str | None, why_not: Callable[[str], str | None]) -> Finding:
    """Not needed, but harmful where it does not fit torch: other packages import it wherever they find it."""
    subject = "torchvision"
    if version is None:
        return Finding("ok", subject, "absent, not needed")
    error = why_not(subject)
    if error is None:
        return Finding("ok", subject, f"{version}, imports; not needed")
    harm = "transformers and torchmetrics break on it, vacsr does not need it"
    trap = f"{version} cannot be imported beside this torch ({error}); {harm}"
    return Finding("fail", subject, f"{trap} — pip uninstall torchvision")


def check_bf16(torch: TorchFacts) -> Finding:
    """For information: where half-width arithmetic pays."""
    if torch.bf16:
        return Finding("ok", "bf16", f"fast on the {' and the '.join(torch.bf16)}")
    return Finding("ok", "bf16", "no fast path known here; keep train.precision=fp32")


def check_threads(torch: TorchFacts, *, cpus: int) -> Finding:
    """Too many threads slow each other down, too few leave processors idle (half of them may be hyper-threads)."""
    shown = f"torch uses {torch.threads} of {cpus} processors"
    if torch.threads > cpus or torch.threads < cpus // 2:
        return Finding("warn", "threads", f"{shown} — export OMP_NUM_THREADS={cpus}")
    return Finding("ok", "threads", shown)


def check_disk(free: int) -> Finding:
    """Room for checkpoints and features in the current folder. ``free`` in bytes"""
    gb = free / 1e9
    if gb < _DISK_GB:
        return Finding("warn", "disk", f"{gb:.1f} GB free in this folder — free some, or write elsewhere with --out")
    return Finding("ok", "disk", f"{gb:,.0f} GB free in this folder")


def check_packages(needed: Sequence[Requirement], version: Version) -> list[Finding]:
    """The core requirements: one line for all that fit, one for each that does not."""
    core = [item for item in needed if not item.extra and item.name != "torch"]
    if not core:
        return [Finding("warn", "packages", "vacsr has no metadata here — install it: pip install -e .")]
    found = {item: version(item.name) for item in core}
    good = [f"{item.name} {has}" for item, has in found.items() if has and item.fits(has)]
    bad = [
        Finding("fail", item.name, f"{has or 'absent'} — pip install --upgrade '{item.spec()}'")
        for item, has in found.items()
        if not (has and item.fits(has))
    ]
    return [*([Finding("ok", "packages", ", ".join(good))] if good else []), *bad]


def check_extras(needed: Sequence[Requirement], version: Version) -> list[Finding]:
    """The optional extras: which are here, and how to get the others."""
    groups: dict[str, list[Requirement]] = {}
    for item in needed:
        if item.extra in _PURPOSE:
            groups.setdefault(item.extra, []).append(item)
    return [check_extra(name, groups[name], version) for name in _PURPOSE if name in groups]


def check_extra(name: str, items: Sequence[Requirement], version: Version) -> Finding:
    """One extra; absent is no fault."""
    found = {item: has for item in items if (has := version(item.name))}
    if len(found) < len(items):
        return Finding("ok", name, f"not installed; for {_PURPOSE[name]}: pip install 'vacsr[{name}]'")
    shown = ", ".join(f"{item.name} {has}" for item, has in found.items())
    unfit = {item: has for item, has in found.items() if not item.fits(has)}
    if not unfit:
        return Finding("ok", name, shown)
    first, last = _NEEDS_TORCHVISION
    trap = any(item.name == "transformers" and first <= _release(has) < last for item, has in unfit.items())
    why = "needs torchvision for its image processors" if trap else "is outside the range that vacsr is made for"
    return Finding("warn", name, f"{shown} {why} — pip install --upgrade '{next(iter(unfit)).spec()}'")


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version that order it.

    >>> _release("2.13.0+cpu"), _release("5.18.0.dev0")
    ((2, 13, 0), (5, 18, 0))
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
