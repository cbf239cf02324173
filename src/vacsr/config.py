"""Every choice as a typed, frozen field with its reason. How recipes are read is in :mod:`vacsr.recipes`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Frozen, no unknown fields, attribute docstrings become the descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class AdapterConfig(Config):
    """Shape of the variational adapter (SPEC of the paper's encoder, mixture and decoder)."""

    components: Annotated[int, Field(ge=1, le=16)] = 2
    """K: two Gaussians, the paper's best of 1-4; 1 is its ablation "without GMM"."""
    hidden: Annotated[int, Field(ge=0)] = 0
    """Trunk width; 0 means d, which fits the paper's 5.26 M extra parameters."""
    latent: Annotated[int, Field(ge=0)] = 0
    """Width of z; 0 means d."""
    decoder_hidden: Annotated[int, Field(ge=0)] = 16
    """Decoder Linear-ReLU-Linear of this width; 0 makes it one linear layer."""
    input_scale: Literal["d", "sqrt_d", "layernorm", "none"] = "d"
    """Entries of v⊙t are ~1/d after L2 norm and would drown in the bias; ×d brings them to ~1."""
    trunk_norm: bool = False
    """LayerNorm after the trunk: also fits the paper's parameter count, but cannot be folded."""
    mixing: Literal["global", "head"] = "global"
    """α written without (s) in the paper: global logits; `head` predicts them per pair."""
    log_var_clamp: Annotated[float, Field(gt=0)] = 10.0
    """logσ² is kept within ± this: exp stays finite."""
    variance: Literal["exp", "sigmoid"] = "exp"
    """σ² for sampling and KL; `sigmoid` is the reading "sigmoid everywhere"."""
    residual: Literal["none", "cosine"] = "cosine"
    """`cosine` adds a·cos+b to the logit (ours): keeps grades where the decoder overfits labels."""
    residual_scale: float = 10.0
    """a at the start, learnable."""
    residual_bias: float = -10.0
    """b at the start, learnable."""
    residual_learnable: bool = True
    """False keeps a and b where they start: a bounded residual."""
    decode: Literal["mean", "argmax"] = "mean"
    """Test-time z: Σα_kμ_k, or the likeliest component's mean."""
    uncertainty: Literal["variance", "std", "exp"] = "variance"
    """Reported σ of a pair: mean over D of Σα_k·sigmoid(logσ²_k), its root, or with exp."""


class ObjectiveConfig(Config):
    """Weights and readings of L = α·KL + recon + β(L_P + γ·L_N)."""

    kl_weight: Annotated[float, Field(ge=0)] = 5e-4
    """α of the paper."""
    sigma_weight: Annotated[float, Field(ge=0)] = 1.0
    """β: weight of the distributional loss (Appendix E's reading)."""
    negative_weight: Annotated[float, Field(ge=0)] = 1.0
    """γ: weight of the hard negatives in it."""
    weighting: Literal["appendix", "eq13"] = "appendix"
    """`eq13` multiplies recon by β and both σ terms by γ; equal at β=γ=1."""
    reconstruction: Literal["ste", "plain", "bce"] = "ste"
    """½(y−p)² with a straight-through sigmoid; without it the gradient dies near 0 and 1."""
    reduction: Literal["rows", "mean"] = "rows"
    """Reconstruction summed over pairs and divided by B; `mean` divides by B² and learns far less."""
    sigma_variance: Literal["sigmoid", "exp"] = "sigmoid"
    """What L_σ sees of logσ²; `exp` is the paper's ablation "without sigmoid"."""
    sigma_component: Literal["gumbel", "alpha"] = "gumbel"
    """logσ² mixed with the draw's Gumbel weights, or with α."""
    sigma_reduction: Literal["mean", "sum"] = "mean"
    """L_σ over the D dimensions."""
    sigma_detach: bool = False
    """Stop L_σ's gradient at the variance heads, so that it cannot move trunk and towers."""
    negative_rule: Literal["logit", "literal_max"] = "logit"
    """Hardest by score; `literal_max` takes the printed max over the loss, which picks the easiest."""
    hard_negatives: Annotated[int, Field(ge=1)] = 1
    """N_h, averaged."""
    negative_target: Literal[0, 1] = 1
    """ŷ of hard negatives in L_σ, 1 as written."""
    negative_direction: Literal["rows", "both"] = "rows"
    """Hard negatives per image, or per image and per caption."""
    positives: Literal["ids", "diagonal"] = "ids"
    """Every caption of the same image matches, or the diagonal alone."""
    gumbel_temperature: Annotated[float, Field(gt=0)] = 1.0
    """τ of the relaxed one-hot."""
    gumbel_hard: bool = False
    """Round the one-hot forward, keep the soft gradient."""
    free_bits: Annotated[float, Field(ge=0)] = 0.0
    """KL below this many nats per dimension is free (ours)."""
    kl_pairs: Literal["all", "informative"] = "all"
    """KL on every pair, or on positives and hard negatives only (ours)."""
    cosine_weight: Annotated[float, Field(ge=0)] = 0.3
    """Sigmoid loss on the residual's own a·cos+b (ours): the cosine stays a grade by itself."""
    correction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share by which a label gives way to the residual's own detached score (ours): wrong labels pull less."""


class VacsrConfig(Config):
    """The paper's method: adapter and objective. The field defaults are the preset `default`."""

    name: Literal["vacsr"] = "vacsr"
    """Tells the methods apart."""
    adapter: AdapterConfig = AdapterConfig()
    """The model."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """Adapter learning rate relative to the heads'."""


class SigmoidConfig(Config):
    """Sigmoid loss on a·cos+b over all pairs (SigLIP)."""

    name: Literal["sigmoid"] = "sigmoid"
    """Tells the methods apart."""
    scale: float = 10.0
    """a at the start."""
    bias: float = -10.0
    """b at the start."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""


class InfoNCEConfig(Config):
    """Two-way cross entropy over scaled cosines (CLIP)."""

    name: Literal["infonce"] = "infonce"
    """Tells the methods apart."""
    scale: Annotated[float, Field(gt=0)] = 14.3
    """exp(log_scale) at the start, 1/0.07; the paper's preset starts at 1."""
    learnable: bool = True
    """Fixed scales are the paper's loss-tolerance experiment."""
    positives: Literal["diagonal", "ids"] = "diagonal"
    """CLIP's target is the row's own caption; `ids` spreads it over all captions of the image."""


AnyMethodConfig = VacsrConfig | SigmoidConfig | InfoNCEConfig
MethodConfig = Annotated[AnyMethodConfig, Field(discriminator="name")]

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "vacsr": {
        "default": {},
        "paper": {"adapter": {"residual": "none"}, "objective": {"cosine_weight": 0.0, "correction": 0.0}},
    },
    "sigmoid": {"default": {}, "paper": {}},
    "infonce": {"default": {}, "paper": {"scale": 1.0}},
}
"""Fields a preset sets on top of the class defaults; `method: {name: vacsr, preset: paper}` in a recipe."""


