"""A handler: one method of an actor that answers one kind of message.

Contract. A handler is `async def name(self, message: M) -> R`. M is a frozen, tagged msgspec struct (or a union of
such), R likewise, or None. Both are read from the annotations, once, when the actor class is first spawned or
connected to. Within an actor each message type has exactly one handler, and tags are unique, so that a tag on the
wire names it.
"""

import dis
import inspect
import types
import typing
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, Union, overload

import msgspec

from psrl.actor.wire import tag_of

H = TypeVar("H", bound=Callable[[Any, Any], Coroutine[Any, Any, msgspec.Struct | None]])

DEFAULT_TIMEOUT_S = 30.0
_MARK, _TABLE = "__psrl_handler__", "__psrl_handlers__"
_SUSPENDING = {"GET_AWAITABLE", "GET_AITER", "GET_ANEXT", "BEFORE_ASYNC_WITH", "SEND", "YIELD_VALUE"}


class Options(msgspec.Struct, frozen=True):
    """What `@handler(...)` says beyond the annotations."""

    idempotent: bool
    timeout_s: float


class Handler:
    """One handler of an actor class, with the codecs of its message and its reply built once.

    `awaits` is False when there is no await in it, so that it runs to its end at once and needs no task.
    """

    def __init__(self, owner: type, name: str, function: Callable[[Any, Any], Coroutine[Any, Any, Any]]) -> None:
        options: Options = getattr(function, _MARK)
        self.name, self.function = name, function
        self.idempotent, self.timeout_s = options.idempotent, options.timeout_s
        self.awaits = not _SUSPENDING.isdisjoint(found.opname for found in dis.get_instructions(function))
        where = f"{owner.__qualname__}.{name}"
        message, reply = _annotations(function, where)
        self.messages = _structs(message, f"the message of {where}")
        self.replies = _structs(reply, f"the reply of {where}", allow_none=True)
        self.message_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message)
        self.reply_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reply)

    def wrong_message(self, message: object) -> TypeError:
        """For a message that is not of `messages`."""
        return TypeError(f"{self.name} takes {_names(self.messages)}, not {type(message).__qualname__}")

    def wrong_reply(self, reply: object) -> TypeError:
        """For a reply that is not of `replies`, as the handler's annotation promises."""
        return TypeError(f"{self.name} must return {_names(self.replies)}, not {type(reply).__qualname__}")


class Handlers:
    """All handlers of an actor class, by name (for refs) and by message tag (for the wire)."""

    def __init__(self, owner: type) -> None:
        self.owner = owner
        self.by_name: dict[str, Handler] = {}
        self.by_tag: dict[str, Handler] = {}
        for name in dir(owner):
            function = inspect.getattr_static(owner, name)
            if hasattr(function, _MARK):
                self._add(Handler(owner, name, function))

    def _add(self, handler: Handler) -> None:
        self.by_name[handler.name] = handler
        for message in handler.messages:
            tag = tag_of(message)
            other = self.by_tag.setdefault(tag, handler)
            if other is not handler:
                raise TypeError(
                    f"{self.owner.__qualname__} has two handlers for the message {tag}: {other.name}, {handler.name}"
                )

    def describe(self) -> str:
        return ", ".join(self.by_name) or "none"


@overload
def handler(method: H, /) -> H: ...
@overload
def handler(*, idempotent: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[[H], H]: ...
def handler(
    method: H | None = None, /, *, idempotent: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> H | Callable[[H], H]:
    """Make an async method answer the message type of its annotation.

    `idempotent`: a call whose connection broke is sent again, under the same request id, within its deadline; the
    receiver remembers answers by that id. `timeout_s`: deadline of a call that names none.
    """

    def mark(function: H) -> H:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"handler {function.__qualname__} must be async def")
        setattr(function, _MARK, Options(idempotent, timeout_s))
        return function

    return mark if method is None else mark(method)


def handlers_of(owner: type) -> Handlers:
    """The handlers of an actor class, kept with it. Raises TypeError that says which annotation is wrong."""
    known: Handlers | None = vars(owner).get(_TABLE)
    if known is None:
        known = Handlers(owner)
        setattr(owner, _TABLE, known)
    return known


def _annotations(function: Callable[..., Any], where: str) -> tuple[Any, Any]:
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 2:
        raise TypeError(f"{where} must take exactly (self, message)")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise TypeError(f"the annotations of {where} do not resolve: {error}") from error
    if parameters[1].name not in hints or "return" not in hints:
        raise TypeError(f"{where} must annotate its message and its return value")
    return hints[parameters[1].name], hints["return"]


def _structs(annotation: Any, what: str, *, allow_none: bool = False) -> tuple[type, ...]:
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    for member in members:
        if allow_none and member is type(None):
            continue
        config = getattr(member, "__struct_config__", None)
        if config is None or config.tag is None or not config.frozen:
            raise TypeError(f"{what} must be made of frozen, tagged msgspec structs, not {member!r}")
    return tuple(members)


def _names(structs: tuple[type, ...]) -> str:
    return " | ".join("None" if member is type(None) else member.__qualname__ for member in structs)
