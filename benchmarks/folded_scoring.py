"""What folded scoring costs beside the bare matrix product it cannot do without.

    python benchmarks/folded_scoring.py [--dim 512] [--candidates 1000] [--threads 2] [--rounds 60] [--processor]
                                        [--json FILE]

One query image against N candidate texts, every way timed in the same run, in a new order each round:

gemm      the trunk's product alone: [d, d] x [d, N] into memory that is already there
folded    `BlockScorer.block`, what `PairScorer` calls: decoder 16 wide + cosine residual (the default), or linear
unfolded  `adapter.logit`: the mean heads for every pair
sampled   the pass of training: mean and variance heads, one draw, decoder; its noise is drawn beforehand

Weights and unit vectors are random. The folded scores are checked against the unfolded ones first. With
--processor the processor's time is taken instead of the wall's: with one thread, other programs then hardly matter.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.adapter import AdapterConfig
from vacsr.distributions import mixture_draw, relaxed_one_hot
from vacsr.methods.base import Embedding
from vacsr.methods.vacsr import Vacsr, VacsrConfig
from vacsr.scoring.folded import BlockScorer

WARM_UP = 10
DECODERS = {
    "decoder 16 + cosine": AdapterConfig(),
    "linear decoder": AdapterConfig(decoder_hidden=0, residual="none"),
}


class Variant(NamedTuple):
    """One way to the scores."""

    way: str
    decoder: str
    dtype: str
    call: Callable[[], object]


def main() -> None:
    """Parse, time, print."""
    parser = argparse.ArgumentParser(description="Folded scoring beside the bare matrix product.")
    parser.add_argument("--dim", type=int, default=512, help="d of the embeddings, and the trunk's width")
    parser.add_argument("--candidates", type=int, default=1000, help="texts scored for the one image")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--rounds", type=int, default=60, help="timed repetitions of every variant")
    parser.add_argument("--processor", action="store_true", help="time the processor instead of the wall")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    if min(options.dim, options.candidates, options.threads) < 1 or options.rounds < 4:
        parser.error("--dim, --candidates and --threads start at 1, --rounds at 4")
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.processor else time.perf_counter
    with torch.inference_mode():
        found, error = variants(options.dim, options.candidates)
        rows = table_rows(found, time_all(found, rounds=options.rounds, clock=clock))
    settings = {"dim": options.dim, "candidates": options.candidates, "rounds": options.rounds}
    settings["clock"] = "processor" if options.processor else "wall"
    result = {"schema": 1, "machine": machine(), "settings": settings, "max_abs_error": error, "rows": rows}
    print(to_markdown(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def variants(dim: int, candidates: int) -> tuple[list[Variant], float]:
    """Every way to time, and the largest difference between folded and unfolded float32 scores."""
    generator = torch.Generator().manual_seed(0)
    v = functional.normalize(torch.randn(1, dim, generator=generator), dim=-1)
    t = functional.normalize(torch.randn(candidates, dim, generator=generator), dim=-1)
    methods = {name: random_method(dim, config, generator) for name, config in DECODERS.items()}
    found, errors = [gemm(v, t, methods["decoder 16 + cosine"], torch.float32)], []
    for name, method in methods.items():
        block = folded(v, t, method, torch.float32)
        dense = unfolded(v, t, method)
        found += [Variant("folded", name, "float32", block), Variant("unfolded", name, "float32", dense)]
        errors.append(float((block() - dense()).abs().max()))
    default = next(iter(methods))
    found.append(Variant("sampled", default, "float32", sampled(v, t, methods[default], generator)))
    found.append(gemm(v, t, methods[default], torch.bfloat16))
    for name, method in methods.items():
        found.append(Variant("folded", name, "bfloat16", folded(v, t, method, torch.bfloat16)))
    if not max(errors) < 1e-3:
        raise SystemExit(f"folded and unfolded scores differ by {max(errors):.2g}: nothing to time")
    return found, max(errors)


@torch.no_grad()
def random_method(dim: int, config: AdapterConfig, generator: torch.Generator) -> Vacsr:
    """Fresh weights, with none of the zeros that some start from."""
    method = Vacsr(VacsrConfig(adapter=config), dim=dim).eval()
    for parameter in method.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(1, parameter.shape[-1]) ** 0.5)
    return method


def gemm(v: Tensor, t: Tensor, method: Vacsr, dtype: torch.dtype) -> Variant:
    """The trunk's product with everything prepared."""
    scaled = (method.adapter.trunk.weight * v).to(dtype)
    texts = t.T.contiguous().to(dtype)
    out = torch.empty(len(scaled), texts.shape[1], dtype=dtype)
    return Variant("gemm", "–", str(dtype).removeprefix("torch."), lambda: torch.mm(scaled, texts, out=out))


