"""The sections of a recipe: data, backbone, train, evaluate. A method's settings stand beside the method."""

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config, RetrievalMethodConfig, method_entry

Share = Annotated[float, Field(ge=0, le=1)]


class NoiseConfig(Config):
    """Label noise injected into the training captions."""

    protocol: Literal["permute-captions", "derange-captions", "swap-shared-noun"] = "permute-captions"
    """Choose int(ratio·M) captions and permute them; with `derange-captions` none stays with its own image, and with
    `swap-shared-noun` each goes to a photo whose captions share a noun with those of its own."""
    ratio: Share = 0.0
    """Share of captions chosen."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The permutation is a function of it, saved and hashed beside the run."""
    file: str = ""
    """A published permutation (.safetensors, .npy, .json or .txt) instead of ratio and seed."""


class DataConfig(Config):
    """Which pairs to train, tune and report on."""

    pairs: str = "synthetic:"
    """SPEC string, e.g. `features:FILE,captions=FILE`."""
    train: str = "train"
    """Split to train on; `all` for data without splits."""
    dev: str = "dev"
    """Split for model selection; empty for none."""
    dev_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of training images held out as dev where the data has no such split."""
    noise: NoiseConfig = NoiseConfig()
    """For experiments on robustness; dev and test stay clean."""
    on_error: Literal["fail", "skip"] = "fail"
    """A photo that cannot be read or a blank caption: stop, or skip it and list it in skipped.json."""
    photo_size: Annotated[int, Field(ge=0)] = 0
    """Side to which training photos are read before the random crop; 0 takes the image tower's own."""
    cache_gb: Annotated[float, Field(ge=0)] = 4.0
    """Photos are decoded once and cached if all fit into this; beyond it they are decoded again in every epoch."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Threads that decode photos; 0 takes one per core."""


class HeadConfig(Config):
    """Projection from tower features to the shared space."""

    kind: Literal["mlp", "linear", "none"] = "mlp"
    """Two layers with GELU, one linear map, or none: the towers' own space, where both have the same width."""
    dim: Annotated[int, Field(ge=1)] = 256
    """d of the shared space; without a head the towers' width."""
    hidden: Annotated[int, Field(ge=0)] = 0
    """Width of the middle layer; 0 means dim."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Between the two layers."""
    init: Literal["torch", "xavier"] = "torch"
    """Initial weights: torch's own, or Xavier uniform with zero biases, as in PCME++."""


class AugmentConfig(Config):
    """What training does to photos and captions; every draw is a function of seed, step and position in the batch."""

    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.6, 1.0)
    """Both sides are cropped by one ratio drawn from here, at a random position; (1, 1) for none."""
    flip: Share = 0.5
    """Probability of a left-right flip."""
    image_tokens: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """p: with u drawn from (0, 1), a photo with u > p loses each token with probability p·u before pooling."""
    text_tokens: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Probability that a word token is masked, replaced or dropped; start and end are left alone."""
    text_mask: Share = 0.5
    """Share of these that become the mask token."""
    text_random: Share = 0.1
    """Share of these that become a random token; the rest are dropped."""


class MixConfig(Config):
    """Mixup and cutmix of a batch's images, and of their labels; the partner of position i is B−1−i."""

    share: Share = 0.25
    """Probability that an image is mixed; 0 for none."""
    alpha: Annotated[int, Field(ge=1)] = 2
    """The weight of the image itself is drawn from Beta(alpha, alpha)."""
    cutmix: Share = 0.5
    """Share of mixed photos that get a rectangle of the partner pasted; the others, and features, are blended."""
    labels: Literal["ids", "diagonal"] = "ids"
    """Mix the labels of all captions of both images, or of the two captions of the batch only, as public code does."""


