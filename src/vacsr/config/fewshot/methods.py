"""All few-shot methods together."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from vacsr.config.base import Config
from vacsr.config.fewshot.adapters import MmaConfig, MmrlConfig
from vacsr.config.fewshot.prompts import CocoopConfig, CoopConfig, ZeroshotConfig
from vacsr.config.fewshot.tuning import ClipoodConfig, CopromptConfig, MapleConfig
from vacsr.config.fewshot.vacsr import FewshotVacsrConfig

AnyFewshotConfig = (
    ZeroshotConfig
    | CoopConfig
    | CocoopConfig
    | MapleConfig
    | CopromptConfig
    | MmaConfig
    | MmrlConfig
    | ClipoodConfig
    | FewshotVacsrConfig
)
FewshotMethodConfig = Annotated[AnyFewshotConfig, Field(discriminator="name")]

FEWSHOT_METHODS: dict[str, type[Config]] = {
    kind.model_fields["name"].default: kind for kind in get_args(AnyFewshotConfig)
}
"""Config classes by the name that a recipe writes."""
