"""YAML in which a key stands once: of two, plain YAML would keep the last and drop the first without a word."""

from __future__ import annotations

from typing import Any

import yaml


class RepeatedKey(yaml.YAMLError):
    """A mapping has a key twice."""

    def __init__(self, key: str, lines: tuple[int, int]) -> None:
        first, second = lines
        where = f"in lines {first} and {second}" if first != second else f"in line {first}"
        super().__init__(f"'{key}' stands twice, {where} — keep one of them")


class _Loader(yaml.SafeLoader):
    """Looks at mappings as they are written, before merge keys (`<<`) bring in those of others."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """The node, unless it has a key twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                raise RepeatedKey(key.value, (lines[key.tag, key.value], line))
            lines[key.tag, key.value] = line
        return node


def load_yaml(text: str) -> Any:
    """Read plain YAML.

    >>> load_yaml("{a: 1, b: [2]}")
    {'a': 1, 'b': [2]}
    >>> load_yaml("a: 1\\nb: 2\\na: 3")
    Traceback (most recent call last):
    vacsr.config.strict_yaml.RepeatedKey: 'a' stands twice, in lines 1 and 3 — keep one of them
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
