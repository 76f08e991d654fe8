"""One value by its key's declared type, the same from a file as from the command line.

Numbers may be text (`1e-6` in YAML 1.1 is), true and false may be yes/no/on/off, text may look like a number, a list of
texts may be one text or a quoted list. Nothing is rounded or cut: an integer takes 3.0 and 1e6, never 3.5.
"""

import math
import re
import typing
from typing import Any

import msgspec

from psrl.config.keys import is_free_form, struct_of

_INT = re.compile(r"[+-]?(?:0|[1-9](?:_?[0-9])*)")
_TRUE, _FALSE = frozenset({"true", "yes", "on"}), frozenset({"false", "no", "off"})


class Mismatch(Exception):
    """The value is not of the type; the text says what was expected."""


def describe(annotation: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        meta = args[1]
        bounds = {"≥": meta.ge, ">": meta.gt, "≤": meta.le, "<": meta.lt}
        limits = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
        return f"{describe(args[0])} {limits}"
    if origin is list:
        return "a list" if struct_of(args[0]) else f"a list of {describe(args[0]).removeprefix('a ')}s"
    if origin is tuple:
        return f"a list of {len(args)} numbers"
    if origin is dict:
        return "a section" if not is_free_form(annotation) else "a section (free-form)"
    if origin is not None:
        return " or ".join(describe(arm) for arm in args)
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "null"}
    return words.get(annotation, "a section")


def coerce(value: Any, annotation: Any, raw: str | None = None) -> Any:
    """`value` as `annotation`; sections and lists of sections are the loader's. Raises Mismatch.

    `raw` is the scalar as it was typed, for keys declared as text.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        try:
            return msgspec.convert(coerce(value, args[0], raw), annotation)
        except Mismatch as mismatch:  # more than the type alone, if it says more
            raise Mismatch(describe(annotation) if str(mismatch) == describe(args[0]) else str(mismatch)) from None
        except msgspec.ValidationError:
            raise Mismatch(describe(annotation)) from None
    if origin is list:
        return [coerce(item, args[0]) for item in as_list(value, annotation)]
    if origin is tuple:
        items = as_list(value, annotation)
        if len(items) != len(args):
            raise Mismatch(describe(annotation))
        return tuple(coerce(item, arg) for item, arg in zip(items, args, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise Mismatch(describe(annotation))
        return value
    if origin is not None:
        return _union(value, annotation, raw)
    converters = {bool: _bool, int: _int, float: _float, str: _text}
    if annotation is type(None):
        if value is not None:
            raise Mismatch("null")
        return None
    return converters[annotation](value, raw)


def _union(value: Any, annotation: Any, raw: str | None) -> Any:
    arms = typing.get_args(annotation)
    if value is None and type(None) in arms:
        return None
    if isinstance(value, str) and str in arms:
        return value
    for arm in arms:
        try:
            return coerce(value, arm, raw)
        except Mismatch:
            continue
    raise Mismatch(describe(annotation))


def as_list(value: Any, annotation: Any) -> list[Any]:
    """A list, a list in quotes, or one text where a list of texts is declared. Raises Mismatch."""
    if isinstance(value, str) and value.strip().startswith("["):
        return _quoted_list(value, annotation)
    if isinstance(value, str) and typing.get_args(annotation) == (str,):
        return [value]
    if not isinstance(value, list):
        raise Mismatch(describe(annotation))
    return value


def _quoted_list(text: str, annotation: Any) -> list[Any]:
    """A list that kept its quotes on the way through a shell: '[dapo]'."""
    from psrl.config.grammar import parse_override

    try:
        value = parse_override(f"x={text.strip()}").value()
    except Exception:
        raise Mismatch(describe(annotation)) from None
    if not isinstance(value, list):
        raise Mismatch(describe(annotation))
    return value


def _bool(value: Any, _raw: str | None) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise Mismatch("true or false")


def _int(value: Any, raw: str | None) -> int:
    number = _whole(value, raw)
    if abs(number) >= 2**63:
        raise Mismatch("an integer below 2^63")
    return number


def _whole(value: Any, _raw: str | None) -> int:
    if isinstance(value, str):
        if _INT.fullmatch(value):
            return int(value)
        try:
            value = float(value) if not re.fullmatch(r"[+-]?0\d+", value) else value
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    raise Mismatch("an integer")


def _float(value: Any, _raw: str | None) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise Mismatch("a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise Mismatch("a number")
    return float(value)


def _text(value: Any, raw: str | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return raw if raw is not None else str(value)
    raise Mismatch("a text")
