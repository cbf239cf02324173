"""The paper's probability, one function per equation: relaxed one-hot, mixture draw, KL bound, STE sigmoid."""

import torch
from torch import Tensor


def ste_sigmoid(logit: Tensor) -> Tensor:
    """sigmoid(logit) whose derivative is 1, so that ½(y−p)² has BCE's gradient p−y (paper App. B.1). [...] -> [...]

    >>> m = torch.tensor(2.0, requires_grad=True)
    >>> ste_sigmoid(m).backward()
    >>> m.grad
    tensor(1.)
    """
    return torch.sigmoid(logit).detach() + (logit - logit.detach())


def relaxed_one_hot(log_alpha: Tensor, gumbel: Tensor, *, temperature: float = 1.0, hard: bool = False) -> Tensor:
    """softmax((log α + g)/τ); ``hard`` rounds it and keeps the soft gradient. [K] or [..., K], [..., K] -> [..., K]"""
    soft = torch.softmax((log_alpha + gumbel) / temperature, dim=-1)
    if not hard:
        return soft
    rounded = torch.zeros_like(soft).scatter(-1, soft.argmax(dim=-1, keepdim=True), 1.0)
    return rounded + soft - soft.detach()


def mixture_draw(mean: Tensor, log_var: Tensor, *, weights: Tensor, noise: Tensor) -> Tensor:
    """z = Σ_k g_k (μ_k + σ_k ε_k). [..., K, D], weights [..., K], noise [..., K, D] -> [..., D]"""
    components = torch.addcmul(mean, torch.exp(0.5 * log_var), noise)
    return (weights.unsqueeze(-1) * components).sum(dim=-2)


def kl_to_standard_normal(mean: Tensor, log_var: Tensor) -> Tensor:
    """KL(N(μ, e^logσ²) ‖ N(0, I)), summed over D. [..., K, D] -> [..., K]

    >>> float(kl_to_standard_normal(torch.tensor([[2.0]]), torch.zeros(1, 1)))
    2.0
    """
    return (0.5 * (mean.square() + log_var.exp() - 1.0 - log_var)).sum(dim=-1)


def mixture_kl_bound(alpha: Tensor, kl: Tensor) -> Tensor:
    """Σ_k α_k KL(p_k ‖ N(0, I)) ≥ KL(Σ_k α_k p_k ‖ N(0, I)), by convexity (paper App. B.2).

    alpha [K] or [..., K], kl of each component [..., K] -> [...]
    """
    return (alpha * kl).sum(dim=-1)


def bounded_variance(log_var: Tensor) -> Tensor:
    """v = sigmoid(logσ²) = σ²/(1+σ²) in (0, 1), what L_σ and the reported uncertainty see. [...] -> [...]"""
    return torch.sigmoid(log_var)
