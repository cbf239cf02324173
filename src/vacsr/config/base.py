"""The base of every configuration, and the registry of methods: name, class, config class, presets."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from vacsr.errors import ConfigError, UsageError

Task = Literal["retrieval", "fewshot"]
ENTRY_POINTS = "vacsr.methods"
"""Entry-point group in which an installed package names its methods: `NAME = "package.module"`."""


class Config(BaseModel):
    """Frozen, unknown fields refused, attribute docstrings serve as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise config_error(error, type(self).__name__) from error

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # sections of a recipe do not pass through it

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_fields(cls, raw: Any, handler: Callable[[Any], Any]) -> Any:
        """Name the closest field of this configuration beside each unknown one."""
        try:
            return handler(raw)
        except ValidationError as error:
            details: list[InitErrorDetails] = []
            for line in error.errors(include_url=False):
                kind, message = line["type"], line["msg"]
                if kind == "extra_forbidden":
                    hint = did_you_mean(str(line["loc"][-1]), cls.model_fields)
                    kind, message = "unknown_field", f"unknown field{hint}"
                details.append({"type": PydanticCustomError(kind, message), "loc": line["loc"], "input": line["input"]})
            raise ValidationError.from_exception_data(cls.__name__, details) from None


def config_error(error: ValidationError, what: str = "the configuration", *above: str) -> ConfigError:
    """Every problem, named by its dotted field below the sections ``above``."""
    lines = [f"  {'.'.join(map(str, (*above, *item['loc'])))}: {item['msg']}" for item in error.errors()]
    return ConfigError(f"{what} is not valid — correct these fields:\n" + "\n".join(lines))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message; empty where nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


class MethodConfig(Config):
    """Settings of a method; the base of every method's config class, which narrows ``name`` to its own."""

    name: str
    """The method's name in the registry."""


@dataclass(frozen=True)
class MethodEntry:
    """What the registry knows about a method."""

    method: type[Any]
    config: type[MethodConfig]
    presets: Mapping[str, Mapping[str, Any]]
    """Fields that a preset sets on top of the config's defaults; `default` sets none unless it says so."""


METHODS: dict[Task, dict[str, MethodEntry]] = {"retrieval": {}, "fewshot": {}}
"""Methods registered so far. Look one up with :func:`method_entry`, which imports the built-in ones first."""
M = TypeVar("M", bound=type)


def register(
    name: str, config: type[MethodConfig], *, presets: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[M], M]:
    """Class decorator: make a method known by ``name``, built from ``config``, with these presets.

    The class's attribute ``task`` says whether it is a method of retrieval or of few-shot recognition.
    """
    if config.model_fields["name"].default != name or "-" in name:
        message = f"{config.__name__}.name must default to '{name}', and a name has no dash"
        raise UsageError(f'{message} — write name: Literal["{name}"] = "{name}" in the config class')

    def add(method: M) -> M:
        known = METHODS[method.task]  # type: ignore[attr-defined]
        old = known[name].method if name in known else method
        # A notebook cell that runs again registers the same class again.
        if (old.__module__, old.__qualname__) != (method.__module__, method.__qualname__):
            raise UsageError(f"method '{name}' is {old.__module__}.{old.__qualname__} already — choose another name")
        known[name] = MethodEntry(method, config, {"default": {}, **(presets or {})})
        return method

    return add


def method_entry(name: str, *, task: Task = "retrieval") -> MethodEntry:
    """A method by its name: built in, from an imported module, or from an installed package's entry point."""
    import_module("vacsr.fewshot.methods" if task == "fewshot" else "vacsr.methods")  # registers the built-in ones
    known = METHODS[task]
    if name not in known:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            point.load()
    if name not in known:
        kind = "few-shot method" if task == "fewshot" else "method"
        raise ConfigError(
            f"unknown {kind} '{name}'{did_you_mean(name, known)} — choose one of: {', '.join(known)}; "
            f"for your own, import its module first or name it in the entry-point group '{ENTRY_POINTS}'"
        )
    return known[name]


def _as_method(raw: Any, *, task: Task) -> MethodConfig:
    """Validate a mapping with the config class that its ``name`` stands for."""
    if isinstance(raw, MethodConfig):
        return raw
    if not isinstance(raw, Mapping):
        raise ValueError("expected a method's name or its fields")
    return method_entry(str(raw.get("name") or "vacsr"), task=task).config.model_validate(raw)


RetrievalMethodConfig = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(partial(_as_method, task="retrieval"))]
"""Type of a recipe's `method` field: validated through the registry."""
FewshotMethodConfig = Annotated[SerializeAsAny[MethodConfig], BeforeValidator(partial(_as_method, task="fewshot"))]
