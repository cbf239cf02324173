"""Few-shot recipes: what each section says, and how YAML, overrides and a paper's published plan become one recipe."""

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from vacsr.config import BackboneConfig
from vacsr.config.base import Config, FewshotMethodConfig, method_entry
from vacsr.config.io import merge, merge_layers, parse, parse_overrides, recipe_layers, resolve_method
from vacsr.data.fewshot import CLASS_FORMATS
from vacsr.data.formats import parse_spec
from vacsr.errors import UsageError
from vacsr.fewshot.methods.vacsr import Blocks, FewshotVacsrConfig

_Share = Annotated[float, Field(gt=0, le=1)]


class FewshotDataConfig(Config):
    """A data set of labelled photos, a draw of shots from it, and the protocol that says what is tested."""

    spec: str = "scenes:classes=24"
    """SPEC string of labelled photos, e.g. `coop:ROOT,set=oxford_pets`, `folder:PATH`, `csv:FILE`."""
    protocol: Literal["base-to-novel", "domain", "all"] = "base-to-novel"
    """Train on the first half of the classes and test each half; train on all and test the targets too; or neither."""
    shots: Annotated[int, Field(ge=1)] = 16
    """Training photos per class; a class with fewer gives all it has. Validation has min(shots, 4)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Of the draw of shots; the public results average 1, 2 and 3."""
    shots_file: str = ""
    """A draw to take instead of shots and seed: `shots.json` of another run, or a published index file."""
    targets: dict[str, str] = Field(default_factory=dict)
    """For `domain`: a name in the report and the SPEC of each further data set, tested over its own classes."""
    template: str = ""
    """Sentence of a class with {} for its name, for the source and all targets; empty takes each data set's own."""
    sentences: str = ""
    """JSON file {class name: [sentences]} with descriptions of every class, for methods that read them (CoPrompt)."""

    @model_validator(mode="after")
    def _check_specs(self) -> Self:
        for spec in (self.spec, *self.targets.values()):
            parse_spec(spec, formats=CLASS_FORMATS)
        if (self.protocol == "domain") != bool(self.targets):
            raise UsageError("only domain tests data.targets — write protocol: domain with targets: {sketch: SPEC}")
        if "source" in self.targets:
            raise UsageError("a target is called 'source', as the report calls data.spec itself — give it another name")
        return self


class FewshotTrainConfig(Config):
    """How a few-shot method learns. The final weights count: no epoch is chosen by a score."""

    epochs: Annotated[int, Field(ge=1)] = 5
    """Passes over the shots, or runs of steps_per_epoch."""
    steps_per_epoch: Annotated[int, Field(ge=0)] = 0
    """0: as many batches as the shots fill; else so many steps, over the shots again and again."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Photos per step. Shots that do not fill a last batch wait for another epoch; fewer than one batch are one."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD in most of the public code."""
    lr: Annotated[float, Field(gt=0)] = 0.0015
    """Of everything that learns; a method's groups scale it."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    """Added to the gradient by SGD, decoupled in AdamW."""
    schedule: Literal["cosine-epoch", "cosine-step", "constant"] = "cosine-epoch"
    """A half cosine from lr to 0 that moves after every epoch, as the public frame does, or after every step."""
    warmup_epochs: Annotated[int, Field(ge=0)] = 1
    """First epochs at warmup_lr. As in the public frame the cosine starts after them, so it does not quite end."""
    warmup_lr: Annotated[float, Field(gt=0)] = 1e-5
    """Constant."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Batches whose gradients make one optimiser step."""
    clip_norm: Annotated[float, Field(ge=0)] = 0.0
    """Gradient norm bound; 0 for none."""
    view: Literal["crop", "randaugment"] = "crop"
    """Augmentation of a photo: a random resized crop and a flip; or squeezed whole, then RandAugment."""
    second_view: Literal["crop", "randaugment"] = "randaugment"
    """The same for the other view, where a method asks for one (CoPrompt)."""
    crop: tuple[_Share, _Share] = (0.08, 1.0)
    """Range of the crop's area as a share of the photo's; its aspect is drawn from 3/4 to 4/3."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a left-right flip of a crop."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` autocasts matrix products."""
    device: str = "auto"
    """`auto` takes CUDA where present."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Of new weights, the order of shots and every draw; the draw of shots has its own."""
    cache_gb: Annotated[float, Field(ge=0)] = 4.0
    """Decoded photos are cached while they fit into this; those beyond it are decoded again in every epoch."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Threads that read photos; 0 takes one per core."""
    log_every: Annotated[int, Field(ge=1)] = 20
    """Steps between log rows."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints within an epoch; 0 for none."""
    checkpoint_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs between checkpoints; 0 for none."""
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl",)
    """JSON lines are always written; the others need their extras."""


class SearchConfig(Config):
    """Candidates to choose from on the validation shots (paper, Appendix C.2); all combinations are tried.

    An empty list leaves that field as the recipe has it; with all three empty nothing is searched.
    """

    image_blocks: tuple[Blocks, ...] = ()
    """Blocks of the image tower that learn; the others are frozen."""
    text_blocks: tuple[Blocks, ...] = ()
    """The same for the text tower."""
    epochs: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of train.epochs."""

    def candidates(self) -> list[dict[str, Any]]:
        """All combinations in the order written, the last list fastest; none where nothing is searched.

        >>> SearchConfig(image_blocks=("first 1", "last 2"), epochs=(5,)).candidates()
        [{'image_blocks': 'first 1', 'epochs': 5}, {'image_blocks': 'last 2', 'epochs': 5}]
        """
        searched = {name: values for name, values in self if values}
        return [dict(zip(searched, values, strict=True)) for values in product(*searched.values())] if searched else []


