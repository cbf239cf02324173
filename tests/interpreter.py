"""How kernels are tested: in Triton's interpreter, which runs them without a GPU, slowly; and in CUDA graphs.

The interpreter must be switched on before Triton is imported, so the tests that want it run in a process of their own:
they are named `test_interpreted_…`, and tests of test_kernel.py and test_latents.py call :func:`run_interpreted`.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by a test ..._in_the_interpreter")
_without_gpu = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA GPU")


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test only with ``-m gpu``, and only where there is a GPU."""
    marked: Callable[..., None] = pytest.mark.gpu(_without_gpu(test))
    return marked


def run_interpreted(*paths: str, marks: str = "not slow and not gpu") -> None:
    """Run the interpreted tests of files below tests/ that have these marks, in one process; their failure is ours."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    if INTERPRETED:
        pytest.skip("the interpreter is on already")
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", *(str(tests / path) for path in paths), "-k", "interpreted", "-m", marks]
    command += ["-p", "no:cacheprovider", "-n", "0"]  # one process: this one runs beside others
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tests.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compiled_for_hopper(
    function: Any, kinds: dict[str, str], constants: dict[str, object], cache: Path, **options: int
) -> Any:
    """A kernel compiled for a Hopper GPU, which need not be there; ``kinds`` are its arguments' types."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    order = function.arg_names
    kinds = {name: kinds.get(name, "constexpr") for name in order}
    fixed = {(order.index(name),): value for name, value in constants.items()}
    aligned = {(order.index(name),): [["tt.divisibility", 16]] for name, kind in kinds.items() if kind[0] == "*"}
    made_by = GluonASTSource if function.is_gluon() else triton.compiler.ASTSource
    source = made_by(fn=function, signature=kinds, constexprs=fixed, attrs=aligned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, "enable_fp_fusion": True})


def captured(step: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """The results of a step as a CUDA graph, and how to compute them again in place."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return results, graph.replay


def without_waiting(step: Callable[[], object]) -> None:
    """Call it once more after a first call that compiles, where waiting for the device is an error."""
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
