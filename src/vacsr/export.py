"""A model as a graph that runs without vacsr: ONNX, for onnxruntime and others (extra ``onnx``), or torch.export.

A graph computes one part. ``pairs``: the scores of all pairs of images and texts, from features, or from pixels and
token ids. ``images``, ``texts``: the vectors of one side. ``scores``: the scores of all pairs, from vectors.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from vacsr.backbones import TowerBackbone
from vacsr.backbones.base import Tokens
from vacsr.backbones.heads import GeneralizedPooling, rank_codes, ranked_sum
from vacsr.errors import EnvironmentProblem, MissingExtra, UsageError
from vacsr.files import atomic_paths
from vacsr.methods.base import Embedding
from vacsr.methods.pcme import Pcme
from vacsr.model import MatchingModel

Part = Literal["pairs", "images", "texts", "scores"]
_TOLERANCE = 1e-4  # of numbers in onnxruntime, absolute and relative


class Input(NamedTuple):
    """A random input of a graph, and the names of the dimensions that are free."""

    value: Tensor
    free: dict[int, str]

    def __str__(self) -> str:
        sizes = (self.free.get(number, str(size)) for number, size in enumerate(self.value.shape))
        return f"{str(self.value.dtype).removeprefix('torch.')} [{', '.join(sizes)}]"


def export_onnx(model: MatchingModel, path: str | Path, *, part: Part = "pairs") -> Graph:
    """Write one ONNX file, after a check on random inputs that onnxruntime computes what the model does, to 1e-4."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # in which torch's exporter is written
    except ImportError as error:
        raise MissingExtra("onnx", "onnx") from error
    graph = Graph(model, part)
    with _exporting(model):
        inputs = graph.inputs(2, 3)
        program: Any = torch.onnx.export(
            graph.program(), (), dynamo=True, verbose=False, input_names=[*inputs], output_names=[*graph.outputs],
            dynamic_shapes={"inputs": tuple(one.free for one in inputs.values())},
        )  # fmt: skip
        program.model.metadata_props.update(model.identity(), method=model.method.config.name)
        content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    others = {name: one.value for name, one in graph.inputs(5, 4).items()}
    theirs = map(torch.from_numpy, session.run(None, {name: tensor.numpy() for name, tensor in others.items()}))
    for ours, other in zip(graph(*others.values()), theirs, strict=True):
        if not torch.allclose(other, ours, rtol=_TOLERANCE, atol=_TOLERANCE):
            message = f"onnxruntime {onnxruntime.__version__} computes other scores than the model"
            raise EnvironmentProblem(f"{message} — install other versions of torch, onnxscript or onnxruntime")
    _write(Path(path), content)
    return graph


def export_torch(model: MatchingModel, path: str | Path, *, part: Part = "pairs") -> Graph:
    """Write a file that ``torch.export.load`` reads. Rows of token ids have one length, the longest."""
    graph, content = Graph(model, part, padded=True), io.BytesIO()
    with _exporting(model):
        torch.export.save(graph.program(), content)
    _write(Path(path), content.getvalue())
    return graph


def _write(path: Path, content: bytes) -> None:
    with atomic_paths(path) as (temporary,):
        temporary.write_bytes(content)


@contextmanager
def _exporting(model: MatchingModel) -> Iterator[None]:
    """Without what the exporter says, and with one error for the many ways in which it fails."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()):
            yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        message = f"torch {torch.__version__} cannot export '{model.method.config.name}' on this backbone ({reason})"
        raise EnvironmentProblem(f"{message} — export part by part, or try another version of torch") from error
    finally:
        logger.setLevel(level)


class _RankTable(nn.Module):
    """GPO's weights depend on the number of tokens alone, so a table can replace its recurrent network."""

    table: Tensor

    def __init__(self, pool: GeneralizedPooling, *, longest: int) -> None:
        super().__init__()
        weights = pool.weights(torch.arange(longest + 1), rank_codes(longest))
        self.register_buffer("table", weights.detach())

    def forward(self, tokens: Tokens) -> Tensor:
        weights = self.table[tokens.mask.sum(dim=1)][:, : tokens.mask.shape[1]]
        return ranked_sum(tokens.values, tokens.mask, weights)


