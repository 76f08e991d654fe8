"""A ref: where to send. Typed as its actor, so type checkers see each call; at run time it is a proxy."""

from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar, cast

import msgspec

from psrl.actor.actor import Actor
from psrl.actor.handler import Handler, Handlers

A = TypeVar("A", bound=Actor)

Send = Callable[[msgspec.Struct], Coroutine[Any, Any, msgspec.Struct | None]]


class Channel(Protocol):
    """How calls reach one actor: directly in this process, or over a Link."""

    def sender(self, handler: Handler, timeout_s: float) -> Send:
        """The function that sends this handler's messages and waits for the reply.

        It raises TypeError for another message, or an ActorError, at the latest `timeout_s` from then.
        """

    def watch(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` once when the actor is gone."""


class Ref:
    """Has one async method per handler of its actor class, and nothing else of it."""

    def __init__(self, handlers: Handlers, channel: Channel, label: str, timeout_s: float | None = None) -> None:
        self._handlers, self._channel, self._label, self._timeout_s = handlers, channel, label, timeout_s

    def __getattr__(self, name: str) -> Send:
        handler = self._handlers.by_name.get(name)
        if handler is None:
            owner = self._handlers.owner.__qualname__
            raise AttributeError(f"{owner} has no handler {name!r}; its handlers: {self._handlers.describe()}")
        send = self._channel.sender(handler, self._timeout_s if self._timeout_s is not None else handler.timeout_s)
        send.__name__ = send.__qualname__ = name
        self.__dict__[name] = send  # found directly from now on
        return send

    def __dir__(self) -> list[str]:
        return list(self._handlers.by_name)

    def __repr__(self) -> str:
        return f"<Ref {self._label}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ref belongs to its runtime; send the actor's name and address, and connect there")


def within(ref: A, timeout_s: float) -> A:
    """The same ref with this deadline for its calls, in seconds from each call."""
    proxy = unwrap(ref)
    return cast(A, Ref(proxy._handlers, proxy._channel, proxy._label, timeout_s))


def unwrap(ref: Actor) -> Ref:
    """The proxy behind a typed ref. Raises TypeError for an actor object itself."""
    if not isinstance(ref, Ref):
        raise TypeError(f"{ref!r} is no ref; spawn the actor or connect to it")
    return ref