class FewshotEvaluateConfig(Config):
    """What `report.json` holds after training."""

    batch_size: Annotated[int, Field(ge=1)] = 100
    """Photos at a time; results do not depend on it."""
    bins: Annotated[int, Field(ge=1)] = 15
    """Of equal width, for the expected calibration error."""
    coverages: tuple[_Share, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """Shares of the photos, the surest first, whose accuracy is reported."""


class FewshotRecipe(Config):
    """A whole few-shot run."""

    task: Literal["fewshot"] = "fewshot"
    """Distinguishes these recipes from those of `vacsr train`."""
    preset: Literal["paper", "none"] = "paper"
    """`paper` takes what each method's paper sets for this data set and protocol; fields that the recipe writes win."""
    data: FewshotDataConfig = FewshotDataConfig()
    """What to learn from and where to test."""
    backbone: BackboneConfig = BackboneConfig(spec="clip:vit-b16")
    """A CLIP (`spec: clip:…`), or a run of `vacsr train` (`start: RUN`). Pooling and outputs are CLIP's own."""
    method: FewshotMethodConfig = FewshotVacsrConfig()
    """What learns; in a recipe also `preset: paper`, which for vacsr is the adapter and the loss as printed."""
    search: SearchConfig = SearchConfig()
    """What is chosen on the validation shots before the final run."""
    train: FewshotTrainConfig = FewshotTrainConfig()
    """How it learns."""
    evaluate: FewshotEvaluateConfig = FewshotEvaluateConfig()
    """What is reported."""

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        for name in (name for choice in self.search.candidates()[:1] for name in choice):
            if name != "epochs" and name not in type(self.method).model_fields:
                raise UsageError(f"method '{self.method.name}' has no {name} to search — take search.{name} out")
            if not method_entry(self.method.name, task="fewshot").method.trains:
                raise UsageError(f"method '{self.method.name}' does not train — take search out")
        return self


_DEFAULT = FewshotRecipe()


def read_fewshot(path: Path, overrides: Iterable[str] = ()) -> FewshotRecipe:
    """A recipe file, on top of the one that its ``base:`` names, and dotted overrides on top of both."""
    return fewshot_from(merge_layers(*recipe_layers(path)), overrides)


def fewshot_from(raw: Mapping[str, Any] | None, overrides: Iterable[str] = ()) -> FewshotRecipe:
    """A recipe from parsed YAML and dotted overrides; below both of them the published plan.

    The backbone is a CLIP where none is named; that of other recipes is cached features, which cannot be prompted.
    """
    raw = merge_layers(raw or {}, parse_overrides(overrides))
    if isinstance(raw.get("data"), Mapping) and "pairs" in raw["data"]:
        raise UsageError("this is a recipe of vacsr train, since it has data.pairs — type: vacsr train RECIPE.yaml")
    raw["method"] = resolve_method(raw["method"], task="fewshot")
    backbone, data, train = (raw.get(name, {}) for name in ("backbone", "data", "train"))
    if isinstance(backbone, Mapping) and not backbone.get("spec") and not backbone.get("start"):
        raw["backbone"] = {**backbone, "spec": _DEFAULT.backbone.spec}
    if raw.get("preset", "paper") == "paper" and isinstance(data, Mapping) and isinstance(train, Mapping):
        spec = parse_spec(str(data.get("spec", _DEFAULT.data.spec)), formats=CLASS_FORMATS)
        dataset = spec.options.get("set", "") if spec.scheme == "coop" else spec.scheme  # as plans call it
        protocol = str(data.get("protocol", _DEFAULT.data.protocol))
        plan = method_entry(raw["method"]["name"], task="fewshot").method.plan.fields(dataset, protocol)
        raw |= {"method": merge(plan["method"], raw["method"]), "train": merge(plan["train"], train)}
    return parse(FewshotRecipe, raw)
