"""Configuration: `load` a config by name or path with Hydra overrides, `check` what its keys say together.

Importing this is quick: no torch, and Hydra only when something is loaded.
"""

from typing import TYPE_CHECKING, Any

from psrl.config.dump import to_yaml
from psrl.config.rules import check
from psrl.config.schema import Config

if TYPE_CHECKING:
    from psrl.config.grammar import compose_untyped
    from psrl.config.loader import Loaded, load

__all__ = ["Config", "Loaded", "check", "compose_untyped", "load", "to_yaml"]


def __getattr__(name: str) -> Any:
    if name in ("load", "Loaded"):
        from psrl.config import loader

        return getattr(loader, name)
    if name == "compose_untyped":
        from psrl.config.grammar import compose_untyped

        return compose_untyped
    raise AttributeError(f"module {__name__} has no attribute {name}")
