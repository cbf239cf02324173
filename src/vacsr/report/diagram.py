"""A drawing of the model (paper Fig. 2), from left to right: what is trained, what is drawn, where the losses act."""

from __future__ import annotations

from typing import NamedTuple

from vacsr.report import svg
from vacsr.report.html import Html

_WIDTH, _HEIGHT = 1086.0, 390.0
_LINE = 16.0  # between two lines of text
_TOLD = (
    "The model. An image tower gives v and a text tower gives t, both of length one. Their elementwise product goes "
    "through the trunk, a linear layer with ReLU. K heads give means μ and log-variances of K Gaussians, mixed by "
    "weights α. In training z is drawn from the mixture; at test time z is its mean. The decoder turns z into the "
    "score, a sigmoid of its logit; the log-variances give the uncertainty σ. The reconstruction loss compares the "
    "score with the label, the KL loss pulls each Gaussian to the standard normal, and the loss L σ fits the "
    "variance to the error on labelled pairs and on the hardest negatives."
)


class _Box(NamedTuple):
    """A part of the model; its place is its middle."""

    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...]
    style: str = "part"

    @property
    def left(self) -> tuple[float, float]:
        return self.x - self.width / 2, self.y

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def top(self) -> tuple[float, float]:
        return self.x, self.y - self.height / 2

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2


_IMAGE = _Box(78, 120, 136, 60, ("image tower", "+ head, L2 norm"), "tower")
_TEXT = _Box(78, 248, 136, 60, ("text tower", "+ head, L2 norm"), "tower")
_PRODUCT = _Box(234, 184, 62, 62, ("v ⊙ t",), "product")
_TRUNK = _Box(345, 184, 104, 60, ("trunk", "linear, ReLU"))
_MEAN = _Box(500, 120, 142, 60, ("K heads", "μ₁ … μ_K"))
_VARIANCE = _Box(500, 248, 142, 60, ("K heads", "log σ²₁ … log σ²_K"))
_DRAW = _Box(682, 120, 166, 76, ("Gaussian mixture", "training: a draw z", "test: the mean z"), "mixture")
_DECODER = _Box(842, 120, 98, 76, ("decoder", "linear, ReLU", "linear"))
_SCORE = _Box(1000, 120, 156, 60, ("score p", "sigmoid of the logit"), "result")
_SIGMA = _Box(1000, 248, 156, 60, ("uncertainty σ", "mean of sigmoid(log σ²)"), "result")
_KL = _Box(500, 356, 190, 52, ("KL", "each Gaussian to N(0, I)"), "loss")
_RECON = _Box(1000, 34, 156, 52, ("reconstruction", "½(label − p)², STE"), "loss")
_FIT = _Box(842, 356, 340, 52, ("L_σ", "fits σ² to (label − p)²: matches, hardest others"), "loss")
_BOXES = (_IMAGE, _TEXT, _PRODUCT, _TRUNK, _MEAN, _VARIANCE, _DRAW, _DECODER, _SCORE, _SIGMA, _KL, _RECON, _FIT)


def model_diagram() -> Html:
    """The whole drawing; wider than a phone, so its box scrolls."""
    parts = [_arrow_head()]
    parts += _ways()
    for box in _BOXES:
        parts += _box(box)
    parts += [
        svg.words("v", 174, 112, style="entry", anchor="middle"),
        svg.words("t", 174, 266, style="entry", anchor="middle"),
        svg.words("z", 778, 111, style="entry", anchor="middle"),
        svg.words("dashed: losses, in training only", 10, 372, style="tick"),
    ]
    return svg.picture(parts, height=_HEIGHT, label=_TOLD, width=_WIDTH)


def _ways() -> list[str]:
    """The arrows: data flow whole, losses dashed."""
    fork = _TRUNK.right[0] + 16
    below, beside = _VARIANCE.y - 12, _VARIANCE.y
    back = _SCORE.right[0] - 20
    return [
        _way([_IMAGE.right, (192, _IMAGE.y), (216, 158)]),
        _way([_TEXT.right, (192, _TEXT.y), (216, 210)]),
        _way([_PRODUCT.right, _TRUNK.left]),
        _way([_TRUNK.right, (fork, _TRUNK.y), (fork, _MEAN.y), _MEAN.left]),
        _way([_TRUNK.right, (fork, _TRUNK.y), (fork, _VARIANCE.y), _VARIANCE.left]),
        _way([_MEAN.right, _DRAW.left]),
        _way([(_VARIANCE.right[0], below), (_DRAW.x, below), _DRAW.bottom]),
        _way([_DRAW.right, _DECODER.left]),
        _way([_DECODER.right, _SCORE.left]),
        _way([(_VARIANCE.right[0], beside), _SIGMA.left]),
        _way([_SCORE.top, _RECON.bottom], style="way loss"),
        _way([_VARIANCE.bottom, _KL.top], style="way loss"),
        _way([(_FIT.x - 110, beside), (_FIT.x - 110, _FIT.top[1])], style="way loss"),
        _way([(back, _SCORE.bottom[1]), (back, 184), (_FIT.x + 40, 184), (_FIT.x + 40, _FIT.top[1])], style="way loss"),
    ]


def _arrow_head() -> str:
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    return f'<defs><marker id="tip" {size}><path class="tip" d="M0 0L8 4L0 8Z"/></marker></defs>'


def _way(points: list[tuple[float, float]], *, style: str = "way") -> str:
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{style}" d="M{steps}" marker-end="url(#tip)"/>'


def _box(box: _Box) -> list[str]:
    x, y = box.x - box.width / 2, box.y - box.height / 2
    radius = box.height / 2 if box.style == "product" else 9
    place = f'x="{x:.1f}" y="{y:.1f}" width="{box.width:g}" height="{box.height:g}" rx="{radius:g}"'
    frame = f'<rect class="box {box.style}" {place}/>'
    first = box.y + 4.5 - _LINE * (len(box.lines) - 1) / 2
    said = [
        svg.words(line, box.x, first + _LINE * place, style="boxed" if place else "boxed head", anchor="middle")
        for place, line in enumerate(box.lines)
    ]
    return [frame, *said]