class Graph(nn.Module):
    """One part of a copy of the model, on the CPU. ``padded``: token ids come in rows of the longest length."""

    def __init__(self, model: MatchingModel, part: Part, *, padded: bool = False) -> None:
        super().__init__()
        if part in ("pairs", "scores") and any(isinstance(module, Pcme) for module in model.method.modules()):
            message = f"'{model.method.config.name}' scores by random draws, which no graph holds"
            raise UsageError(f"{message} — export the parts images and texts, or use pcmepp")
        self.model: MatchingModel = deepcopy(model).cpu().eval().requires_grad_(False)
        self.model.merge_lora()
        self.part, self.padded, self.folded = part, padded, self.model.method.fold()
        for network in self.model.networks if self.model.has_towers else ():
            self._tabulate(network.backbone, network.heads)
        self.outputs = tuple(self._compute(*(one.value for one in self.inputs(2, 3).values())))

    def _tabulate(self, backbone: Any, members: list[Any]) -> None:
        """Put tables in the place of GPO."""
        pixels = self._raw(1, 1)["images"].value
        longest = {"image": backbone.encode_images(pixels).mask.shape[1], "text": backbone.text.context}
        for side, heads in ((side, heads) for side in longest for heads in members):
            for owner, name in ((heads, f"{side}_pool"), (getattr(heads, f"{side}_variance"), "pool")):
                if isinstance(pool := getattr(owner, name, None), GeneralizedPooling):
                    setattr(owner, name, _RankTable(pool, longest=longest[side]))

    def program(self) -> ExportedProgram:
        """As torch.export traces it."""
        inputs = list(self.inputs(2, 3).values())
        shapes = {"inputs": tuple(dict.fromkeys(one.free, Dim.DYNAMIC) for one in inputs)}
        program = torch.export.export(self, tuple(one.value for one in inputs), dynamic_shapes=shapes)
        for module in program.graph_module.modules():
            for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
                node.meta.pop("stack_trace", None)  # lines of Python, with the folders of this machine
        return program

    def inputs(self, images: int, texts: int) -> dict[str, Input]:
        """By name, so many of each side."""
        raw = self._raw(images, texts)
        if self.part != "scores":
            return raw if self.part == "pairs" else {self.part: raw[self.part]}
        v, t = self.model.embed_images(raw["images"].value), self.model.embed_texts(raw["texts"].value)
        vectors = {"image": _named("image", v), "text": _named("text", t)}
        return {name: Input(x, {0: f"{side}s"}) for side, named in vectors.items() for name, x in named.items()}

    def _raw(self, images: int, texts: int) -> dict[str, Input]:
        """Features; or squares of pixels, and token ids with −1 after the end."""
        draw, backbone = torch.Generator().manual_seed(0), self.model.backbone
        if not isinstance(backbone, TowerBackbone):
            sizes = {"images": (images, backbone.image_dim), "texts": (texts, backbone.text_dim)}
            return {name: Input(torch.randn(*size, generator=draw), {0: name}) for name, size in sizes.items()}
        side, context = backbone.transform.size, backbone.tokenizer.context
        pixels = torch.randint(256, (images, 3, side, side), generator=draw, dtype=torch.uint8)
        length, free = (context, {0: "texts"}) if self.padded else (min(context, texts + 2), {0: "texts", 1: "tokens"})
        ids = torch.randint(backbone.text.vocabulary, (texts, length), generator=draw)
        ids[0, -1] = -1
        return {"images": Input(pixels, {0: "images"}), "texts": Input(ids, free)}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._compute(*inputs).values())

    @torch.no_grad()
    def _compute(self, *inputs: Tensor) -> dict[str, Tensor]:
        """By name: vectors of one side; or score, grade and uncertainty of all pairs [I, T], if the method has them."""
        model, method = self.model, self.model.method
        if self.part == "images":
            return _named("image", model.embed_images(inputs[0]))
        if self.part == "texts":
            return _named("text", model.embed_texts(inputs[0]))
        if self.part == "pairs":
            v, t = model.embed_images(inputs[0]), model.embed_texts(inputs[1])
        else:
            v, t = Embedding(*inputs[: len(inputs) // 2]), Embedding(*inputs[len(inputs) // 2 :])
        x, y = v.map(lambda rows: rows.unsqueeze(1)), t.map(lambda rows: rows.unsqueeze(0))
        score = self.folded.aligned_logits(x.mean, y.mean) if self.folded else method.score(v, t)
        outputs = {"score": score, "grade": method.grade(score), "uncertainty": method.uncertainty(x, y)}
        return {name: tensor for name, tensor in outputs.items() if tensor is not None}


def _named(side: str, x: Embedding) -> dict[str, Tensor]:
    """Vectors and, where items have variances, their logarithms."""
    return {f"{side}_vectors": x.mean, **({} if x.log_var is None else {f"{side}_log_variances": x.log_var})}
