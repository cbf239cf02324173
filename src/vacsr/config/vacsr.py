"""The paper's method: shape of the adapter, readings of the objective."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vacsr.config.base import Config, MethodConfig


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
    cosine_weight: Annotated[float, Field(ge=0)] = 0.3
    """Sigmoid loss on the residual's own a·cos+b (ours): the cosine stays a grade by itself."""
    correction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share by which a label gives way to the residual's own detached score (ours): wrong labels pull less."""
    fused: bool | Literal["auto"] = "auto"
    """Draw z and its KL in one kernel, the same loss; `auto`: where Triton, a CUDA GPU and the settings allow it."""


class VacsrConfig(MethodConfig):
    """The paper's method: adapter and objective. The field defaults are the preset `default`."""

    name: Literal["vacsr"] = "vacsr"
    """Of the method."""
    adapter: AdapterConfig = AdapterConfig()
    """The model."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """Adapter learning rate relative to the heads'."""
