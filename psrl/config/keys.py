"""What is known about keys: does a path exist in the schema, of which type, and which name was meant by a typo."""

import difflib
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from psrl.config.origin import Path, dotted
from psrl.config.schema import Config

_MEANT = {  # names that users of other tools type
    "learning_rate": "lr", "num_steps": "total_training_steps", "max_steps": "total_training_steps",
    "num_epochs": "total_epochs", "num_train_epochs": "total_epochs", "batch_size": "train_batch_size",
    "num_generations": "rollout_n", "group_size": "rollout_n", "warmup_steps": "lr_warmup_steps",
    "max_new_tokens": "max_response_length", "max_tokens": "max_response_length", "output_dir": "default_local_dir",
    "run_dir": "default_local_dir", "save_steps": "save_freq", "eval_steps": "test_freq", "model_path": "path",
    "max_grad_norm": "grad_clip", "run_name": "experiment_name", "report_to": "logger", "max_staleness": "staleness",
}  # fmt: skip


def members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, else the type alone; `Annotated` is looked through."""
    if typing.get_origin(annotation) is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(inner for arm in typing.get_args(annotation) for inner in members(arm))
    return (annotation,)


@cache
def fields(section: type[msgspec.Struct]) -> dict[str, Any]:
    """Field name -> annotation, `Annotated` kept."""
    return typing.get_type_hints(section, include_extras=True)


def struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    """The section that a type is (or may be, next to null), if any."""
    for arm in members(annotation):
        if isinstance(arm, type) and issubclass(arm, msgspec.Struct):
            return arm
    return None


def is_free_form(annotation: Any) -> bool:
    """A dict whose keys and values are somebody else's business."""
    return any(typing.get_origin(arm) is dict and typing.get_args(arm)[1] is Any for arm in members(annotation))


def item_type(annotation: Any, container: type) -> Any:
    """The type of a list's items or of a dict's values, or None."""
    for arm in members(annotation):
        if typing.get_origin(arm) is container:
            return typing.get_args(arm)[-1]
    return None


def lookup(path: Path) -> Any:
    """The declared type at `path`, Any inside a free-form section, None for a key that does not exist."""
    annotation: Any = Config
    for part in path:
        if is_free_form(annotation):
            return Any
        section = struct_of(annotation)
        if section is not None:
            annotation = fields(section).get(str(part))
        elif (items := item_type(annotation, list)) is not None and str(part).isdigit():
            annotation = items
        else:
            annotation = item_type(annotation, dict)
        if annotation is None:
            return None
    return annotation


@cache
def all_paths() -> tuple[tuple[str, ...], ...]:
    """Every path of the schema, sections included; `*` stands for a list index or a free name."""

    def walk(annotation: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if path:
            yield path
        section = struct_of(annotation)
        if section is not None:
            for name, inner in fields(section).items():
                yield from walk(inner, (*path, name))
        for container in (list, dict):
            inner = item_type(annotation, container)
            if inner is not None and struct_of(inner) is not None:
                yield from walk(inner, (*path, "*"))

    return tuple(walk(Config, ()))


def nearest(path: Path) -> str | None:
    """The known key that was most likely meant by the unknown `path`, or None.

    The last name decides most, the section helps: `psrl.save_frq` gives `trainer.save_freq`.
    """
    asked = [str(part).lower().replace("-", "_") for part in path]
    asked[-1] = _MEANT.get(asked[-1], asked[-1])
    best, best_score = None, 0.0
    for known in all_paths():
        if known[-1] == "*":
            continue
        filled = [asked[i] if part == "*" and i < len(asked) else part for i, part in enumerate(known)]
        leaf = difflib.SequenceMatcher(None, asked[-1], filled[-1]).ratio()
        if leaf < 0.6:
            continue
        section = difflib.SequenceMatcher(None, ".".join(asked[:-1]), ".".join(filled[:-1])).ratio()
        score = 0.7 * leaf + 0.3 * section
        if score > best_score:
            best, best_score = dotted(tuple(filled)).replace("*", "0"), score
    return best


def nearest_word(word: str, known: tuple[str, ...]) -> str | None:
    """The one of `known` that was most likely meant by `word`, or None."""
    return next(iter(difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=0.6)), None)
