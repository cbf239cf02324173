"""What several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The same as one CUDA graph, which does not keep what it works on: the step does."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_kept: Callable[[], object] = step) -> None:
        graph.replay()

    return replay
