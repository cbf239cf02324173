"""MatchingModel: backbone, heads and method. From inputs to unit vectors, and what is trained, saved and scored."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from vacsr.backbones import Backbone, ProjectionHead, load_backbone, scheme_of
from vacsr.backbones.augment import Partners
from vacsr.backbones.base import Tokens
from vacsr.backbones.heads import VarianceHead, build_pooling
from vacsr.card import PLACE, Made, model_card
from vacsr.config import BackboneConfig, HeadConfig, LoraConfig, MethodConfig, TowersConfig
from vacsr.config.base import method_entry
from vacsr.config.io import method_config, parse
from vacsr.errors import DataError, EnvironmentProblem, UsageError
from vacsr.hub import hub_id, upload
from vacsr.methods.base import Embedding, Method, ParamGroup, build_method, split_by_decay
from vacsr.methods.members import Members
from vacsr.noise import RowNoise, Stream, of_member, seeded
from vacsr.pretrained import SavedModel, check_start, encoder_spec, read_card, weights_digest, write_model_folder
from vacsr.provenance import UNKNOWN, Provenance

Side = Literal["image", "text"]
_MODULES = [{"idx": 0, "name": "0", "path": "", "type": "vacsr.sentence_transformers.Matcher"}]
"""modules.json, by which sentence-transformers opens a model folder."""


class Heads(nn.Module):
    """Two projection heads and their pooling: tokens in, unit vectors out. A member of an ensemble has its own."""

    def __init__(self, backbone: Backbone, config: HeadConfig) -> None:
        super().__init__()
        self.pooling = backbone.pooling
        self.image_head = ProjectionHead(backbone.image_dim, config)
        self.text_head = ProjectionHead(backbone.text_dim, config)
        self.image_pool, self.text_pool = build_pooling(self.pooling), build_pooling(self.pooling)
        self.image_variance: VarianceHead | None = None
        self.text_variance: VarianceHead | None = None

    def forward(self, images: Tokens, texts: Tokens) -> tuple[Embedding, Embedding]:
        """As one function of their weights. -> [N, d], [M, d]"""
        return self.project("image", images), self.project("text", texts)

    def project(self, side: Side, tokens: Tokens, noise: RowNoise | None = None) -> Embedding:
        """The backbone's tokens to unit vectors and, with a variance head, logσ², with dropout of its own. -> [N, d]"""
        head, pool, variance = (getattr(self, f"{side}_{part}") for part in ("head", "pool", "variance"))
        mean = functional.normalize(self._pooled(tokens, head, pool, noise), dim=-1)
        if variance is None:
            return Embedding(mean)
        assert tokens.spread is not None, "a backbone of a model with variances gives tokens for them"
        tokens = tokens._replace(values=tokens.spread)
        noise = None if noise is None else noise.other(Stream.VARIANCE)
        return Embedding(mean, variance.norm(self._pooled(tokens, variance.head, variance.pool, noise)))

    def _pooled(self, tokens: Tokens, head: nn.Module, pool: nn.Module, noise: RowNoise | None) -> Tensor:
        """GPO sorts the projected tokens; mean and class token are taken before, which is cheaper. -> [N, d]"""
        gpo = self.pooling == "gpo"
        pooled: Tensor = pool(tokens._replace(values=head(tokens.values, noise))) if gpo else head(pool(tokens), noise)
        return pooled

    def head_params(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are trained from scratch: heads and pooling, by their names in this module."""
        names = ("image_head.", "text_head.", "image_pool.", "text_pool.", "image_variance.", "text_variance.")
        return [(name, parameter) for name, parameter in self.named_parameters() if name.startswith(names)]


class Network(Heads):
    """A backbone and the heads of one or more members on top of it: images and texts in, unit vectors out."""

    def __init__(self, backbone: Backbone, config: BackboneConfig) -> None:
        super().__init__(backbone, config.head)
        self.config = config
        self.backbone = backbone
        self.others = nn.ModuleList()
        """The heads of further members; the first member's are the network's own."""

    @property
    def heads(self) -> list[Heads]:
        """Of every member."""
        return [self, *self.others]

    def add_variance(self, *, start: float, norm: float | None) -> None:
        """Give every item a variance, its logarithm near ``start``: heads of their own, on towers a block each too.

        ``norm``: the weight that a LayerNorm on logσ² starts with; None for no norm.
        """
        for heads in self.heads:
            heads.image_variance, heads.text_variance = (
                VarianceHead(dim, self.config.head, pooling=self.backbone.pooling, start=start, norm=norm)
                for dim in self.backbone.spread_dims
            )
        self.backbone.add_variance()

    def tower_groups(self, config: TowersConfig) -> list[ParamGroup]:
        """Block ℓ of L at rate·decay^(L−ℓ), everything outside the blocks at the rate of the tower."""
        groups: list[ParamGroup] = []
        rates = {"image": config.image_lr, "text": config.text_lr}
        for name, parts in self.backbone.tower_params().items():
            if (rate := rates[name]) == 0:
                continue
            groups += split_by_decay(f"{name}-stem", parts.stem, lr_scale=rate)
            for number, block in enumerate(parts.blocks):
                scale = rate * config.layer_decay ** (len(parts.blocks) - number)
                groups += split_by_decay(f"{name}-block-{number}", block, lr_scale=scale)
            groups += split_by_decay(f"{name}-variance", parts.variance, lr_scale=rate * config.layer_decay)
        return groups


class MatchingModel(Network):
    """A network and a method: what is trained, saved and scored with. Co-teaching methods have a ``second`` network."""

    def __init__(
        self, backbone: Backbone, method: Method, *, config: BackboneConfig, provenance: Provenance = UNKNOWN
    ) -> None:
        super().__init__(backbone, config)
        self.provenance = provenance
        self.method = method
        self.second: Network | None = None
        self.made: Made | None = None
        """Of the run that trained it, for the model card."""
        self._loaded = ("", "", "")  # the revision, the checksum and the card of what was loaded

    def __repr__(self) -> str:
        source = self.backbone.name or self.provenance.backbone or "features"
        size = f"{self.dim} dimensions, {self.count_parameters():,} parameters"
        return f"MatchingModel({self.method.config.name} on {source}: {size})"

    @classmethod
    def build(
        cls, method: MethodConfig | Method, config: BackboneConfig, *, image_dim: int = 0, text_dim: int = 0,
        provenance: Provenance = UNKNOWN, seed: int = 0, fit: Any = None, assets: Path | None = None,
    ) -> Self:  # fmt: skip
        """A model with fresh heads, drawn from ``seed`` without touching torch's own generator.

        ``image_dim`` and ``text_dim`` are those of cached features; towers know their own. ``fit``: the training set,
        from which the backbone takes statistics or words. ``assets``: rebuild saved towers, weights to follow. Where
        ``config.start`` names a model, everything but the method is loaded from it.
        """
        start = SavedModel.open(config.start) if config.start and assets is None else None
        if start is not None:
            check_start(config, parse(BackboneConfig, start.config["backbone"]), folder=start.folder)
            assets = start.assets

        def backbone() -> Backbone:
            loaded = load_backbone(config, image_dim=image_dim, text_dim=text_dim, assets=assets)
            loaded.origin = provenance
            if fit is not None:
                loaded.fit(fit)
            return loaded

        with seeded(seed):
            first = backbone()
            head = build_method(method, dim=config.head.dim) if isinstance(method, MethodConfig) else method
            if not isinstance(head, Method):
                raise UsageError(f"{type(head).__name__} is not a method — derive it from vacsr.methods.Method")
            model = cls(first, head, config=config, provenance=provenance)
        if head.networks == 2:
            with seeded(seed, "second"):
                model.second = Network(backbone(), config)
        for number in range(1, head.members):
            with seeded(seed, f"member {number}"):
                for network in model.networks:
                    network.others.append(Heads(network.backbone, config.head))
        if start is not None:
            start.load_start(model)
        if head.log_var_start is not None:  # after the towers' weights, some of which a branch may copy
            with seeded(seed, "variance"):
                model.add_variance(start=head.log_var_start, norm=head.variance_norm)
        model._add_lora(seed)  # last, as loaded weights have the towers' own names, and a branch is trained whole
        return model

    def _add_lora(self, seed: int) -> None:
        """If the config asks for it."""
        with seeded(seed, "lora"):
            for network in self.networks if self.config.lora.rank else ():
                network.backbone.add_lora()

    def merge_lora(self) -> None:
        """Make low-rank updates part of the towers: an ordinary model. It does nothing where there are none."""
        for network in self.networks if self.config.lora.rank else ():
            network.backbone.merge_lora()
            network.config = network.config.model_copy(update={"lora": LoraConfig()})

    def _merged(self) -> MatchingModel:
        """An ordinary model: this one, or a copy where it has LoRA."""
        model = deepcopy(self) if self.config.lora.rank else self
        model.merge_lora()
        return model

    def base_state(self) -> dict[str, Tensor]:
        """The towers' own weights, which LoRA leaves as they are; empty without LoRA."""
        base = {id(parameter) for network in self.networks for parameter in network.backbone.base_params()}
        return {name: x.detach() for name, x in self.state_dict(keep_vars=True).items() if id(x) in base}

    def trained_state(self) -> dict[str, Tensor]:
        """What training may change: the state without :meth:`base_state`."""
        base = self.base_state()
        return {name: tensor for name, tensor in self.state_dict().items() if name not in base}

    def load_trained_state(self, state: Mapping[str, Tensor]) -> None:
        """What :meth:`trained_state` gave."""
        self.load_state_dict({**self.base_state(), **state})

    def identity(self) -> dict[str, str]:
        """Which weights these are: ``weights``, their SHA-256, and of unchanged ones from the Hub the ``revision``."""
        weights, (revision, loaded, _) = weights_digest(self.state_dict()), self._loaded
        return {"weights": weights, **({"revision": revision} if revision and weights == loaded else {})}

    def card(self) -> str:
        """README.md: the one that was loaded while it has the weights' checksum, which you may have edited, or anew."""
        known, loaded = self.identity(), self._loaded[2]
        if self.made is None and known["weights"] in loaded:
            return loaded
        width = f"{self.config.head.dim} dimensions"
        width += f", {self.dim // self.config.head.dim} times, averaged" * (self.dim > self.config.head.dim)
        towers = "two towers, " * self.has_towers
        return model_card(
            self.method.config.name, self.backbone, spec=self.config.spec, made=self.made, **known,
            size=f"{self.count_parameters():,} parameters: {towers}heads to {width}, and those of the method.",
        )  # fmt: skip

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and a model card; a reader never sees a partial write."""
        model = self._merged()
        model._save(Path(folder), model.card())

    def push_to_hub(self, repo: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Save it into one commit of a Hub repository, ``user/model`` or ``user/model@branch``, made if needed.

        Returns ``user/model@commit``, which :meth:`from_pretrained` reads. ``private`` is about a new repository.
        """
        target = hub_id(repo)
        if target is None:
            raise UsageError(f"{repo!r} is no Hub id, or a folder here — write user/model")
        model = self._merged()
        with tempfile.TemporaryDirectory() as folder:
            model._save(Path(folder), model.card().replace(PLACE, target.repo))
            return upload(Path(folder), target, private=private, token=token)

    def _save(self, folder: Path, card: str) -> None:
        method = self.method.config
        kind = type(self.method.each[0] if isinstance(self.method, Members) else self.method)
        if method_entry(method.name).method is not kind:
            raise UsageError(f"{kind.__name__} cannot be loaded again — put @register above the class")
        config = {
            "image_dim": self.backbone.image_dim,
            "text_dim": self.backbone.text_dim,
            "backbone": self.config.model_copy(update={"start": ""}).model_dump(mode="json"),  # no longer needed
            "method": method.model_dump(mode="json"),
            "provenance": vars(self.provenance),
            "revision": self.identity().get("revision", "") if self._loaded[0] else "",
        }
        texts = {"README.md": card}
        if self.backbone.reads_photos:
            texts["modules.json"] = json.dumps(_MODULES, indent=2)
        write_model_folder(folder, config, self.state_dict(), texts=texts, backbone=self.backbone)

    @classmethod
    def from_encoders(cls, spec: str) -> Self:
        """Pretrained encoders as they are, without training: ``clip:ID_OR_FOLDER``, or ``towers:IMAGE,TEXT`` that share
        a space. The score is their cosine; inputs are prepared as in their own training.
        """
        outputs = {"image_output": "projected", "text_output": "projected", "pooling": "cls", "resize": "center"}
        config = parse(BackboneConfig, {"spec": spec, **outputs})
        if not scheme_of(spec).pretrained:
            raise UsageError(f"{spec!r} has no pretrained encoders — use clip:ID_OR_FOLDER or towers:IMAGE,TEXT")
        backbone = load_backbone(config)
        if backbone.image_dim != backbone.text_dim:
            message = f"{spec!r} gives {backbone.image_dim} and {backbone.text_dim} dimensions: not one space"
            raise UsageError(f"{message} — train heads on top: vacsr train, with backbone.spec={spec}")
        config = config.model_copy(update={"head": HeadConfig(kind="none", dim=backbone.image_dim)})
        method = method_config(dict(backbone.pretrained_loss) or {"name": "infonce", "learnable": False})
        return cls(backbone, build_method(method, dim=backbone.image_dim), config=config).eval()

    @classmethod
    def from_vectors(cls, dim: int, provenance: Provenance = UNKNOWN) -> Self:
        """Encoders that are known only by vectors of images and texts in one space. It reads such, and their cosine is
        the score."""
        config = BackboneConfig(image_scaling="none", text_scaling="none", head=HeadConfig(kind="none", dim=dim))
        method = method_config({"name": "infonce", "learnable": False})
        return cls.build(method, config, image_dim=dim, text_dim=dim, provenance=provenance).eval()

    @classmethod
    def from_pretrained(cls, source: str | Path, *, revision: str | None = None) -> Self:
        """Read what :meth:`save_pretrained` wrote: a model folder, a run folder (its ``model/``), or a Hub id.

        ``revision``: a branch, tag or commit on the Hub; ``user/model@revision`` is the same. With ``HF_HUB_OFFLINE=1``
        ids are read from the cache. What :func:`vacsr.pretrained.encoder_spec` knows needs no training: see
        :meth:`from_encoders`.
        """
        source = str(hub_id(source, revision) or source)
        spec = encoder_spec(source)
        if spec is not None:
            return cls.from_encoders(spec)
        saved = SavedModel.open(source)
        tensors, raw = saved.tensors(), saved.config
        try:
            model = cls.build(
                method_config(raw["method"]), parse(BackboneConfig, raw["backbone"]), assets=saved.assets,
                image_dim=raw["image_dim"], text_dim=raw["text_dim"], provenance=Provenance(**raw["provenance"]),
            )  # fmt: skip
            model.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            message = f"{saved.folder}: weights and config.json do not fit together ({error})"
            raise DataError(f"{message} — save the model again") from error
        model._loaded = (saved.revision, raw.get("weights", ""), read_card(saved.folder))
        return model.eval()

    @property
    def untrained(self) -> bool:
        """Only pretrained encoders: nothing of vacsr was trained on top of them."""
        return self.config.head.kind == "none" and not any(p.requires_grad for p in self.method.parameters())

    @property
    def networks(self) -> tuple[Network, ...]:
        """This one, and the second where there is one."""
        return (self,) if self.second is None else (self, self.second)

    @property
    def dim(self) -> int:
        """Of an embedding: d times the number of members, and twice that with two networks."""
        return self.config.head.dim * sum(len(network.heads) for network in self.networks)

    def embed_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Embedding:
        """Features [N, D_image], or photos [N, 3, H, W] uint8, to unit vectors [N, dim]; the rest is for training.

        The vectors of all members and networks stand end to end, so the cosine is the mean of their cosines.
        """
        return self._embed("image", lambda backbone, draws: backbone.encode_images(images, draws, mix), noise)

    def embed_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Embedding:
        """Features [M, D_text], or tokens [M, L] with −1 for padding, to unit vectors [M, dim]."""
        return self._embed("text", lambda backbone, draws: backbone.encode_texts(texts, draws), noise)

    def _embed(
        self, side: Side, encode: Callable[[Backbone, RowNoise | None], Tokens], noise: RowNoise | None
    ) -> Embedding:
        """Unit vectors of all members end to end as one; a member's networks stand side by side. -> [N, dim]"""
        networks: list[list[Embedding]] = []
        # The second network has its own draws: it sees other crops and drops other units.
        for network, draws in zip(self.networks, (noise, noise and noise.other(Stream.SECOND_NETWORK)), strict=False):
            tokens = encode(network.backbone, draws)
            every = enumerate(network.heads)
            networks.append([heads.project(side, tokens, of_member(draws, member)) for member, heads in every])
        parts: list[Embedding] = [part for member in zip(*networks, strict=True) for part in member]
        if len(parts) == 1:
            return parts[0]
        variances = [part.log_var for part in parts if part.log_var is not None]
        mean = torch.cat([part.mean for part in parts], dim=-1) * math.sqrt(1.0 / len(parts))
        return Embedding(mean, torch.cat(variances, dim=-1) if variances else None)

    def param_groups(self, towers: TowersConfig | None = None) -> list[ParamGroup]:
        """Heads, pooling, method and towers; towers have their own rates, and one with rate 0 is omitted."""
        plan = towers or TowersConfig()
        every = [heads for network in self.networks for heads in network.heads]
        heads = [group for part in every for group in split_by_decay("heads", part.head_params())]
        in_towers = [group for network in self.networks for group in network.tower_groups(plan)]
        return [*heads, *self.method.param_groups(), *in_towers]

    def count_parameters(self) -> int:
        """All but those of checkpoints that no token passes."""
        unused = sum(p.numel() for network in self.networks for p in network.backbone.unused_params())
        return sum(p.numel() for p in self.parameters()) - unused

    @property
    def has_towers(self) -> bool:
        """Whether it reads photos and words; otherwise cached features."""
        return not self.backbone.cached

    def freeze(self, towers: Iterable[str]) -> None:
        """Freeze these towers ("image", "text") of all networks and unfreeze the others."""
        frozen = frozenset(towers)
        for network in self.networks:
            for name, parts in network.backbone.tower_params().items():
                for _, parameter in chain(parts.stem, *parts.blocks, parts.variance):
                    parameter.requires_grad_(name not in frozen)

    def compile_blocks(self, on: bool) -> None:
        """torch.compile the towers' blocks, or run them uncompiled again."""
        for network in self.networks:
            network.backbone.compile_blocks(on)


load_model = MatchingModel.from_pretrained
"""A trained model, from a run, a model folder or a Hub id; or pretrained encoders: ``clip:ID_OR_FOLDER``."""


def choose_device(name: str | torch.device) -> torch.device:
    """``auto`` is CUDA where present; asking for a GPU that is not there is an error."""
    if isinstance(name, torch.device):
        return name
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"unknown device '{name}' — use auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise EnvironmentProblem("this torch sees no CUDA GPU — use device=cpu, or see: vacsr doctor")
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None and device.index >= (gpus := torch.cuda.device_count()):
        raise EnvironmentProblem(f"no GPU '{name}', there are {gpus} — use a number below {gpus}, or cuda")
    return device
