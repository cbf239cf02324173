"""Time of one training step on cached features: eager, as a CUDA graph, and as a graph of the compiled step.

    python benchmarks/train_step.py [--dim 256] [--batch 128] [--steps 200] [--json FILE]

Everything in one run, on random features of the Flickr8k shape. Without a GPU only the eager step is timed.
"""

from __future__ import annotations

import torch

from _common import finish, parser
from vacsr.bench import BenchResult, describe_device
from vacsr.bench.training import step_cost, training_step
from vacsr.config import BackboneConfig, HeadConfig, TrainConfig
from vacsr.config.io import method_config
from vacsr.data import PairSet
from vacsr.train.retrieval import RetrievalTask
from vacsr.train.step import matmul_precision
from vacsr.train.trainer import Trainer

METHODS = ("vacsr", "sigmoid", "infonce")


def random_pairs(images: int = 1200, captions: int = 5) -> PairSet:
    """Unit-variance image features [N, 320] and unit-length text features [5N, 384]."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.nn.functional.normalize(torch.randn(images * captions, 384, generator=generator), dim=1)
    owner = torch.arange(images).repeat_interleave(captions)
    ids = tuple(str(i) for i in range(images))
    names = tuple(f"{i}#{k}" for i in range(images) for k in range(captions))
    return PairSet(torch.randn(images, 320, generator=generator), texts, ids, names, owner)


def time_steps(method: str, pairs: PairSet, config: TrainConfig, *, dim: int, steps: int) -> float:
    """Milliseconds per step, the median of five groups, after a warm-up that compiles and captures."""
    backbone = BackboneConfig(head=HeadConfig(dim=dim))
    trainer = Trainer(RetrievalTask(method_config(method), pairs, config, backbone=backbone), config)
    cost = step_cost(training_step(trainer), batch=config.batch_size, device=trainer.task.device, steps=steps, groups=5)
    return cost["ms"]


def main() -> None:
    """Time each method in each way."""
    options = parser(__doc__)
    options.add_argument("--dim", type=int, default=256)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--steps", type=int, default=200)
    args = options.parse_args()
    gpu = torch.cuda.is_available()
    ways = {"eager": {}}
    if gpu:
        ways |= {"CUDA graph": {"cuda_graph": True}, "compiled, CUDA graph": {"cuda_graph": True, "compile": True}}
    pairs, rows = random_pairs(), []
    for name, changes in ways.items():
        config = TrainConfig.model_validate({"batch_size": args.batch, "precision": "tf32", **changes})
        with matmul_precision(config.precision):
            times = {m: time_steps(m, pairs, config, dim=args.dim, steps=args.steps) for m in METHODS}
        rows.append({"way": name, **times})
    where = describe_device(torch.device("cuda" if gpu else "cpu"))
    columns = {"way": "step", **{method: f"{method}, ms" for method in METHODS}}
    finish(BenchResult("train-step", where, {"d": args.dim, "B": args.batch}, rows, columns), args.json)


if __name__ == "__main__":
    main()
