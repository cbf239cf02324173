"""How well an audit finds wrong pairs and missing matches, beside other signals of the same data.

    python benchmarks/audit.py --noise RUNS [--clean RUNS] [--scenes DEMO] [--threads 1] --json docs/results/audit.json

RUNS hold run folders as `vacsr compare` leaves them: noise-20/vacsr-default/seed-0, noise-20/infonce-cosine/seed-0 and
so on; clean/ROW/seed-K for the human judgments, which the runs' own config.yaml names. DEMO is what `vacsr demo` left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vacsr.data import load_pairs
from vacsr.evaluate.exact import scene_truth
from vacsr.evaluate.judgments import Judgments, read_judgments
from vacsr.evaluate.uncertainty import auroc
from vacsr.files import write_json
from vacsr.methods.mixtures import fit_gaussians, rescaled
from vacsr.recipes import read_recipe
from vacsr.scoring import PairScorer, PairScores
from vacsr.scoring.posthoc import PostHocScorer, PostHocUncertainty
from vacsr.search.audit import signals
from vacsr.search.suspects import caption_sums, find_neighbours, own_agreement, prototypes, suspicion, weights
from vacsr.train.recipe import read_split, training_data

OURS, RIVAL = "vacsr-default", "infonce-cosine"
RECALLS = (50, 70, 80, 90, 95, 99)
SCENES = "scenes:images=200,held_out=300,seed=0"


def main() -> None:
    """Measure what was asked for, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=Path)
    parser.add_argument("--clean", type=Path, action="append", default=[])
    parser.add_argument("--scenes", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: list[dict[str, Any]] = []
    for part in (noisy(args), judged(args), scenes(args), posthoc(args)):
        for record in part:
            found.append(record)
            shown = " ".join(f"{key} {record[key]:.1f}" for key in ("precision_at_n", "ap", "auroc"))
            print(f"{record['setting']} seed {record['seed']} {record['signal']}: {shown}", flush=True)
            if args.json:
                write_json(args.json, {"schema": 1, "records": found})


def measured(value: Tensor, target: Tensor) -> dict[str, Any]:
    """Precision at the true number and along the recall, average precision, AUROC; in percent. [P], [P] bool"""
    hit = target[value.argsort(descending=True, stable=True)].double()
    count, total = hit.cumsum(0), int(target.sum())
    precision = count / torch.arange(1, len(hit) + 1)
    at = [int((count >= recall / 100 * total).int().argmax()) for recall in RECALLS]
    return {
        "n": total,
        "of": len(hit),
        "precision_at_n": 100 * float(precision[total - 1]),
        "ap": 100 * float(precision[hit > 0].mean()),
        "auroc": 100 * auroc(value, target.float()),
        "precision_at_recall": {str(r): 100 * float(precision[place]) for r, place in zip(RECALLS, at, strict=True)},
    }


def noisy(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """(a) Captions that the noise moved to another image."""
    for row in (OURS, RIVAL):
        for setting, seed, folder in noise_runs(args, row):
            data = training_data(read_recipe(folder / "config.yaml").data)
            assert data.noise is not None
            wrong = data.noise.assignment != data.noise.original
            scorer = PairScorer.from_pretrained(folder, device="cpu")
            for name, value in wrong_signals(scorer, data.train, row).items():
                yield {"setting": setting, "seed": seed, "signal": name, **measured(value, wrong)}


def noise_runs(args: argparse.Namespace, row: str) -> Iterator[tuple[str, int, Path]]:
    """Setting, seed and run folder of each noisy run."""
    for setting in ("noise-20", "noise-50") if args.noise else ():
        for seed in map(int, args.seeds.split(",")):
            yield setting, seed, args.noise / setting / row / f"seed-{seed}"


@torch.inference_mode()
def wrong_signals(scorer: PairScorer, pairs: Any, row: str) -> dict[str, Tensor]:
    """Larger is more suspect. [M] each"""
    scores, owner = scorer.score_set(pairs), pairs.caption_image
    cols, v, t = torch.arange(len(pairs)), scores.images.mean, scores.texts.mean
    cosine, name = (v[owner] * t).sum(dim=1), row.partition("-")[0]
    audit = signals(scores, owner)
    found = {f"{name} audit": audit.suspicion, f"{name} agreement": -audit.own, f"{name} cosine": -cosine}
    if row == OURS:
        sigma = scores.uncertainty(owner, cols)
        assert sigma is not None
        return found | {f"{name} grade": -audit.grade, f"{name} σ": sigma}
    loss = batch_losses(scorer, scores, owner)
    clean = fit_gaussians(rescaled(loss)).first(rescaled(loss)).float()
    sums = caption_sums(t, owner, clean, images=len(v))
    own = own_agreement(v, t, owner, weight=clean, sums=sums)
    elsewhere = find_neighbours(prototypes(v, sums), t, owner, captions=1).image_agreement
    found |= {f"{name} loss GMM": 1.0 - clean, f"{name} loss GMM + siblings": -own}
    found |= {f"{name} loss GMM + siblings + rival image": suspicion(own, elsewhere)}
    return found


def posthoc(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The analytic uncertainty on the same captions; it takes longest, so it comes last."""
    for setting, seed, folder in noise_runs(args, RIVAL):
        data = training_data(read_recipe(folder / "config.yaml").data)
        assert data.noise is not None
        scorer, cols = PairScorer.from_pretrained(folder, device="cpu"), torch.arange(len(data.train))
        for name, value in laplace(scorer, data.train, data.train.caption_image, cols).items():
            wrong = data.noise.assignment != data.noise.original
            yield {"setting": setting, "seed": seed, "signal": name, **measured(value, wrong)}


def batch_losses(scorer: PairScorer, scores: PairScores, owner: Tensor, *, rounds: int = 8) -> Tensor:
    """Each pair's InfoNCE loss among 127 others, both directions, mean over some shuffles. -> [M]"""
    scale = float(scorer.model.method.log_scale.exp())  # type: ignore[union-attr, operator]
    generator, total = torch.Generator().manual_seed(0), torch.zeros(len(owner))
    for _ in range(rounds):
        for batch in torch.randperm(len(owner), generator=generator).split(128):
            logit = scale * scores.images.mean[owner[batch]] @ scores.texts.mean[batch].T
            both = logit.logsumexp(1) + logit.logsumexp(0) - 2 * logit.diagonal()
            total[batch] += 0.5 * both / rounds
    return total


def laplace(scorer: PairScorer, pairs: Any, rows: Tensor, cols: Tensor, *, fitted_on: Any = None) -> dict[str, Tensor]:
    """The deviation of the cosine under a posterior of the heads. [P] each"""
    fitted = PostHocUncertainty.fit(scorer.model, fitted_on or pairs, device="cpu")
    found = {}
    for kind in ("laplace", "laplace-coupled"):
        sigma = PostHocScorer(scorer.model, fitted, kind=kind, device="cpu").score_set(pairs).uncertainty(rows, cols)
        assert sigma is not None
        found[f"infonce {kind}"] = sigma
    return found


def judged(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """(b) Unlabelled pairs that experts grade 3 or more, among the unlabelled pairs that they graded."""
    done = set()
    for folder in sorted(path.parent for root in args.clean for path in root.glob("clean/*/seed-*/model")):
        row, seed = folder.parent.name, int(folder.name.removeprefix("seed-"))
        if row not in ("vacsr-default", "infonce", "sigmoid") or (row, seed) in done:
            continue
        done.add((row, seed))
        recipe = read_recipe(folder / "config.yaml")
        pairs = read_split(recipe.data, "test")
        expert = next(
            found for found in map(read_judgments, map(Path, recipe.evaluate.judgments)) if found.ratings is not None
        )
        scorer = PairScorer.from_pretrained(folder, device="cpu")
        for half in ("judged-dev", "judged-test"):
            rows, cols, missed = judged_pairs(expert.subset(half), pairs)
            values = missing_signals(scorer, pairs, rows, cols, name=row.partition("-")[0])
            if row == "infonce":
                values |= laplace(scorer, pairs, rows, cols, fitted_on=training_data(recipe.data).train)
            for name, value in values.items():
                yield {"setting": half, "seed": seed, "signal": name, **measured(value, missed)}


def judged_pairs(judged: Judgments, pairs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and whether it is a match, of the judged pairs across images that are in the data. [P] each"""
    images = {name: row for row, name in enumerate(pairs.image_ids)}
    captions = {name: col for col, name in enumerate(pairs.caption_ids)}
    every = zip(judged.image_ids, judged.caption_ids, judged.grades, judged.same_image, strict=True)
    known = [(images[i], captions[c], g >= 3) for i, c, g, same in every if not same and i in images and c in captions]
    rows, cols, missed = zip(*known, strict=True)
    return torch.tensor(rows), torch.tensor(cols), torch.tensor(missed)


@torch.inference_mode()
def missing_signals(scorer: PairScorer, pairs: Any, rows: Tensor, cols: Tensor, *, name: str) -> dict[str, Tensor]:
    """Larger is more like a match. [P] each"""
    scores, owner = scorer.score_set(pairs), pairs.caption_image
    v, t = scores.images.mean, scores.texts.mean
    grade = scores.grade(scores.score_of(owner, torch.arange(len(owner))))
    prototype = prototypes(v, caption_sums(t, owner, weights(grade), images=len(v)))
    score, sigma = scores.score_of(rows, cols), scores.uncertainty(rows, cols)
    found = {f"{name} audit": (prototype[rows] * t[cols]).sum(dim=1), f"{name} score": score}
    if sigma is None:
        return found
    return found | {f"{name} σ": sigma, f"{name} score + 0.1σ": standard(score) + 0.1 * standard(sigma)}


def standard(x: Tensor) -> Tensor:
    """Mean 0, deviation 1."""
    return functional.layer_norm(x, x.shape)


def scenes(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """(c) Every unlabelled pair of a generated world; matches are those whose caption is wholly true."""
    if args.scenes is None:
        return
    pairs = load_pairs(SCENES, split="test")
    truth = scene_truth(SCENES, pairs)
    assert truth is not None
    rows, cols = (~truth.labelled).nonzero().unbind(1)
    for name in ("vacsr", "infonce", "sigmoid"):
        scorer = PairScorer.from_pretrained(args.scenes / name, device="cpu")
        for signal, value in missing_signals(scorer, pairs, rows, cols, name=name).items():
            yield {
                "setting": "scenes",
                "seed": 0,
                "signal": signal,
                **measured(value, truth.false_negative[rows, cols]),
            }


if __name__ == "__main__":
    main()