class LoraConfig(Config):
    """Low-rank updates of pretrained towers: LoRA, with the extra `lora`. They are merged when a model is saved."""

    rank: Annotated[int, Field(ge=0)] = 0
    """r: the towers are frozen, and r·(inputs + outputs) new weights per layer are trained instead; 0 for none."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """An update counts alpha/rank times."""
    targets: tuple[str, ...] = ()
    """Last names of the layers, e.g. `[q_proj, v_proj]` in CLIP; empty for all linear layers of the blocks."""


class BackboneConfig(Config):
    """Towers, pooling and heads."""

    spec: str = "features:"
    """`features:` (cached embeddings), `clip:ID_OR_FOLDER`, `towers:IMAGE,TEXT` (two folders or ids), or `tiny:`."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the same architecture with fresh weights, for timing and tests; `tiny:` has no others."""
    start: str = ""
    """A run or model folder whose towers, pooling and heads training starts from; the method starts fresh."""
    image_scaling: Literal["standardize", "unit", "none"] = "standardize"
    """Of cached features: per-dimension mean and deviation of the training images, saved with the model."""
    text_scaling: Literal["standardize", "unit", "none"] = "unit"
    """Of cached features: unit vectors × √D; sentence embeddings are already comparable in direction."""
    image_output: Literal["hidden", "norm", "projected"] = "hidden"
    """Image tokens after the last block, after the final norm too, or projected as well; PCME++ takes the first."""
    text_output: Literal["hidden", "norm", "projected"] = "norm"
    """Text tokens likewise; PCME++ takes them after the final norm."""
    pooling: Literal["gpo", "mean", "cls"] = "gpo"
    """Tokens to one vector: learned weights over sorted values, the mean, or the class (CLIP text: end) token."""
    image_size: Annotated[int, Field(ge=0)] = 0
    """Side of the square the image tower sees; 0 takes the tower's own."""
    resize: Literal["whole", "center"] = "whole"
    """The whole photo squeezed into the square, or its centre crop as in the towers' own processors."""
    resample: Literal["own", "bicubic", "bilinear"] = "own"
    """Filter that photos are resized with: the tower's own (CLIP: bicubic), or this one; PCME++ resizes bilinearly."""
    pixel_stats: Literal["own", "imagenet"] = "own"
    """Mean and deviation of pixels: the tower's own, or ImageNet's, as PCME++ uses with CLIP."""
    context: Annotated[int, Field(ge=0)] = 0
    """Longest caption in tokens, start and end included; 0 takes the text tower's own. Longer ones are cut."""
    checkpointing: bool = False
    """Recompute the towers' activations in the backward pass: less memory, a third more time."""
    lora: LoraConfig = LoraConfig()
    """Train low-rank updates instead of the towers themselves."""
    augment: AugmentConfig = AugmentConfig()
    """Used in training only, and by towers only."""
    head: HeadConfig = HeadConfig()
    """One for images, one for texts, of the same shape."""


class TowersConfig(Config):
    """How the towers learn beside the heads; cached features have none."""

    image_lr: Annotated[float, Field(ge=0)] = 0.01
    """Learning rate of the image tower relative to train.lr; 0 freezes it."""
    text_lr: Annotated[float, Field(ge=0)] = 0.1
    """Of the text tower."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Block ℓ of L learns at ×decay^(L−ℓ): early blocks change least. Embeddings and norms outside blocks do not."""
    freeze_image: Annotated[int, Field(ge=0)] = 2
    """First epochs in which the image tower is frozen, until the new heads make sense."""
    freeze_text: Annotated[int, Field(ge=0)] = 0
    """First epochs in which the text tower is frozen."""
    ramp: bool = True
    """Warm-up: in the epoch that unfreezes a tower the loss grows linearly from 0."""