def folded(v: Tensor, t: Tensor, method: Vacsr, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The library's path."""
    scorer, image, texts = BlockScorer(method, dtype=dtype), Embedding(v), Embedding(t)
    return lambda: scorer.block(image, texts)


def unfolded(v: Tensor, t: Tensor, method: Vacsr) -> Callable[[], Tensor]:
    """All of the adapter but the variance heads."""
    return lambda: method.adapter.logit(v.unsqueeze(1), t.unsqueeze(0))


def sampled(v: Tensor, t: Tensor, method: Vacsr, generator: torch.Generator) -> Callable[[], Tensor]:
    """The posterior of every pair and one draw from it."""
    adapter = method.adapter
    pairs = (1, len(t), adapter.components)
    gumbel = -torch.rand(pairs, generator=generator).clamp_min(1e-6).log().neg().log()
    noise = torch.randn(*pairs, adapter.latent, generator=generator)

    def call() -> Tensor:
        posterior = adapter.posterior(adapter.features(v.unsqueeze(1), t.unsqueeze(0)))
        weights = relaxed_one_hot(posterior.log_alpha, gumbel)
        logit = adapter.decode(mixture_draw(posterior.mean, posterior.log_var, weights=weights, noise=noise))
        residual = adapter.residual_logit(v @ t.T)
        return logit if residual is None else logit + residual

    return call


def time_all(found: list[Variant], *, rounds: int, clock: Callable[[], float]) -> list[list[float]]:
    """Milliseconds of every variant in every round, whose order is its own.

    Each call is timed right after an untimed one of the same kind: what the variant before it left in the caches and
    in the allocator is not this variant's cost.
    """
    order, shuffle = list(range(len(found))), random.Random(0).shuffle
    times: list[list[float]] = [[] for _ in found]
    for number in range(WARM_UP + rounds):
        shuffle(order)
        for index in order:
            found[index].call()
            start = clock()
            found[index].call()
            elapsed = 1e3 * (clock() - start)
            if number >= WARM_UP:
                times[index].append(elapsed)
    return times


def table_rows(found: list[Variant], times: list[list[float]]) -> list[dict[str, Any]]:
    """Medians and lower quartiles, and their ratios to the gemms of their own dtype and of float32."""
    rows: list[dict[str, Any]] = [
        {"way": item.way, "decoder": item.decoder, "dtype": item.dtype, "median_ms": statistics.median(each),
         "quartile_ms": statistics.quantiles(each, n=4)[0], "min_ms": min(each)}
        for item, each in zip(found, times, strict=True)
    ]  # fmt: skip
    gemms = {row["dtype"]: row for row in rows if row["way"] == "gemm"}
    dense = {row["decoder"]: row for row in rows if row["way"] == "unfolded"}
    for row in rows:
        row["gemms_median"] = row["median_ms"] / gemms[row["dtype"]]["median_ms"]
        row["gemms_quartile"] = row["quartile_ms"] / gemms[row["dtype"]]["quartile_ms"]
        row["float32_gemms_median"] = row["median_ms"] / gemms["float32"]["median_ms"]
        faster = dense[row["decoder"]]["median_ms"] / row["median_ms"] if row["way"] == "folded" else None
        row["faster_than_unfolded"] = faster
    return rows


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    name = platform.processor() or platform.machine()
    return {"cpu": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def to_markdown(result: dict[str, Any]) -> str:
    """A table, and under it what it was measured on."""
    head = ["way", "decoder", "dtype", "median ms", "lower quartile ms", "× its gemm (median)"]
    head += ["× its gemm (quartile)", "× float32 gemm (median)", "faster than unfolded"]
    lines = [head, ["---"] * 3 + ["---:"] * 6]
    for row in result["rows"]:
        faster = row["faster_than_unfolded"]
        lines.append([
            row["way"], row["decoder"], row["dtype"], f"{row['median_ms']:.3f}", f"{row['quartile_ms']:.3f}",
            f"{row['gemms_median']:.2f}", f"{row['gemms_quartile']:.2f}", f"{row['float32_gemms_median']:.2f}",
            "–" if faster is None else f"{faster:.1f} ×",
        ])  # fmt: skip
    of, on = result["settings"], result["machine"]
    note = (
        f"d = {of['dim']}, 1 image × {of['candidates']} texts, {of['rounds']} rounds, {of['clock']} time; {on['cpu']}, "
        f"{on['threads']} threads, torch {on['torch']}; "
        f"folded and unfolded differ by {result['max_abs_error']:.1e}."
    )
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", note])


if __name__ == "__main__":
    main()
