"""Load a scoring function by file and name. Runs in the scoring process, never in a process of the runtime's own."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError
from psrl.reward.plan import Function

_KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load(function: Function) -> Callable[..., Any]:
    """The function, sync or async. Raises ConfigError naming key, file and name: not there, raises when imported, wrong
    arguments."""
    path = Path(function.path).expanduser()
    where = str(function)
    if not path.is_file():
        raise ConfigError(f"{where}: the file does not exist")
    spec = importlib.util.spec_from_file_location(f"psrl_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: the file is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # whatever the user's file does, the run has to say which file it was
        raise ConfigError(f"{where}: the file cannot be imported: {type(error).__name__}: {error}") from error
    found: Callable[..., Any] | None = getattr(module, function.name, None)
    if not callable(found):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{where}: there is no such function; the file has {', '.join(functions) or 'none'}")
    try:
        inspect.signature(found).bind(**dict.fromkeys((*_KEYWORDS, *function.kwargs)))
    except TypeError as error:
        raise ConfigError(
            f"{where}: cannot be called with {', '.join((*_KEYWORDS, *function.kwargs))}: {error}"
        ) from error
    except ValueError:
        pass  # a builtin without a readable signature
    return found
