"""The fused kernels against the loss written with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from vacsr import kernels
from vacsr.adapter import AdapterConfig, VariationalAdapter
from vacsr.distributions import kl_to_standard_normal, mixture_draw
from vacsr.errors import EnvironmentProblem, UsageError
from vacsr.methods.vacsr import Vacsr
from vacsr.noise import PairNoise
from vacsr.objective import ObjectiveConfig, VacsrObjective
from vacsr.strips import PairLoss, StripLoss, compile_pairs

from ..interpreter import (
    INTERPRETED,
    captured,
    compiled_for_hopper,
    interpreted,
    on_gpu,
    run_interpreted,
    without_waiting,
)
from ..losses import Fields, Result, assert_same, make_vacsr, run_loss, sides

pytest.importorskip("triton", reason="triton is not installed: pip install triton")
from vacsr.kernels import latents


class Reading(NamedTuple):
    """How the kernels read the heads' numbers."""

    clamp: float = 10.0
    bounded: bool = False
    squash: bool = True


DEFAULT = Reading()


@pytest.mark.slow
def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted("kernels/test_gpo.py", "kernels/test_latents.py")


@pytest.mark.slow
@pytest.mark.long
def test_the_operators_in_the_interpreter() -> None:
    run_interpreted("kernels/test_gpo.py", "kernels/test_latents.py", marks="slow and not gpu")


# ------------------------------------------------------------------------------------------------- one pair at a time


class Latents(NamedTuple):
    """What the operator gives."""

    z: Tensor
    kl: Tensor
    inverse: Tensor
    log_variance: Tensor


class Inputs(NamedTuple):
    """Of the operator."""

    heads: Tensor
    weights: Tensor
    sigma_weights: Tensor