class TrainConfig(Config):
    """The training loop."""

    epochs: Annotated[int, Field(ge=1)] = 20
    """Passes over the captions."""
    batch_size: Annotated[int, Field(ge=2)] = 128
    """Captions per step, over all ranks."""
    lr: Annotated[float, Field(gt=0)] = 5e-4
    """Of the heads and the method; groups scale it."""
    towers: TowersConfig = TowersConfig()
    """Learning rates and freezing of the towers."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled, of matrices; biases, norms and scalars have none, here and in the towers (PCME++ decays these too)."""
    optimizer: Literal["adamw", "adamp"] = "adamw"
    """AdamP is the paper's."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Adam's, the paper's and everyone's."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """`step` multiplies lr by decay from decay_at on."""
    decay_at: Share = 0.6
    """Share of the epochs after which `step` decays (12 of 20; the paper: 15 of 25)."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The factor of `step`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up of lr from 0."""
    clip_norm: Annotated[float, Field(ge=0)] = 2.0
    """Gradient norm bound; 0 for none."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Average the weights over steps with this decay, and evaluate and save the average; 0 for none. 0.998 remembers
    about 500 steps; the first steps are averaged over fewer."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Batches per optimiser step; each has its own pair matrix."""
    tile: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Rows of a strip of the pair matrix. Strips give the same gradients (to rounding) in the memory of one strip; 0
    takes the matrix whole; `auto` chooses, and takes it whole where it is small or the loss cannot be split by rows."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """`tf32` lets CUDA round matrix products; `bf16` autocasts them."""
    device: str = "auto"
    """`auto` takes CUDA where present."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of weights, data order and every draw."""
    select: Literal["best", "last"] = "best"
    """Which weights to save: best dev RSUM, or the last epoch's."""
    eval_every: Annotated[int, Field(ge=0)] = 1
    """Epochs between dev evaluations; 0 for never."""
    dev_images: Annotated[int, Field(ge=0)] = 0
    """Number of dev images, from the first, that select the weights; 0 takes all. PCME++: 1,000 of COCO's 5,000."""
    log_every: Annotated[int, Field(ge=1)] = 50
    """Steps between log rows."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 500
    """Steps between checkpoints besides those at epoch ends; 0 for epoch ends only."""
    checkpoint_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs between checkpoints at an epoch's end; 0 for none, as trained towers make them large."""
    compile: bool | Literal["auto"] = False
    """torch.compile towers and loss; `auto` does so on CUDA, and continues without where it fails."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph: small steps are launch-bound."""
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl",)
    """JSON lines are always written; the others need their extras."""


class EvaluateConfig(Config):
    """What `report.json` holds after training."""

    splits: tuple[str, ...] = ("dev", "test")
    """Splits of data.pairs to report; missing ones are left out."""
    protocols: tuple[str, ...] = ("flickr",)
    """`flickr`: the whole split in one gallery. On COCO's test images: `coco-1k`, `coco-5k`, `cxc`, `eccv`;
    on some of them: `cxc-part`, `eccv-part`."""
    judgments: tuple[str, ...] = ()
    """Files of human grades for the report, each as FILE or NAME=FILE."""
    preferences: tuple[str, ...] = ()
    """Files of images with a better and a worse caption, each as FILE or NAME=FILE."""
    captions: tuple[str, ...] = ()
    """Vectors of captions that are judged and not in the data, for models on features: safetensors files."""
    rivals: tuple[str, ...] = ()
    """Scores of other systems on the judged pairs, each as NAME=FILE."""
    ties: Literal["stable", "pessimistic"] = "stable"
    """Equal scores in index order, or every wrong item before the right one."""
    bins: Literal["count", "equal"] = "count"
    """Ten uncertainty bins of equal count, as in the paper's plot, or of equal width, as in its text."""
    posthoc: Literal["none", "cosine"] = "none"
    """Uncertainty for a method that scores by a cosine: none, or 1 − cosine."""


class Recipe(Config):
    """A whole run."""

    data: DataConfig = DataConfig()
    """What to learn from."""
    backbone: BackboneConfig = BackboneConfig()
    """From inputs to the shared space."""
    method: RetrievalMethodConfig = Field(default_factory=lambda: method_entry("vacsr").config(name="vacsr"))
    """Loss and score; in a recipe also `preset`."""
    train: TrainConfig = TrainConfig()
    """How to learn."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """What to report."""
