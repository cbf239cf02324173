"""The GPO kernels against nn.GRU on packed sequences and torch.sort."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vacsr import kernels
from vacsr.backbones.base import Tokens
from vacsr.backbones.heads import GeneralizedPooling

from ..interpreter import captured, interpreted, on_gpu, without_waiting

pytest.importorskip("triton", reason="triton is not installed: pip install triton")
from vacsr.kernels import gpo

SIZES = [(128, 257, 512), (128, 50, 1024), (16, 197, 1024), (7, 33, 65), (3, 1, 1)]


def _packed_states(gru: nn.GRU, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The states of torch's own GRU: forward [B, L, H] and backward [B, L, H], both 0 beyond the end."""
    every = positions.expand(len(lengths), -1, -1)
    packed = pack_padded_sequence(every, lengths.cpu(), batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=len(positions))
    return states[..., : gru.hidden_size], states[..., gru.hidden_size :]


def _sorted_sum(values: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """By sorting, ties in the order of the tokens: masked tokens go to the end and count for nothing."""
    low = values.float().masked_fill(~mask.unsqueeze(-1), -torch.inf)
    ranked = low.sort(dim=1, descending=True, stable=True).values
    past_end = torch.arange(mask.shape[1], device=mask.device) >= mask.sum(1, keepdim=True)
    return (ranked.masked_fill(past_end.unsqueeze(-1), 0.0) * weights.unsqueeze(-1)).sum(1)


def _check_states(lengths: Tensor, *, positions: int, width: int = 32, tolerance: float = 1e-5) -> None:
    """States and all gradients against a packed GRU in float64."""
    torch.manual_seed(0)
    device = lengths.device
    gru = nn.GRU(8, width, batch_first=True, bidirectional=True).to(device)
    exact = nn.GRU(8, width, batch_first=True, bidirectional=True).to(device).double()
    exact.load_state_dict({name: value.double() for name, value in gru.state_dict().items()})
    codes = torch.randn(positions, 8, device=device, requires_grad=True)
    exact_codes = codes.detach().double().requires_grad_()
    forwards, backwards = gpo.gru_states(gru, codes, lengths=lengths)
    ahead, behind = _packed_states(exact, exact_codes, lengths)
    longest = int(lengths.argmax())
    torch.testing.assert_close(forwards.double()[: lengths.max()], ahead[longest, : lengths.max()], atol=1e-5, rtol=0)
    torch.testing.assert_close(backwards.double(), behind, atol=1e-5, rtol=0)
    push_ahead, push_behind = torch.randn_like(forwards), torch.randn_like(backwards) / len(lengths)
    push_ahead[int(lengths.max()) :] = 0
    mine = torch.autograd.grad(
        (forwards * push_ahead).sum() + (backwards * push_behind).sum(), [codes, *gru.parameters()]
    )
    theirs = torch.autograd.grad(
        (ahead[longest] * push_ahead).sum() + (behind * push_behind).sum(), [exact_codes, *exact.parameters()]
    )
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, atol=tolerance * float(other.abs().max()), rtol=0)


def _check_sum(values: Tensor, mask: Tensor, weights: Tensor, *, tolerance: float = 1e-5) -> None:
    """The sum and both gradients; a gradient in half precision is the float32 one, rounded."""
    inputs = values.detach().requires_grad_(), weights.detach().requires_grad_()
    reference = values.detach().float().requires_grad_(), weights.detach().requires_grad_()
    out, expected = gpo.ranked_sum(inputs[0], mask, inputs[1]), _sorted_sum(reference[0], mask, reference[1])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=tolerance * (1 + float(expected.detach().abs().max())), rtol=0)
    push = torch.randn_like(out)
    d_values, d_weights = torch.autograd.grad(out, inputs, push)
    e_values, e_weights = torch.autograd.grad(expected, reference, push)
    assert d_values.dtype == values.dtype
    torch.testing.assert_close(
        d_values, e_values.to(values.dtype), atol=1e-6, rtol=1e-2 if values.itemsize == 2 else 1e-6
    )
    torch.testing.assert_close(d_weights, e_weights, atol=tolerance * (1 + float(e_weights.abs().max())), rtol=0)


def _draw(items: int, length: int, channels: int, *, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """Values with many ties, masks with holes (never all masked), weights of any sign."""
    generator = torch.Generator().manual_seed(items * length + channels)
    values = torch.randn(items, length, channels, generator=generator).mul(4).round().div(4)
    mask = torch.rand(items, length, generator=generator) > 0.3
    mask[:, length // 2] = True
    weights = torch.randn(items, length, generator=generator)
    return values.to(device, dtype), mask.to(device), weights.to(device)


@interpreted
@pytest.mark.parametrize("lengths", [[5], [7, 1, 4], [2, 2]])
def test_interpreted_states_equal_a_packed_gru(lengths: list[int]) -> None:
    _check_states(torch.tensor(lengths), positions=7, width=16)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 37, 5), (1, 32, 70), (2, 1, 1), (1, 66, 3)])
