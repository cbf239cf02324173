"""GPO pooling: torch's own operations (a packed nn.GRU, torch.sort) beside the Triton kernels, in one run.

    python benchmarks/gpo.py [--rounds 30] [--dtype fp32 bf16] [--json FILE]

Three parts: `weights` (recurrence over ranks to one weight per rank), `sum` (weighted sum of sorted values) and `whole`
(both), forward alone and forward with backward. `graph` is the kernels' whole pass replayed as a CUDA graph; torch's
cannot be captured, since packing reads the lengths on the host. Lengths are drawn between L/2 and L, masks have holes.
Medians of interleaved rounds; tests/kernels/test_gpo.py compares the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from _common import captured, finish, medians, need_gpu, parser
from vacsr import kernels
from vacsr.bench import BenchResult, describe_device

SHAPES = ((128, 257, 512), (128, 50, 1024), (128, 197, 1024), (128, 40, 512))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Inputs(NamedTuple):
    """What one shape is timed on."""

    gru: nn.GRU
    score: nn.Linear
    positions: Tensor
    values: Tensor
    mask: Tensor
    weights: Tensor


def draw(items: int, length: int, channels: int, *, dtype: torch.dtype) -> Inputs:
    """Random values and weights; each item has its own number of real tokens, at random positions."""
    torch.manual_seed(0)
    gru, score = nn.GRU(32, 32, batch_first=True, bidirectional=True).cuda(), nn.Linear(32, 1, bias=False).cuda()
    values = torch.randn(items, length, channels, device="cuda", dtype=dtype, requires_grad=True)
    lengths = torch.randint(length // 2, length + 1, (items, 1), device="cuda")
    mask = torch.rand(items, length, device="cuda").argsort(1).argsort(1) < lengths
    weights = torch.rand(items, length, device="cuda").softmax(1).requires_grad_()
    return Inputs(gru, score, torch.randn(length, 32, device="cuda"), values, mask, weights)


def softmax_over_ranks(states: Tensor, score: nn.Linear, lengths: Tensor) -> Tensor:
    """[B, L, 32], [B] -> [B, L]"""
    past_end = torch.arange(states.shape[1], device=states.device) >= lengths.unsqueeze(1)
    return torch.softmax((score(states).squeeze(-1) / 0.1).masked_fill(past_end, -torch.inf), dim=-1)


def torch_weights(x: Inputs) -> Tensor:
    """A packed bidirectional GRU, directions averaged."""
    lengths = x.mask.sum(1)
    every = x.positions.expand(len(lengths), -1, -1)
    packed = pack_padded_sequence(every, lengths.cpu(), batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(x.gru(packed)[0], batch_first=True, total_length=len(x.positions))
    return softmax_over_ranks((states[..., :32] + states[..., 32:]) / 2, x.score, lengths)


def kernel_weights(x: Inputs) -> Tensor:
    """The recurrence in one launch."""
    from vacsr.kernels import gpo

    lengths = x.mask.sum(1)
    forwards, backwards = gpo.gru_states(x.gru, x.positions, lengths=lengths)
    return softmax_over_ranks((forwards + backwards) / 2, x.score, lengths)


def torch_sum(x: Inputs, weights: Tensor) -> Tensor:
    """Sort along the tokens, weigh."""
    ranked = x.values.masked_fill(~x.mask.unsqueeze(-1), -torch.inf).sort(dim=1, descending=True, stable=True).values
    past_end = torch.arange(x.mask.shape[1], device="cuda") >= x.mask.sum(1, keepdim=True)
    return torch.einsum("blc,bl->bc", ranked.masked_fill(past_end.unsqueeze(-1), 0.0).float(), weights)


def kernel_sum(x: Inputs, weights: Tensor) -> Tensor:
    """Count ranks, weigh."""
    from vacsr.kernels import gpo

    return gpo.ranked_sum(x.values, x.mask, weights)


Ways = dict[str, Callable[[], Tensor]]


def parts(x: Inputs) -> dict[str, tuple[Ways, list[Tensor]]]:
    """Each part by torch and by the kernels, and the tensors that it has gradients for."""
    net = [*x.gru.parameters(), *x.score.parameters()]
    weights: Ways = {"torch": lambda: torch_weights(x), "kernels": lambda: kernel_weights(x)}
    total: Ways = {"torch": lambda: torch_sum(x, x.weights), "kernels": lambda: kernel_sum(x, x.weights)}
    whole: Ways = {
        "torch": lambda: torch_sum(x, torch_weights(x)),
        "kernels": lambda: kernel_sum(x, kernel_weights(x)),
    }
    return {"weights": (weights, net), "sum": (total, [x.values, x.weights]), "whole": (whole, [x.values, *net])}


def with_backward(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    """Forward, then the gradient of a weighted sum of the outputs."""
    push = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), leaves, push)


def timed(x: Inputs, rounds: int) -> list[dict[str, object]]:
    """Every part forward, then forward with backward."""
    rows = []
    for part, (ways, leaves) in parts(x).items():
        both = {name: with_backward(way, leaves) for name, way in ways.items()}
        for name, steps in (("forward", dict(ways)), ("forward + backward", both)):
            if part == "whole":
                steps = {**steps, "graph": captured(steps["kernels"])}
            times = medians(steps, device=x.values.device, rounds=rounds)
            ratios = {f"torch/{way}": times["torch"] / ms for way, ms in times.items() if way != "torch"}
            rows.append({"way": part, "pass": name, **times, **ratios})
    return rows


def main() -> None:
    """Time every shape in every precision."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    args = options.parse_args()
    available = torch.cuda.is_available() and kernels.available(torch.device("cuda"))
    device = need_gpu("the comparison of GPO's kernels", available=available)
    rows = [
        {"dtype": dtype, "shape": "×".join(map(str, shape)), **row}
        for dtype in args.dtype
        for shape in SHAPES
        for row in timed(draw(*shape, dtype=DTYPES[dtype]), args.rounds)
    ]
    columns = {
        "dtype": "dtype", "shape": "B×L×D", "way": "part", "pass": "pass", "torch": "torch, ms",
        "kernels": "kernels, ms", "torch/kernels": "ratio", "graph": "graph, ms", "torch/graph": "ratio",
    }  # fmt: skip
    finish(BenchResult("gpo", describe_device(device), {"rounds": args.rounds}, rows, columns), args.json)


if __name__ == "__main__":
    main()
