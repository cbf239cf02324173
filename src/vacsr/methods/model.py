"""A network, or two, and a method: what is trained, saved and scored with."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from vacsr.backbones import Backbone, load_backbone
from vacsr.backbones.mixing import Partners
from vacsr.config import BackboneConfig, MethodConfig, TowersConfig
from vacsr.config.base import method_entry
from vacsr.config.io import method_config, parse
from vacsr.data import PairSet, PhotoSet
from vacsr.errors import DataError, UsageError
from vacsr.files import atomic_paths, json_text, read_tensors, save_tensors
from vacsr.methods import build_method
from vacsr.methods.base import Embedding, Method, ParamGroup, split_by_decay
from vacsr.methods.network import Network
from vacsr.methods.saved import (
    ASSETS,
    SCHEMA,
    assets_of,
    check_assets,
    check_start,
    config_digest,
    model_card,
    model_folder,
    read_config,
    take_over,
)
from vacsr.noise import RowNoise, Stream
from vacsr.provenance import UNKNOWN, Provenance


class MatchingModel(Network):
    """Images and texts in, scores out: the trained whole. ``second`` is there where a method asks for two networks."""

    def __init__(
        self,
        backbone: Backbone,
        method: Method,
        *,
        config: BackboneConfig,
        provenance: Provenance | None = None,
    ) -> None:
        super().__init__(backbone, config)
        self.provenance = provenance or UNKNOWN
        self.method = method
        self.second: Network | None = None

    @classmethod
    def build(
        cls,
        method: MethodConfig | Method,
        config: BackboneConfig,
        *,
        image_dim: int = 0,
        text_dim: int = 0,
        provenance: Provenance | None = None,
        seed: int = 0,
        fit: PairSet | PhotoSet | None = None,
        assets: Path | None = None,
    ) -> MatchingModel:
        """A model with fresh heads, drawn from ``seed`` without touching torch's own generator.

        ``image_dim`` and ``text_dim`` are those of cached features; towers know their own. ``fit``: the training set,
        from which the backbone takes statistics or words. ``assets``: rebuild saved towers, weights to follow. Where
        ``config.start`` names a model, everything but the method is taken over from it.
        """
        start = model_folder(Path(config.start).expanduser()) if config.start and assets is None else None
        if start is not None:
            check_start(config, start)
        known = assets if start is None else start / ASSETS

        def backbone() -> Backbone:
            made = load_backbone(config, image_dim=image_dim, text_dim=text_dim, assets=known)
            if fit is not None:
                made.fit(fit)
            return made

        with _drawn_from(seed):
            first = backbone()
            head = build_method(method, dim=config.head.dim) if isinstance(method, MethodConfig) else method
            if not isinstance(head, Method):
                raise UsageError(f"{type(head).__name__} is not a method — derive it from vacsr.methods.Method")
            model = cls(first, head, config=config, provenance=provenance)
        if head.networks == 2:
            with _drawn_from(seed, "second"):
                model.second = Network(backbone(), config)
        if start is not None:
            take_over(model, start)
        if (
            head.log_var_start is not None
        ):  # after what is taken over: a branch begins as a copy of its tower's last block
            with _drawn_from(seed, "variance"):
                model.add_variance(head.log_var_start)
        return model

    @property
    def networks(self) -> tuple[Network, ...]:
        """This one, and the second where there is one."""
        return (self,) if self.second is None else (self, self.second)

    @property
    def dim(self) -> int:
        """Of an embedding: d, or 2d with two networks."""
        return self.config.head.dim * len(self.networks)

    def embed_images(self, images: Tensor, noise: RowNoise | None = None, mix: Partners | None = None) -> Embedding:
        """Features [N, D_image], or photos [N, 3, H, W] uint8, to unit vectors [N, d]; the rest is for training.

        With two networks [N, 2d]: both unit vectors end to end, divided by √2, so that a cosine of these is the mean
        of both networks' cosines, and whatever scores, saves or gathers embeddings need not know.
        """
        own = super().embed_images(images, noise, mix)
        return own if self.second is None else _joined(own, self.second.embed_images(images, _others(noise), mix))

    def embed_texts(self, texts: Tensor, noise: RowNoise | None = None) -> Embedding:
        """Features [M, D_text], or tokens [M, L] with −1 for padding, to unit vectors [M, d], or [M, 2d]."""
        own = super().embed_texts(texts, noise)
        return own if self.second is None else _joined(own, self.second.embed_texts(texts, _others(noise)))

    def dropout_noise(self, *, seed: int | Tensor, step: Tensor, rows: Tensor) -> tuple[RowNoise, RowNoise]:
        """The draws of one step for images and for texts: augmentation and dropout."""
        return RowNoise(seed, step, rows, Stream.IMAGE), RowNoise(seed, step, rows, Stream.TEXT)

    def param_groups(self, towers: TowersConfig | None = None) -> list[ParamGroup]:
        """Heads, pooling, method and towers, these at rates of their own; a tower with rate 0 is left out."""
        plan = towers or TowersConfig()
        heads = [group for network in self.networks for group in split_by_decay("heads", network.head_params())]
        return [
            *heads,
            *self.method.param_groups(),
            *(g for network in self.networks for g in network.tower_groups(plan)),
        ]

    @property
    def has_towers(self) -> bool:
        """Does it read photos and words, or cached features?"""
        return not self.backbone.cached

    def rest(self, towers: Iterable[str]) -> None:
        """Let these towers ("image", "text") rest: no gradient; the others learn."""
        for network in self.networks:
            network.rest_towers(towers)

    @contextmanager
    def plain_blocks(self) -> Iterator[None]:
        """Without compiled blocks for a while: other batch sizes would each compile anew."""
        compiled = {block: block._compiled_call_impl for block in self._blocks()}
        self.compile_blocks(False)
        try:
            yield
        finally:
            for block, call in compiled.items():
                block._compiled_call_impl = call

    def _blocks(self) -> list[nn.Module]:
        return [block for network in self.networks for block in network.blocks()]

    def compile_blocks(self, on: bool) -> None:
        """torch.compile the towers' blocks, or undo it. Equal blocks share one compilation."""
        for block in self._blocks():
            if on:
                block.compile(dynamic=False)
            else:
                block._compiled_call_impl = None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and a model card; a reader never sees half of them."""
        folder = Path(folder)
        method = self.method.config
        if method_entry(method.name).method is not type(self.method):
            raise UsageError(f"{type(self.method).__name__} cannot be loaded again — put @register above the class")
        assets = assets_of(self.backbone)
        described = {
            "schema": SCHEMA,
            "image_dim": self.backbone.image_dim,
            "text_dim": self.backbone.text_dim,
            "backbone": self.config.model_copy(update={"start": ""}).model_dump(mode="json"),  # needed no more
            "method": method.model_dump(mode="json"),
            "provenance": vars(self.provenance),
            "assets": {name: hashlib.sha256(content).hexdigest() for name, content in assets.items()},
        }
        names = ("model.safetensors", "config.json", "README.md", *(f"{ASSETS}/{name}" for name in assets))
        with atomic_paths(*(folder / name for name in names)) as (weights, config, card, *copies):
            save_tensors(weights, self.state_dict(), metadata={"config": config_digest(described)})
            config.write_text(json_text(described), encoding="utf-8")
            card.write_text(model_card(self, method), encoding="utf-8")
            for copy, content in zip(copies, assets.values(), strict=True):
                copy.write_bytes(content)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> MatchingModel:
        """Read what :meth:`save_pretrained` wrote. A run folder works too: its ``model/`` is taken."""
        folder = model_folder(Path(folder))
        raw = read_config(folder / "config.json")
        tensors, metadata = read_tensors(folder / "model.safetensors")
        if metadata.get("config") != config_digest(raw):
            raise DataError(f"{folder}: config.json and the weights were not saved together — save the model again")
        check_assets(folder, raw.get("assets", {}))
        try:
            model = cls.build(
                method_config(raw["method"]),
                parse(BackboneConfig, raw["backbone"]),
                image_dim=raw["image_dim"],
                text_dim=raw["text_dim"],
                provenance=Provenance(**raw["provenance"]),
                assets=folder / ASSETS,
            )
            model.load_state_dict(tensors)
        except (KeyError, TypeError, RuntimeError) as error:
            raise DataError(f"{folder}: weights and config.json do not fit together ({error})") from error
        return model.eval()


@contextmanager
def _drawn_from(seed: int, part: str = "") -> Iterator[None]:
    """Fresh weights come from this seed; torch's own generator stays where it was.

    A named ``part`` has a stream that no seed's main draws have: seed + 1 would make neighbouring runs share weights.
    """
    own = int.from_bytes(hashlib.sha256(f"{part} {seed}".encode()).digest()[:8]) >> 1 if part else seed
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(own)  # torch.manual_seed would reseed the GPUs too
        yield


def _joined(first: Embedding, second: Embedding) -> Embedding:
    """Two unit vectors as one. [N, d], [N, d] -> [N, 2d]"""
    return Embedding(torch.cat((first.mean, second.mean), dim=-1) * math.sqrt(0.5))


def _others(noise: RowNoise | None) -> RowNoise | None:
    """The second network's own draws: it sees other crops and drops other units."""
    return None if noise is None else noise.other(Stream.SECOND_NETWORK)
