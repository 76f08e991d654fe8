"""Reads YAML with the place of every value, and with the command line's idea of what a scalar means.

PyYAML follows YAML 1.1, where `1e-6` is text, `yes` is true, `017` is 15 and `12:30` is 750. Hydra's command line has
none of that, so plain scalars are read here by Hydra's rules: a value means the same in a file as in an override,
and the declared type of its key decides the rest (`psrl.config.coerce`). Quoted scalars are text.
"""

import re
from pathlib import Path as FilePath
from typing import Any

import msgspec
import yaml

from psrl.config.origin import Origin, Path, dotted
from psrl.errors import ConfigError

_UNSIGNED = r"(?:0|[1-9](?:_?[0-9])*)"
_POINT = rf"(?:{_UNSIGNED}\.|{_UNSIGNED}?\.[0-9](?:_?[0-9])*)"
_INT = re.compile(rf"[+-]?{_UNSIGNED}")
_FLOAT = re.compile(rf"[+-]?(?:(?:{_UNSIGNED}|{_POINT})[eE][+-]?[0-9](?:_?[0-9])*|{_POINT}|\.?inf|\.?nan)", re.I)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"
_QUOTED = ("'", '"', "|", ">")


def plain_scalar(text: str) -> Any:
    """The value of an unquoted scalar by Hydra's grammar (and YAML's `~` and empty for null)."""
    if text in ("", "~") or text.lower() == "null":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(re.sub(r"\.(inf|nan)", r"\1", text, flags=re.I))
    return text


class Document(msgspec.Struct, frozen=True):
    """A parsed file: its tree of dicts, lists and scalars, and the place of each leaf."""

    name: str
    tree: dict[str, Any]
    origins: dict[Path, Origin]


def read_yaml(path: FilePath, name: str | None = None) -> Document:
    """Parse one file. Raises ConfigError, with all that is wrong with it, by file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse_yaml(text, name or str(path))


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text; `name` stands for the file in messages. Raises ConfigError."""
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{at}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if root is None:
        return Document(name, {}, {})
    reader = _Reader(name)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}:{root.start_mark.line + 1}: expected sections with keys at the top")
    tree = reader.value(root, ())
    if reader.problems:
        raise ConfigError(*reader.problems)
    return Document(name, tree, reader.origins)


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.origins: dict[Path, Origin] = {}
        self.problems: list[str] = []
        self._open: list[yaml.Node] = []  # nodes being read, to catch an anchor that contains itself

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, path: Path) -> Any:
        if any(node is other for other in self._open):
            self.problems.append(f"{self._at(node)}: {dotted(path)} contains itself through an anchor")
            return None
        if not node.tag.startswith("tag:yaml.org,2002:") or ":python/" in node.tag:
            self.problems.append(f"{self._at(node)}: {dotted(path)}: tag {node.tag} is not supported")
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                self.origins[path] = Origin(self._at(node))
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            value = node.value if node.style in _QUOTED else plain_scalar(node.value)
            self.origins[path] = Origin(self._at(node), node.value)
            return value
        finally:
            self._open.pop()

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        own: set[str] = set()
        if not node.value:
            self.origins[path] = Origin(self._at(node))
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].tag != _MERGE):
            if key_node.tag == _MERGE:
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in reversed(sources):
                    merged = self.value(source, path)
                    if isinstance(merged, dict):
                        tree |= merged
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{self._at(key_node)}: a key of {dotted(path) or 'the file'} is not plain text")
                continue
            key = str(key_node.value)
            if key in own:
                self.problems.append(f"{self._at(key_node)}: {dotted((*path, key))} is set twice in this file")
            own.add(key)
            tree[key] = self.value(value_node, (*path, key))
        return tree
