import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from vacsr.noise import PairNoise, RowNoise, Stream, mix64, of_member

MASK = (1 << 64) - 1
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)
KINDS: dict[str, Callable[[PairNoise, int], Tensor]] = {
    "gumbel": lambda noise, lanes: noise.gumbel(lanes),
    "normal": lambda noise, lanes: noise.normal(lanes),
}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def python_mix(z: int) -> int:
    """The finaliser of SplitMix64 as its authors print it, on unsigned Python integers."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def python_at(key: int, position: int) -> int:
    """Output number ``position`` of the SplitMix64 stream that starts at key·γ."""
    return python_mix(((key + position) * GAMMA) & MASK)


def python_words(*, seed: int, stream: int, step: int, positions: list[int], lanes: int) -> list[int]:
    """The 64-bit words of the item at these positions."""
    key = python_at(python_mix((seed * GAMMA + stream * MIX_2) & MASK), step)
    for position in positions:
        key = python_at(key, position)
    return [python_at(key, lane) for lane in range(1, lanes + 1)]


def unit(bits: int) -> float:
    return (bits + 0.5) / (1 << 23)


def unsigned(x: Tensor) -> list[int]:
    return [value & MASK for value in x.tolist()]


def noise(*, seed: int = 0, step: int = 0, rows: int | Tensor = 128, cols: int | Tensor = 128) -> PairNoise:
    rows, cols = (torch.arange(n) if isinstance(n, int) else n for n in (rows, cols))
    return PairNoise(seed, torch.tensor(step), rows, cols)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def test_mix64_gives_the_published_stream() -> None:
    # The five values that implementations of SplitMix64 are checked with, from seed 1234567.
    states = torch.tensor([signed((1234567 + lane * GAMMA) & MASK) for lane in range(1, 6)])
    assert unsigned(mix64(states)) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(("seed", "step", "row", "col"), [(0, 0, 0, 0), (7, 3, 2, 5), (-1, 10**12, 40_000, 99_999)])
def test_the_draws_of_a_pair_follow_from_its_position(seed: int, step: int, row: int, col: int) -> None:
    pair = noise(seed=seed, step=step, rows=torch.tensor([row]), cols=torch.tensor([col]))
    words = python_words(seed=seed, stream=Stream.GUMBEL, step=step, positions=[row, col], lanes=3)
    expected = [-math.log(-math.log(unit(word >> 41))) for word in words]
    torch.testing.assert_close(pair.gumbel(3)[0, 0], torch.tensor(expected), atol=1e-4, rtol=1e-4)

    words = python_words(seed=seed, stream=Stream.NORMAL, step=step, positions=[row, col], lanes=2)
    radius = [math.sqrt(-2 * math.log(unit(word >> 41))) for word in words]
    angle = [2 * math.pi * unit(word & ((1 << 23) - 1)) for word in words]
    both = [r * math.cos(a) for r, a in zip(radius, angle, strict=True)]
    both += [r * math.sin(a) for r, a in zip(radius, angle, strict=True)]
    torch.testing.assert_close(pair.normal(4)[0, 0], torch.tensor(both), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pair.normal(3)[0, 0], torch.tensor(both[:3]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("stream", [Stream.IMAGE, Stream.TEXT])
def test_the_draws_of_a_row_follow_from_its_position(stream: Stream) -> None:
    drawn = RowNoise(5, torch.tensor(9), torch.tensor([0, 3, 70_000]), stream).uniform(4)
    for row, position in zip(drawn, (0, 3, 70_000), strict=True):
        words = python_words(seed=5, stream=stream, step=9, positions=[position], lanes=4)
        assert row.tolist() == [unit(word >> 41) for word in words]


@PROPERTY
@given(
    st.integers(-5, 1 << 40),
    st.integers(0, 1 << 40),
    st.lists(st.integers(0, 11), min_size=1, max_size=6),
    st.lists(st.integers(0, 8), min_size=1, max_size=6),
    st.integers(1, 5),
    st.sampled_from(sorted(KINDS)),
)
def test_any_sub_block_sees_the_numbers_of_the_whole(
    seed: int, step: int, rows: list[int], cols: list[int], lanes: int, kind: str
) -> None:
    whole = KINDS[kind](noise(seed=seed, step=step, rows=12, cols=9), lanes)
    part = noise(seed=seed, step=step, rows=torch.tensor(rows), cols=torch.tensor(cols))
    assert whole.shape == (12, 9, lanes)
    assert torch.equal(KINDS[kind](part, lanes), whole[rows][:, cols])


@kinds
def test_a_seed_or_step_as_tensor_equals_the_integer(kind: str) -> None:
    expected = KINDS[kind](noise(seed=-3, step=77, rows=5, cols=4), 6)
    for seed, step in ((-3, torch.tensor(77)), (torch.tensor(-3), 77), (torch.tensor(-3), torch.tensor(77))):
        tensor = PairNoise.create(seed=seed, step=step, rows=5, cols=4)
        assert torch.equal(KINDS[kind](tensor, 6), expected)
    rows, step = torch.arange(4), torch.tensor(77)
    assert torch.equal(
        RowNoise(-3, step, rows, Stream.IMAGE).uniform(3),
        RowNoise(torch.tensor(-3), step, rows, Stream.IMAGE).uniform(3),
    )


def test_a_step_tensor_can_be_advanced_in_place() -> None:
    step = torch.tensor(0)
    moving = PairNoise.create(seed=1, step=step, rows=5, cols=4)
    step.add_(3)
    assert torch.equal(moving.normal(4), noise(seed=1, step=3, rows=5, cols=4).normal(4))


def test_no_two_kinds_of_draw_share_a_stream() -> None:
    """An item's stream, plus one kind of draw, plus the second network's: every sum is another number."""
    kinds = [stream for stream in Stream if stream >= 16]
    items = [stream for stream in Stream if 3 <= stream < 16]
    networks = (0, Stream.SECOND_NETWORK)
    purposes = [0, *(kind for kind in kinds if kind != Stream.SECOND_NETWORK)]
    sums = [item + purpose + network for item in items for purpose in purposes for network in networks]
    numbers = [Stream.GUMBEL, Stream.NORMAL, *sums]
    assert len(set(numbers)) == len(numbers) == 2 + 5 * 8 * 2
    assert len(Stream.__members__) == len(Stream), "two names of one number"
    assert [int(stream) for stream in Stream] == [
        *(1, 2, 3, 4, 5, 6, 10), *(16 * n for n in (1, 2, 3, 4, 5, 64, 101, 102)),
    ], "another number would change the draws of every run"  # fmt: skip


@pytest.mark.slow
def test_a_member_has_no_draws_of_a_neighbouring_seed() -> None:
    """Runs of seeds 0, 1, 2 … would share the noise of their members."""
    rows, step = torch.arange(3), torch.tensor(0)
    seeds = [RowNoise(seed, step, rows, Stream.IMAGE).uniform(4) for seed in range(20)]
    assert of_member(RowNoise(0, step, rows, Stream.IMAGE), 0).uniform(4).equal(seeds[0])
    for number in (1, 2, 3):
        member = of_member(RowNoise(0, step, rows, Stream.IMAGE), number).uniform(4)
        assert not any(member.equal(other) for other in seeds)


def test_streams_compile_without_a_graph_break() -> None:
    def draws(step: Tensor) -> tuple[Tensor, Tensor]:
        rows = RowNoise(1, step, torch.arange(3), Stream.IMAGE).other(Stream.CROP).uniform(2)
        return rows, PairNoise.create(seed=1, step=step, rows=2, cols=2).normal(4)

    compiled = torch.compile(draws, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(compiled(torch.tensor(5)), draws(torch.tensor(5)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "name", "variance"), [("normal", "norm", 1.0), ("gumbel", "gumbel_r", math.pi**2 / 6)]
)
def test_distributions(kind: str, name: str, variance: float) -> None:
    x = KINDS[kind](noise(seed=3, step=5), 8).flatten().double()
    assert torch.isfinite(x).all()
    assert abs(float(x.mean()) - (0.5772156649015329 if kind == "gumbel" else 0.0)) < 4 * math.sqrt(variance / len(x))
    assert abs(float(x.var()) - variance) < 0.03  # kurtosis 5.4 at most: standard error of the variance ≈ 0.0095
    assert stats.kstest(x.numpy(), name).pvalue > 1e-3


def test_uniform_is_uniform_and_strictly_inside() -> None:
    x = RowNoise(3, torch.tensor(5), torch.arange(4096), Stream.IMAGE).uniform(32)
    assert x.dtype == torch.float32
    assert 0 < x.min() < 1e-4
    assert 1 - 1e-4 < x.max() < 1
    assert stats.kstest(x.flatten().double().numpy(), "uniform").pvalue > 1e-3