class HeadConfig(Config):
    """Projection from tower features to the shared space."""

    kind: Literal["mlp", "linear"] = "mlp"
    """Two layers with GELU, or one linear map."""
    dim: Annotated[int, Field(ge=1)] = 256
    """d of the shared space."""
    hidden: Annotated[int, Field(ge=0)] = 0
    """Width of the middle layer; 0 means dim."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Between the two layers."""
    init: Literal["torch", "xavier"] = "torch"
    """Start of the weights: torch's own, or Xavier uniform with zero biases, as PCME++ has it."""


class AugmentConfig(Config):
    """What training does to photos and captions; every draw is a function of seed, step and place in the batch."""

    crop: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.6, 1.0)
    """Both sides are cropped by one ratio drawn from here, at a random place; (1, 1) for none."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a left-right flip."""
    image_tokens: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """p: with u drawn from (0, 1), a photo with u > p loses each token with probability p·u before pooling."""
    text_tokens: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Probability that a word token is masked, replaced or dropped; start and end are left alone."""
    text_mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of these that become the mask token."""
    text_random: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of these that become a random token; the rest are dropped."""


class BackboneConfig(Config):
    """Towers, pooling and heads."""

    spec: str = "features:"
    """`features:` (cached embeddings), `clip:ID_OR_FOLDER`, `towers:IMAGE,TEXT` (two folders or ids), or `tiny:`."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` builds the same architecture with fresh weights, for timing and tests; `tiny:` has no others."""
    start: str = ""
    """A run or model folder whose towers, pooling and heads training starts from; the method starts afresh."""
    image_scaling: Literal["standardize", "unit", "none"] = "standardize"
    """Of cached features: per-dimension mean and deviation of the training images, kept with the model."""
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
    """The whole photo squeezed into the square, or its centre crop as the towers' own processors have it."""
    pixel_stats: Literal["own", "imagenet"] = "own"
    """Mean and deviation of pixels: the tower's own, or ImageNet's, as PCME++ has with CLIP."""
    context: Annotated[int, Field(ge=0)] = 0
    """Longest caption in tokens, start and end included; 0 takes the text tower's own. Longer ones are cut."""
    checkpointing: bool = False
    """Recompute the towers' activations in the backward pass: less memory, a third more time."""
    augment: AugmentConfig = AugmentConfig()
    """Used in training only, and by towers only."""
    head: HeadConfig = HeadConfig()
    """One for images, one for texts, of the same shape."""


class NoiseConfig(Config):
    """Label noise injected into the training captions."""

    protocol: Literal["permute-captions", "derange-captions"] = "permute-captions"
    """Choose int(ratio·M) captions and permute them among their slots; `derange-captions` lets none come home."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of captions chosen."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The permutation is a function of it, saved and hashed beside the run."""
    file: str = ""
    """A permutation that others published (.safetensors, .npy, .json or .txt) instead of ratio and seed."""


