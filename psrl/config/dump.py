"""A resolved config as YAML that loads to the same config again, with the origin of each value as a comment."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from psrl.config.origin import Path
from psrl.config.schema import Config
from psrl.config.yamlfile import plain_scalar

_PLAIN = re.compile(r"[A-Za-z_./][\w./@%+-]*")
_COLUMN = 72  # where comments start


def to_yaml(config: Config, origins: Any = None) -> str:
    """All keys and values. `origins` (a `psrl.config.origin.Origins`) adds `# where` to each."""
    return "\n".join(_lines(msgspec.to_builtins(config), (), origins)) + "\n"


def _lines(value: dict[str, Any], path: Path, origins: Any, indent: str = "") -> Iterator[str]:
    for key, inner in value.items():
        inner_path = (*path, key)
        name = f"{indent}{key if _PLAIN.fullmatch(key) else json.dumps(key)}:"
        if isinstance(inner, dict) and inner:
            yield name
            yield from _lines(inner, inner_path, origins, indent + "  ")
            continue
        line = f"{name} {_flow(inner)}"
        where = origins.of(inner_path) if origins is not None else None
        yield f"{line:<{_COLUMN}}  # {where.where}" if where else line


def _flow(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    if isinstance(value, str):
        text = value.replace("${", "\\${")  # an interpolation that was resolved, or escaped, must stay text
        bare = _PLAIN.fullmatch(text) and plain_scalar(text) == text
        return text if bare else json.dumps(text, ensure_ascii=False)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
