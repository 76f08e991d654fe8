"""How handlers are declared, and what is said when that is wrong."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from actors_under_test import Counter

from psrl.actor import Actor, handler
from psrl.actor.handler import handlers_of


class Ask(msgspec.Struct, frozen=True, tag=True):
    pass


class Tell(msgspec.Struct, frozen=True, tag="told"):
    pass


class Untagged(msgspec.Struct, frozen=True):
    pass


class Melting(msgspec.Struct, tag=True):
    pass


def test_the_annotations_say_it_all() -> None:
    table = handlers_of(Counter)
    assert table is handlers_of(Counter)
    occupy = table.by_tag["Occupy"]
    assert (occupy.name, occupy.idempotent, occupy.timeout_s) == ("occupy", True, 20.0)
    add = table.by_name["add"]
    assert [message.__name__ for message in add.messages] == ["Add"]
    assert [reply.__name__ for reply in add.replies] == ["Added", "TooMuch"]
    assert (add.idempotent, add.timeout_s) == (False, 30.0)
    assert table.by_name["forget"].replies == (type(None),)


def test_a_union_of_messages_has_one_handler() -> None:
    class Both(Actor):
        @handler
        async def hear(self, message: Ask | Tell) -> Ask | None:
            return None

    assert set(handlers_of(Both).by_tag) == {"Ask", "told"}


def test_subclasses_inherit_handlers_and_may_replace_them() -> None:
    class Base(Actor):
        @handler
        async def ask(self, message: Ask) -> None: ...

    class Derived(Base):
        @handler(timeout_s=1.0)
        async def ask(self, message: Ask) -> None: ...

        @handler
        async def tell(self, message: Tell) -> None: ...

    assert set(handlers_of(Base).by_name) == {"ask"}
    assert set(handlers_of(Derived).by_name) == {"ask", "tell"}
    assert handlers_of(Derived).by_name["ask"].timeout_s == 1.0


class TwoForOne(Actor):
    @handler
    async def first(self, message: Ask) -> None: ...

    @handler
    async def second(self, message: Ask | Tell) -> None: ...


class TakesUntagged(Actor):
    @handler
    async def take(self, message: Untagged) -> None: ...


class TakesMelting(Actor):
    @handler
    async def take(self, message: Melting) -> None: ...


class ReturnsDict(Actor):
    @handler
    async def take(self, message: Ask) -> dict[str, int]:  # type: ignore[type-var]
        return {}


class Bare(Actor):
    @handler
    async def take(self, message):  # type: ignore[no-untyped-def]
        pass


class TakesTwo(Actor):
    @handler
    async def take(self, message: Ask, other: Ask) -> None: ...  # type: ignore[type-var]


class Unresolved(Actor):
    @handler
    async def take(self, message: "NoSuchName") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        (TwoForOne, "two handlers for the message Ask: first, second"),
        (TakesUntagged, r"the message of TakesUntagged\.take must be made of frozen, tagged msgspec structs"),
        (TakesMelting, "must be made of frozen, tagged"),
        (ReturnsDict, r"the reply of ReturnsDict\.take must be made of frozen, tagged"),
        (Bare, r"Bare\.take must annotate its message and its return value"),
        (TakesTwo, r"TakesTwo\.take must take exactly \(self, message\)"),
        (Unresolved, r"annotations of Unresolved\.take do not resolve: name 'NoSuchName'"),
    ],
)
def test_a_wrong_declaration_is_named(actor: type[Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        handlers_of(actor)


def test_a_handler_must_be_async() -> None:
    with pytest.raises(TypeError, match="must be async def"):

        @handler  # type: ignore[type-var]
        def take(self: Any, message: Ask) -> None: ...


class Third(msgspec.Struct, frozen=True, tag=True):
    pass


class Fourth(msgspec.Struct, frozen=True, tag=True):
    pass


async def numbers() -> AsyncIterator[int]:
    yield 1


class Awaiting(Actor):
    @handler
    async def never(self, message: Ask) -> None:
        async def inside() -> None:
            await asyncio.sleep(0)

        self.spawn(inside(), "inside")

    @handler
    async def call(self, message: Tell) -> None:
        await asyncio.sleep(0)

    @handler
    async def context(self, message: Third) -> None:
        async with asyncio.Lock():
            pass

    @handler
    async def iterate(self, message: Fourth) -> None:
        async for _ in numbers():
            pass


def test_a_handler_knows_whether_it_ever_awaits() -> None:
    awaits = {name: handler.awaits for name, handler in handlers_of(Awaiting).by_name.items()}
    assert awaits == {"never": False, "call": True, "context": True, "iterate": True}