class DataConfig(Config):
    """Which pairs to train, tune and report on."""

    pairs: str = "synthetic:"
    """SPEC string, e.g. `features:FILE,captions=FILE`."""
    train: str = "train"
    """Split to train on; `all` for data without splits."""
    dev: str = "dev"
    """Split for model choice; empty for none."""
    dev_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of training images held out as dev where the data has no such split."""
    noise: NoiseConfig = NoiseConfig()
    """For experiments on robustness; dev and test stay clean."""
    on_error: Literal["fail", "skip"] = "fail"
    """A photo that cannot be read or a blank caption: stop, or leave it out, counted and named in skipped.json."""
    photo_size: Annotated[int, Field(ge=0)] = 0
    """Side to which training photos are read before the random crop; 0 takes the image tower's own."""
    cache_gb: Annotated[float, Field(ge=0)] = 4.0
    """Photos are decoded once and kept if all fit into this; beyond it they are decoded again in every epoch."""
    workers: Annotated[int, Field(ge=0)] = 0
    """Threads that decode photos; 0 takes one per core."""


class TowersConfig(Config):
    """How the towers learn beside the heads; cached features have none."""

    image_lr: Annotated[float, Field(ge=0)] = 0.01
    """Image tower's rate relative to train.lr; 0 keeps the tower as it is."""
    text_lr: Annotated[float, Field(ge=0)] = 0.1
    """Text tower's."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Block ℓ of L learns at ×decay^(L−ℓ): early blocks change least. Embeddings and norms outside blocks do not."""
    freeze_image: Annotated[int, Field(ge=0)] = 2
    """First epochs in which the image tower rests, until the new heads make sense."""
    freeze_text: Annotated[int, Field(ge=0)] = 0
    """First epochs in which the text tower rests."""
    ramp: bool = True
    """In the epoch that wakes a tower the loss grows linearly from 0."""


class TrainConfig(Config):
    """The one loop."""

    epochs: Annotated[int, Field(ge=1)] = 20
    """Passes over the captions."""
    batch_size: Annotated[int, Field(ge=2)] = 128
    """Captions per step, over all ranks."""
    lr: Annotated[float, Field(gt=0)] = 5e-4
    """Of the heads and the method; groups scale it."""
    towers: TowersConfig = TowersConfig()
    """Rates and rest of the towers."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled, of matrices; biases, norms and scalars have none, here and in the towers (PCME++ decays these too)."""
    optimizer: Literal["adamw", "adamp"] = "adamw"
    """AdamP is the paper's."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Adam's, the paper's and everyone's."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """`step` multiplies lr by decay from decay_at on."""
    decay_at: Annotated[float, Field(ge=0, le=1)] = 0.6
    """Share of the epochs after which `step` decays (12 of 20; the paper: 15 of 25)."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """What `step` multiplies with."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear ramp of lr from 0."""
    clip_norm: Annotated[float, Field(ge=0)] = 2.0
    """Gradient norm bound; 0 for none."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Batches per optimiser step; each keeps its own pair matrix."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """`tf32` lets CUDA round matrix products; `bf16` autocasts them."""
    device: str = "auto"
    """`auto` takes CUDA where present."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of weights, data order and every draw."""
    select: Literal["best", "last"] = "best"
    """Weights kept: best dev RSUM, or the last epoch's."""
    eval_every: Annotated[int, Field(ge=0)] = 1
    """Epochs between dev evaluations; 0 for never."""
    dev_images: Annotated[int, Field(ge=0)] = 0
    """First so many dev images choose the weights; 0 takes all. PCME++ looks at 1,000 of COCO's 5,000."""
    log_every: Annotated[int, Field(ge=1)] = 50
    """Steps between log rows."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 500
    """Steps between checkpoints besides those at epoch ends; 0 for epoch ends only."""
    checkpoint_epochs: Annotated[int, Field(ge=0)] = 1
    """Epochs between checkpoints at an epoch's end; 0 for none, as trained towers make them large."""
    compile: bool | Literal["auto"] = False
    """torch.compile towers and loss; `auto` does so on CUDA, and goes on without where it fails."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph: small steps are launch-bound."""
    trackers: tuple[Literal["jsonl", "csv", "tensorboard", "wandb"], ...] = ("jsonl",)
    """JSON lines are always written; the last two need their extras."""


class EvaluateConfig(Config):
    """What `report.json` holds after training."""

    splits: tuple[str, ...] = ("dev", "test")
    """Splits of data.pairs to report; those absent are left out."""
    protocols: tuple[str, ...] = ("flickr",)
    """`flickr`: the whole split is the gallery."""
    judgments: tuple[str, ...] = ()
    """Files of human grades for the report."""
    ties: Literal["stable", "pessimistic"] = "stable"
    """Equal scores in index order, or every wrong item before the right one."""
    bins: Literal["count", "equal"] = "count"
    """Ten uncertainty bins of equal count, as the paper's own figure has them, or of equal width, as it says."""


class Recipe(Config):
    """A whole run."""

    data: DataConfig = DataConfig()
    """What to learn from."""
    backbone: BackboneConfig = BackboneConfig()
    """From inputs to the shared space."""
    method: MethodConfig = VacsrConfig()
    """Head and loss; in a recipe also `preset`."""
    train: TrainConfig = TrainConfig()
    """How to learn."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """What to report."""
