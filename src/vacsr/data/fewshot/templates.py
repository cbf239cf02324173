"""How a class name becomes a sentence, per data set: the prompts of zero-shot CLIP in CoOp's comparison."""

from __future__ import annotations

from collections.abc import Mapping

from vacsr.errors import UsageError

PLAIN = "a photo of a {}."
"""Where a data set asks for nothing else."""

TEMPLATES: Mapping[str, str] = {
    "imagenet": PLAIN,
    "caltech101": PLAIN,
    "oxford_pets": "a photo of a {}, a type of pet.",
    "stanford_cars": PLAIN,
    "oxford_flowers": "a photo of a {}, a type of flower.",
    "food101": "a photo of {}, a type of food.",
    "fgvc_aircraft": "a photo of a {}, a type of aircraft.",
    "sun397": PLAIN,
    "dtd": "{} texture.",
    "eurosat": "a centered satellite photo of {}.",
    "ucf101": "a photo of a person doing {}.",
    "imagenetv2": PLAIN,
    "imagenet_sketch": PLAIN,
    "imagenet_a": PLAIN,
    "imagenet_r": PLAIN,
}


def check_template(template: str) -> str:
    """The template, if it has one place for the name and no other braces.

    >>> check_template("a drawing of a {}.")
    'a drawing of a {}.'
    """
    rest = template.replace("{}", "", 1)
    if "{}" not in template or "{" in rest or "}" in rest:
        message = f"template {template!r} needs one {{}} where the class name goes, and no other braces"
        raise UsageError(f"{message} — write template={PLAIN}")
    return template