def test_interpreted_sums_equal_sorting(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    _check_sum(*_draw(*shape, dtype=dtype))


@interpreted
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_interpreted_ranks_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 40))
    numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38])
    row = data.draw(st.lists(numbers, min_size=length, max_size=length))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    values = torch.tensor(row)
    _, rank, _ = torch.ops.vacsr.ranked_sum(values.view(1, -1, 1), mask.unsqueeze(0), torch.zeros(1, length))
    order = sorted((i for i in range(length) if mask[i]), key=lambda i: -row[i])  # python's sort is stable
    expected = torch.full((length,), -1, dtype=torch.int16)
    expected[order] = torch.arange(len(order), dtype=torch.int16)
    assert rank.flatten().tolist() == expected.tolist()


@interpreted
@pytest.mark.parametrize("worst", [float("nan"), float("inf"), float("-inf")])
def test_interpreted_sums_show_values_that_are_not_finite(worst: float) -> None:
    values, mask, weights = torch.randn(1, 9, 2), torch.ones(1, 9, dtype=torch.bool), torch.full((1, 9), 0.1)
    values[0, 4, 0] = worst
    out = gpo.ranked_sum(values, mask, weights)
    torch.testing.assert_close(out, _sorted_sum(values, mask, weights), equal_nan=True)


@interpreted
def test_interpreted_items_without_tokens_are_zero() -> None:
    gru = nn.GRU(8, 16, batch_first=True, bidirectional=True)
    _, backwards = gpo.gru_states(gru, torch.randn(3, 8), lengths=torch.tensor([0, 3]))
    assert not backwards[0].any()
    assert backwards[1].all()
    values, weights = torch.full((2, 3, 4), torch.nan, requires_grad=True), torch.ones(2, 3)
    out = gpo.ranked_sum(values, torch.zeros(2, 3, dtype=torch.bool), weights)
    assert torch.equal(out, torch.zeros(2, 4))
    assert torch.equal(torch.autograd.grad(out.sum(), values)[0], torch.zeros(2, 3, 4))
    assert gpo.ranked_sum(values[:0], torch.ones(0, 3, dtype=torch.bool), weights[:0]).shape == (0, 4)


@interpreted
@pytest.mark.slow
def test_interpreted_operators_keep_torchs_rules() -> None:
    values, mask, weights = _draw(2, 5, 3, dtype=torch.float32)
    every = torch.ones_like(mask)  # positions past an item's last rank are never written, and would be compared
    torch.library.opcheck(torch.ops.vacsr.ranked_sum, (values.requires_grad_(), every, weights.requires_grad_()))
    gates, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((2, 5, 48), (2, 48, 16), (2, 48)))
    torch.library.opcheck(torch.ops.vacsr.bigru, (gates, torch.tensor([5, 5, 2], dtype=torch.int32), weight, bias))


def _gradients(pool: Callable[[Tokens], Tensor], module: nn.Module, values: Tensor, mask: Tensor) -> list[Tensor]:
    values = values.detach().requires_grad_()
    out = pool(Tokens(values, mask, mask.new_zeros(len(mask), dtype=torch.int64)))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [values, *module.parameters()])]


@interpreted
@pytest.mark.slow
def test_interpreted_kernels_are_opaque_to_the_compiler() -> None:
    torch.manual_seed(0)
    pool, (values, mask, _) = GeneralizedPooling(), _draw(2, 6, 3, dtype=torch.float32)
    compiled = torch.compile(pool, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(_gradients(compiled, pool, values, mask), _gradients(pool, pool, values, mask))


def test_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, meta = (torch.device(name) for name in ("cpu", "cuda", "meta"))
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert [kernels.available(device) for device in (cpu, cuda, meta)] == [False, True, False]
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert [kernels.available(device) for device in (cpu, cuda, meta)] == [True, True, False]
    monkeypatch.setattr(kernels, "TRITON", False)
    assert not any(kernels.available(device) for device in (cpu, cuda, meta))


@on_gpu
@pytest.mark.parametrize(("items", "positions"), [(128, 257), (128, 50), (3, 1)])
def test_states_equal_a_packed_gru(items: int, positions: int) -> None:
    lengths = torch.randint(1, positions + 1, (items,), generator=torch.Generator().manual_seed(0))
    lengths[0] = positions
    _check_states(lengths.cuda(), positions=positions, tolerance=3e-5)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SIZES)
def test_sums_equal_sorting(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    _check_sum(*_draw(*shape, dtype=dtype, device="cuda"))


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_equal_eager_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool, (values, mask, _) = GeneralizedPooling().cuda(), _draw(32, 257, 128, dtype=dtype, device="cuda")
    compiled = torch.compile(pool, fullgraph=True)
    results = _gradients(compiled, pool, values, mask), _gradients(pool, pool, values, mask)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3 * float(other.abs().max()), rtol=1e-2)


@on_gpu
def test_a_graph_replays_with_changed_inputs() -> None:
    torch.manual_seed(0)
    pool = GeneralizedPooling().cuda()
    first, second = (_draw(items, 50, 64, dtype=torch.float32, device="cuda")[:2] for items in (8, 16))
    buffers = first[0].clone(), first[1].clone()
    results, replay = captured(lambda: _gradients(pool, pool, *buffers))
    for inputs in (first, (second[0][:8], second[1][:8])):
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        replay()
        for one, other in zip(results, _gradients(pool, pool, *inputs), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


@on_gpu
def test_the_kernels_never_wait_for_the_device() -> None:
    pool, (values, mask, _) = GeneralizedPooling().cuda(), _draw(4, 50, 64, dtype=torch.float32, device="cuda")
    without_waiting(lambda: _gradients(pool, pool, values, mask))