def make_inputs(
    pairs: int, components: int, latent: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Inputs:
    generator = torch.Generator().manual_seed(pairs * 31 + components * 7 + latent)
    heads = torch.randn(pairs, 2 * components * latent, generator=generator).mul(2.0)
    mixing = torch.randn(2, pairs, components, generator=generator).softmax(dim=-1)
    kinds = (dtype, torch.float32, torch.float32)
    return Inputs(*(x.to(device, kind).requires_grad_() for x, kind in zip((heads, *mixing), kinds, strict=True)))


def make_noise(pairs: int, *, seed: int = 3, device: str = "cpu") -> PairNoise:
    return PairNoise.create(seed=seed, step=5, rows=1, cols=pairs, device=torch.device(device))


def by_kernel(inputs: Inputs, noise: PairNoise, reading: Reading) -> Latents:
    heads, weights, sigma_weights = inputs
    keys = noise.normal_keys().flatten()
    return Latents(*latents.pair_latents(heads, weights, sigma_weights=sigma_weights, keys=keys, **reading._asdict()))


def by_torch(inputs: Inputs, noise: PairNoise, reading: Reading) -> Latents:
    """In float64, from the functions that the loss is otherwise made of."""
    heads, weights, sigma_weights = (x.double() for x in inputs)
    pairs, components = weights.shape
    mean, raw = heads.view(pairs, 2, components, -1).unbind(1)
    log_var = raw.clamp(-reading.clamp, reading.clamp)
    if reading.bounded:
        log_var = functional.logsigmoid(log_var)
    normal = noise.normal(mean[0].numel())[0].view_as(mean).double()
    mixed = (sigma_weights.unsqueeze(-1) * log_var).sum(dim=1)
    v = mixed.sigmoid() if reading.squash else mixed.exp()
    return Latents(
        mixture_draw(mean, log_var, weights=weights, noise=normal),
        kl_to_standard_normal(mean, log_var),
        (0.5 / v).sum(dim=-1),
        (0.5 * v.log()).sum(dim=-1),
    )


def check(inputs: Inputs, noise: PairNoise, reading: Reading, *, within: float) -> None:
    """All outputs and gradients, relative to the largest entry of each."""
    copies = Inputs(*(x.detach().clone().requires_grad_() for x in inputs))
    outputs, expected = by_kernel(inputs, noise, reading), by_torch(copies, noise, reading)
    assert outputs.z.dtype == inputs.heads.dtype
    assert {x.dtype for x in outputs[1:]} == {torch.float32}
    torch.manual_seed(0)
    pushes = [torch.randn_like(x) for x in outputs]
    ours = torch.autograd.grad(outputs, inputs, pushes)
    theirs = torch.autograd.grad(expected, copies, [push.double() for push in pushes])
    for one, other in zip([*outputs, *ours], [*expected, *theirs], strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().abs().max()) <= within * max(1.0, float(other.detach().abs().max()))


@interpreted
@pytest.mark.parametrize(("components", "latent"), [(1, 6), (1, 7), (2, 33), (3, 5), (4, 3)])
def test_interpreted_noise_is_that_of_the_contract(components: int, latent: int) -> None:
    """With means 0 and variances 1, z of one component is its noise; one wrong bit would show."""
    noise = PairNoise.create(seed=2**62 + 5, step=2**40, rows=1, cols=2)
    expected = noise.normal(components * latent).view(2, components, latent)
    for k in range(components):
        one = functional.one_hot(torch.full((2,), k), components).float()
        outputs = by_kernel(Inputs(torch.zeros(2, 2 * components * latent), one, one), noise, DEFAULT)
        torch.testing.assert_close(outputs.z, expected[:, k], atol=3e-6, rtol=0)


@interpreted
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_interpreted_latents_of_any_shape(data: st.DataObject) -> None:
    reading = Reading(
        clamp=data.draw(st.sampled_from([10.0, 1.5])), bounded=data.draw(st.booleans()),
        squash=data.draw(st.booleans()),
    )  # fmt: skip
    pairs, components = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    inputs = make_inputs(pairs, components, data.draw(st.integers(1, 70)))
    check(inputs, make_noise(pairs), reading, within=1e-5)


@interpreted
@pytest.mark.parametrize("bounded", [False, True])
def test_interpreted_clamped_log_variances_have_no_gradient(bounded: bool) -> None:
    """Beyond the clamp there is none; at the clamp itself there is, as in torch."""
    inputs = make_inputs(2, 2, 8)
    raw = torch.tensor([-9.0, -1.5, -1.0, 0.0, 1.0, 1.5, 1.5001, 9.0])
    with torch.no_grad():
        inputs.heads.view(2, 2, 2, 8)[:, 1] = raw
    check(inputs, make_noise(2), Reading(clamp=1.5, bounded=bounded), within=1e-5)
    gradient = torch.autograd.grad([x.sum() for x in by_kernel(inputs, make_noise(2), Reading(1.5, bounded))], inputs)
    assert ((gradient[0].view(2, 2, 2, 8)[:, 1] != 0) == (raw.abs() <= 1.5)).all()


@interpreted
def test_interpreted_half_precision_and_no_pairs() -> None:
    """The interpreter cuts where hardware rounds to bfloat16."""
    check(make_inputs(2, 2, 20, dtype=torch.bfloat16), make_noise(2), DEFAULT, within=2.0**-7)
    inputs = make_inputs(0, 2, 9)
    outputs = by_kernel(inputs, make_noise(0), DEFAULT)
    assert outputs.z.shape == (0, 9)
    assert torch.autograd.grad(outputs.z.sum(), inputs.heads)[0].shape == (0, 36)


@interpreted
def test_interpreted_bad_numbers_stay_with_their_pair() -> None:
    inputs = make_inputs(3, 2, 9)
    expected = by_kernel(inputs, make_noise(3), DEFAULT)
    with torch.no_grad():
        inputs.heads[1, 4], inputs.heads[1, 30] = torch.nan, torch.inf
    outputs = by_kernel(inputs, make_noise(3), DEFAULT)
    assert bool(outputs.z[1, 4].isnan())
    assert bool(outputs.kl[1, 0].isnan())
    gradient = torch.autograd.grad([x.sum() for x in outputs], inputs.heads)[0]
    for row in (0, 2):
        assert all(torch.equal(one[row], other[row]) for one, other in zip(outputs, expected, strict=True))
        assert bool(gradient[row].isfinite().all())
    assert gradient[1, 30] == 0, "clamped"


@interpreted
@pytest.mark.slow
@pytest.mark.long
def test_interpreted_operators_keep_torchs_rules() -> None:
    inputs = make_inputs(2, 2, 5)
    arguments = (*inputs, make_noise(2).normal_keys().flatten(), *DEFAULT)
    torch.library.opcheck(torch.ops.vacsr.pair_latents, arguments)


# -------------------------------------------------------------------------------------------------- the whole loss


def make(fused: bool | str, adapter: Fields = {}, objective: Fields = {}, *, dim: int = 9) -> Vacsr:  # noqa: B006
    return make_vacsr(adapter, {**objective, "fused": fused}, dim=dim)


def run(method: Vacsr, loss: PairLoss, *, count: int = 3, device: str = "cpu") -> Result:
    v, t = sides(count, method.adapter.dim, device=device)
    return run_loss(loss, method, (torch.arange(count) // 2).to(device), v, t)


CASES: list[tuple[Fields, Fields]] = [
    ({}, {}),
    ({"components": 1, "decoder_hidden": 0, "log_var_clamp": 0.4}, {"hard_negatives": 3}),
    ({"components": 3, "mixing": "head", "latent": 6}, {"negative_rule": "literal_max", "negative_target": 0}),
    ({"variance": "sigmoid"}, {"sigma_component": "alpha", "sigma_reduction": "sum", "gumbel_temperature": 0.4}),
    ({"residual": "none", "trunk_norm": True}, {"sigma_variance": "exp", "gumbel_hard": True, "hard_negatives": 2}),
]


every_case = pytest.mark.parametrize("case", CASES, ids=["default", "one", "head", "bounded", "hard"])


@interpreted
@every_case
def test_interpreted_loss_and_gradients_are_those_of_torch(case: tuple[Fields, Fields]) -> None:
    """Whole and in strips."""
    ours, theirs = make("auto", *case), make(False, *case)
    expected = run(theirs, theirs.loss)
    for loss in (ours.loss, StripLoss(ours.loss, ours, 2)):
        assert_same(run(ours, loss), expected, within=1e-5)


@interpreted
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("strips", [False, True])
def test_interpreted_kernels_are_opaque_to_the_compiler(strips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph forward, one backward, and no kernel that runs twice."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    kernels: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        kernels.extend(str(node.target) for node in graph.graph.nodes if "vacsr." in str(node.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **rest: plain(f, backend=backend, fullgraph=True, **rest))
    method = make(True)
    loss: PairLoss = StripLoss(method.loss, method, 1) if strips else method.loss
    assert_same(run(method, compile_pairs(loss)), run(method, loss), within=1e-6)
    assert kernels == ["vacsr.pair_latents.default", "vacsr.pair_latents_backward.default"]


# ------------------------------------------------------------------------------------------------------- what is asked


def test_where_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    hidden, adapter = torch.zeros(1, 4), VariationalAdapter(4)
    auto, never = VacsrObjective(ObjectiveConfig(fused="auto")), VacsrObjective(ObjectiveConfig(fused=False))
    assert not auto.uses_kernel(adapter, hidden)
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert auto.uses_kernel(adapter, hidden)
    assert not never.uses_kernel(adapter, hidden)
    assert not auto.uses_kernel(adapter, hidden.double())
    assert not auto.uses_kernel(adapter, hidden.to("meta"))
    assert not auto.uses_kernel(VariationalAdapter(4, AdapterConfig(components=5)), hidden)
    assert not auto.uses_kernel(VariationalAdapter(4, AdapterConfig(latent=8193)), hidden)
    monkeypatch.setattr(kernels, "TRITON", False)
    assert not auto.uses_kernel(adapter, hidden)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs anywhere")
def test_what_cannot_run_says_so_and_auto_changes_nothing() -> None:
    for fields, error in (({}, EnvironmentProblem), ({"components": 5}, UsageError)):
        method = make(True, fields)
        with pytest.raises(error, match=r"set method\.objective\.fused=auto"):
            run(method, method.loss)
    ours, theirs = make("auto"), make(False)
    assert_same(run(ours, ours.loss), run(theirs, theirs.loss), within=0.0)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("components", [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long]), 2])
@pytest.mark.parametrize("name", ["draw_latents", "latents_gradient"])
def test_compiled_for_hopper_noise_stays_in_registers(name: str, components: int, tmp_path: Path) -> None:
    """Threads draw the noise of the numbers they hold: shared memory is for the sums of the warps alone."""
    function, weights = getattr(latents, name), torch.empty(1, components)
    fixed = latents.sizes(torch.empty(1, 2 * components * 1024), weights, bounded=False, squash=True) | {"FAST": True}
    warps = int(fixed.pop("num_warps"))
    kinds = {name: "*fp32" for name in function.arg_names if name not in fixed} | {"clamp": "fp32", "keys": "*i64"}
    kinds |= {name: "*bf16" for name in ("heads", "z", "d_z", "d_heads") if name in kinds}
    made = compiled_for_hopper(function, kinds, dict(fixed), tmp_path, num_warps=warps)
    assert made.metadata.shared <= 64
    assert "cos.approx" in made.asm["ptx"]
    assert ".local" not in made.asm["ptx"]


# -------------------------------------------------------------------------------------------------------- on a GPU


@on_gpu
@pytest.mark.parametrize(
    ("components", "latent", "dtype"),
    [
        *((*shape, torch.float32) for shape in [(2, 512), (2, 1024), (1, 65), (3, 768), (4, 100)]),
        (2, 512, torch.bfloat16),
        (2, 512, torch.float16),
    ],
)
def test_latents_on_a_gpu(components: int, latent: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(300, components, latent, device="cuda", dtype=dtype)
    within = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    check(inputs, make_noise(300, device="cuda"), DEFAULT, within=within)


@on_gpu
@every_case
@pytest.mark.parametrize("strips", [False, True])
def test_loss_on_a_gpu_is_that_of_torch(case: tuple[Fields, Fields], strips: bool) -> None:
    ours, theirs = make(True, *case, dim=64).cuda(), make(False, *case, dim=64).cuda()
    loss: PairLoss = StripLoss(ours.loss, ours, 7) if strips else ours.loss
    expected = run(theirs, theirs.loss, count=24, device="cuda")
    assert_same(run(ours, loss, count=24, device="cuda"), expected, within=1e-4)


@on_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strips", [False, True])
def test_half_precision_is_as_far_from_float32_as_torchs_own(strips: bool, compiled: bool) -> None:
    every = {"hard_negatives": 32}  # which are hardest is for rounding to decide
    ours, theirs = make(True, {}, every, dim=128).cuda(), make(False, {}, every, dim=128).cuda()
    exact = run(theirs, theirs.loss, count=32, device="cuda")
    loss: PairLoss = StripLoss(ours.loss, ours, 16) if strips else ours.loss
    loss = compile_pairs(loss) if compiled else loss
    with torch.autocast("cuda", torch.bfloat16):
        outputs = run(ours, loss, count=32, device="cuda")
        plain = run(theirs, theirs.loss, count=32, device="cuda")

    def distance(result: Result) -> float:
        pairs = [(x, y) for x, y in zip(result.grads, exact.grads, strict=True) if x is not None and y is not None]
        return max(float((x - y).norm() / y.norm().clamp_min(1e-6)) for x, y in pairs)

    assert distance(outputs) <= max(2.0 * distance(plain), 0.03)


@on_gpu
@pytest.mark.parametrize("strips", [False, True])
def test_a_graph_draws_the_next_steps_noise(strips: bool) -> None:
    method = make(True, dim=64).cuda()
    loss: PairLoss = StripLoss(method.loss, method, 8) if strips else method.loss
    step, seed = torch.tensor(5, device="cuda"), torch.tensor(2, device="cuda")
    (v, t), ids = sides(16, 64, device="cuda"), (torch.arange(16) // 2).cuda()

    def once() -> list[Tensor]:
        result = run_loss(loss, method, ids, v, t, seed=seed, step=step)
        return [result.terms.total.detach(), *(x for x in result.grads if x is not None)]

    results, replay = captured(once)
    for number in (6, 7):
        step.fill_(number)
        replay()
        for one, other in zip(results, once(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5 * max(1.0, float(other.abs().max())), rtol=1e-4)


@on_gpu
def test_the_kernels_never_wait_for_the_device() -> None:
    inputs, noise = make_inputs(8, 2, 64, device="cuda"), make_noise(8, device="cuda")

    def once() -> None:
        outputs = by_kernel(inputs, noise, DEFAULT)
        torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])

    without_waiting(once)
