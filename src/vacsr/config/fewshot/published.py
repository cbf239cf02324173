"""Each paper's plan by data set and protocol: what ``preset: paper`` sets where a recipe says nothing.

From the papers and their public configurations, which all run in one frame: SGD with momentum 0.9 and weight decay
5e-4, a cosine that moves once an epoch, and a first epoch at 1e-5. Half precision there, float32 here unless asked for.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

Plan = dict[str, dict[str, Any]]
"""``{"method": fields, "train": fields}``."""

_FRAME: dict[str, Any] = {
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "schedule": "cosine-epoch",
    "warmup_epochs": 1,
    "warmup_lr": 1e-5,
    "crop": (0.08, 1.0),
    "flip": 0.5,
}

_TRAIN: dict[str, dict[str, Any]] = {
    "zeroshot": {},
    "coop": {**_FRAME, "lr": 0.002, "batch_size": 32, "epochs": 200},
    "cocoop": {**_FRAME, "lr": 0.002, "batch_size": 1, "epochs": 10},
    "maple": {**_FRAME, "lr": 0.0035, "batch_size": 4, "epochs": 5},
    # Both views are squeezed whole and go through RandAugment; no crop and no flip.
    "coprompt": {
        **_FRAME,
        "lr": 0.0035,
        "batch_size": 4,
        "epochs": 8,
        "view": "randaugment",
        "second_view": "randaugment",
    },
    "mma": {**_FRAME, "lr": 0.0015, "batch_size": 16, "epochs": 5},
    "mmrl": {**_FRAME, "optimizer": "adamw", "lr": 0.001, "batch_size": 4, "epochs": 10, "crop": (0.5, 1.0)},
    "clipood": {
        **_FRAME,
        "optimizer": "adamw",
        "lr": 5e-6,
        "weight_decay": 0.1,
        "batch_size": 36,
        "steps_per_epoch": 500,
        "epochs": 1,
        "schedule": "cosine-step",
        "warmup_epochs": 0,
        "crop": (0.7, 1.0),
    },
    # Optimiser and rate are not stated; the paper says that it follows MMA's set-up.
    "vacsr": {**_FRAME, "lr": 0.0015, "batch_size": 16, "epochs": 5},
}
"""For any data set, base-to-novel."""

_TRAIN_ON: dict[str, dict[str, dict[str, Any]]] = {
    "coop": {"imagenet": {"epochs": 50}},
    "coprompt": {"food101": {"epochs": 5}},
    "mma": {"imagenet": {"batch_size": 128}},
    "mmrl": {"imagenet": {"batch_size": 32, "epochs": 5}},
    "clipood": {
        "imagenet": {"epochs": 10},
        "fgvc_aircraft": {"epochs": 10},
        "stanford_cars": {"epochs": 5},
        "sun397": {"epochs": 5},
        "ucf101": {"epochs": 2},
    },
    "vacsr": {"imagenet": {"batch_size": 128}, "sun397": {"batch_size": 128}, "eurosat": {"batch_size": 5}},
}
"""On top of that, by data set."""

_CONSISTENCY = {
    "stanford_cars": 7.0,
    "fgvc_aircraft": 6.0,
    "sun397": 6.0,
    "dtd": 6.0,
    "food101": 5.0,
    "oxford_flowers": 4.0,
    "ucf101": 3.0,
    "imagenet": 0.5,
    "caltech101": 0.5,
    "oxford_pets": 0.2,
    "eurosat": 0.01,
}
"""MMRL's λ, chosen for each data set."""

_COPROMPT = {
    "imagenet": (12, 4, 8.0),
    "caltech101": (12, 4, 4.0),
    "oxford_pets": (12, 2, 0.1),
    "stanford_cars": (12, 4, 4.0),
    "oxford_flowers": (9, 4, 8.0),
    "food101": (9, 4, 0.5),
    "fgvc_aircraft": (9, 4, 2.0),
    "sun397": (12, 4, 8.0),
    "dtd": (12, 2, 8.0),
    "eurosat": (12, 2, 0.1),
    "ucf101": (12, 4, 2.0),
}
"""CoPrompt's depth, tokens and consistency, chosen for each data set in its public code."""

_METHOD_ON: dict[str, dict[str, dict[str, Any]]] = {
    "coprompt": {
        name: {"depth": depth, "tokens": tokens, "consistency": weight}
        for name, (depth, tokens, weight) in _COPROMPT.items()
    },
    # Prompts and pairs in parts that the backward pass works out again: memory, not method.
    "vacsr": {name: {"text_chunk": 250, "pair_chunk": 16_384} for name in ("imagenet", "sun397")},
    "mmrl": {
        **{name: {"consistency": weight} for name, weight in _CONSISTENCY.items()},
        "eurosat": {"consistency": _CONSISTENCY["eurosat"], "rep_dim": 2048},
    },
}
"""Method fields by data set; everything else is the class defaults."""

_DOMAIN: dict[str, Plan] = {
    # One epoch, as quoted by its authors; a first epoch at 1e-5 would be all there is, so there is none here.
    "mma": {"method": {"layers": 4}, "train": {"epochs": 1, "warmup_epochs": 0}},
    "maple": {"method": {"depth": 3}, "train": {"lr": 0.0026, "epochs": 2}},
    "clipood": {"method": {"beta": 0.5}, "train": {}},
    "mmrl": {"method": {"consistency": 0.2}, "train": {"epochs": 1, "batch_size": 32, "warmup_epochs": 0}},
}
"""On top of all that, for domain shift."""


def published(method: str, dataset: str = "", protocol: str = "base-to-novel") -> Plan:
    """The fields that a method's paper sets; a data set it does not name gets what it does for most.

    >>> published("mmrl", "food101")["method"], published("maple", "imagenet", "domain")["train"]["lr"]
    ({'consistency': 5.0}, 0.0026)
    """
    plan: Plan = {
        "method": dict(_METHOD_ON.get(method, {}).get(dataset, {})),
        "train": {**_TRAIN.get(method, {}), **_TRAIN_ON.get(method, {}).get(dataset, {})},
    }
    if protocol == "domain":  # the epochs of a set of 16,000 shots would leave a small one with a few steps
        for section, fields in _DOMAIN.get(method, {}).items():
            plan[section] |= {} if section == "train" and dataset != "imagenet" else fields
    return deepcopy(plan)
