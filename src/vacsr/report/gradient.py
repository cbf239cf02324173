"""Why the decoder's sigmoid is straight-through: the gradient of the squared error with and without it (paper Fig. 4).

Nothing here is typed in: both curves are what autograd finds behind the library's own loss.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch

from vacsr.objective import reconstruction_error
from vacsr.report.figures import Array
from vacsr.report.html import Html
from vacsr.report.lines import Line, Marks, lines

_POINTS = 121
_LOGITS = 8.0  # the score is within 0.0004 of 0 and 1 there


class Gradient(NamedTuple):
    """The loss's pull on the logit over the score."""

    score: Array
    """[P], sigmoid of the logits, rising."""
    gradient: Array
    """[P], of ½(ŷ−p)² with respect to the logit."""


def loss_gradient(label: float, *, kind: Literal["ste", "plain", "bce"]) -> Gradient:
    """∂L/∂m at logits from −8 to 8, for a pair with this label.

    >>> bool((loss_gradient(1.0, kind="ste").gradient <= 0).all())
    True
    """
    logit = torch.linspace(-_LOGITS, _LOGITS, _POINTS, dtype=torch.float64, requires_grad=True)
    error = reconstruction_error(logit, torch.full_like(logit, label), kind=kind)
    (gradient,) = torch.autograd.grad(error.sum(), logit)
    return Gradient(torch.sigmoid(logit).detach().numpy(), gradient.numpy())


def gradient_figure(label: int) -> Html:
    """Both gradients over the score, for a labelled pair (1) or any other (0)."""
    drawn = []
    for kind, name, style in (
        ("ste", "straight-through (as trained)", "vacsr"),
        ("plain", "plain sigmoid", "infonce dashed"),
    ):
        found = loss_gradient(float(label), kind=kind)  # type: ignore[arg-type]
        drawn.append(Line(name, found.score, found.gradient, style))
    room = 0.06
    ends = (-1 - room, room) if label else (-room, 1 + room)
    title = f"Gradient of the squared error by the score, label {label}"
    y_label = f"∂ ½({label}−p)² / ∂ logit"
    marks = Marks([0.0, 0.25, 0.5, 0.75, 1.0])
    x_label = "score p = sigmoid(logit)"
    return lines(drawn, x_label=x_label, y_label=y_label, title=title, marks=marks, ends=ends, digits=2)


def largest_plain_gradient() -> float:
    """How strong the plain gradient ever gets; straight-through it reaches 1."""
    return float(np.abs(loss_gradient(1.0, kind="plain").gradient).max())
