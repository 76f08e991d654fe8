"""Hydra's override grammar on a plain tree: what `hydra.compose` does with one config file and no groups.

    key=v    the key must exist          +key=v   it must not (dicts merge)      ++key=v  either
    ~key     delete it                   ~key=v   delete it if that is its value

Parsing is hydra-core's. Applying is the dozen lines below, on OmegaConf's public functions, so that a refused override
can be named and the rest still tried. Errors are Hydra's and OmegaConf's own classes; `psrl.config.loader` turns them
into sentences.
"""

from pathlib import Path as FilePath
from typing import Any, TypeAlias

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from psrl.config.yamlfile import parse_yaml, read_yaml

Parsed: TypeAlias = Override
"""One parsed override: `type`, `key_or_group`, `value()`, `input_line`."""


def parse_override(text: str) -> Parsed:
    """Parse one override as the program sees it (the shell's quotes are gone).

    Raises hydra.errors.OverrideParseException on bad grammar, ConfigCompositionException on a sweep or a group.
    """
    parsed: Parsed = OverridesParser.create().parse_overrides([text])[0]
    if parsed.is_sweep_override():
        raise ConfigCompositionException(
            f"'{text}' gives several values (a sweep). Quote a text that holds commas, or write a list as [a,b]"
        )
    if parsed.package is not None or "/" in parsed.key_or_group:
        raise ConfigCompositionException(f"'{text}' looks like a config group; there are none")
    return parsed


def apply_override(tree: DictConfig, kind: OverrideType, key: str, value: Any) -> None:
    """Change `tree` (its struct flag set) by one override. Raises ConfigCompositionException."""
    try:
        if kind is OverrideType.DEL:
            _delete(tree, key, value)
        elif kind is OverrideType.FORCE_ADD:
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
        elif kind is OverrideType.ADD:
            if OmegaConf.select(tree, key) is not None and not isinstance(value, dict | list):
                raise ConfigCompositionException(f"'{key}' is there already: drop the '+', or write '++{key}=...'")
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
        else:
            OmegaConf.update(tree, key, value, merge=True)
    except (ConfigAttributeError, ConfigKeyError) as error:
        raise ConfigCompositionException(f"'{key}' does not exist; to add it write '+{key}=...'") from error
    except OmegaConfBaseException as error:
        first_line = str(error).split("\n")[0]
        raise ConfigCompositionException(f"'{key}' cannot be set: {first_line}") from error


def _delete(tree: DictConfig, key: str, value: Any) -> None:
    current = OmegaConf.select(tree, key)
    if current is None:
        raise ConfigCompositionException(f"'{key}' cannot be deleted: it does not exist")
    if value is not None and value != current:
        raise ConfigCompositionException(f"'{key}' cannot be deleted: its value is {current}, not {value}")
    parent, _, last = key.rpartition(".")
    with open_dict(tree):
        node = OmegaConf.select(tree, parent) if parent else tree
        del node[int(last) if OmegaConf.is_list(node) else last]


def compose_untyped(base: str | FilePath, overrides: list[str]) -> Any:
    """Compose YAML (its text, or the path of a file) with overrides; return plain containers, interpolations resolved.

    Raises what Hydra would: OverrideParseException, ConfigCompositionException, omegaconf.errors.InterpolationKeyError.
    """
    document = read_yaml(base) if isinstance(base, FilePath) else parse_yaml(base, "config")
    tree = OmegaConf.create(document.tree)
    OmegaConf.set_struct(tree, True)
    for parsed in [parse_override(text) for text in overrides]:
        apply_override(tree, parsed.type, parsed.key_or_group, parsed.value())
    return OmegaConf.to_container(tree, resolve=True)
