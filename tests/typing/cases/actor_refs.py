"""A ref is typed as its actor: each call is checked, message and reply."""

from typing import reveal_type

import msgspec

from psrl.actor import Actor, BlockingRuntime, Runtime, UnixAddress, handler, within


class Add(msgspec.Struct, frozen=True, tag=True):
    amount: int


class Added(msgspec.Struct, frozen=True, tag=True):
    total: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class Counter(Actor):
    @handler
    async def add(self, message: Add) -> Added | Refused:
        return Added(message.amount)

    @handler(idempotent=True, timeout_s=1.0)
    async def forget(self, message: Refused) -> None: ...

    @handler  # E: Value of type variable "H" of "handler" cannot be
    async def wrong(self, message: Add) -> int:
        return 1


async def main(blocking: BlockingRuntime) -> None:
    async with Runtime("here") as runtime:
        reveal_type(runtime)  # R: psrl.actor.runtime.Runtime
        ref = runtime.spawn("counter", Counter())
        reveal_type(ref)  # R: actor_refs.Counter
        other = await runtime.connect(Counter, "counter", UnixAddress("/run/s"), timeout_s=1)
        reveal_type(other)  # R: actor_refs.Counter
        reveal_type(within(ref, 2.0))  # R: actor_refs.Counter
        reveal_type(await ref.add(Add(1)))  # R: actor_refs.Added | actor_refs.Refused
        reveal_type(await within(other, 2.0).add(message=Add(1)))  # R: actor_refs.Added | actor_refs.Refused
        await ref.add(Added(1))  # E: Argument 1 to "add" of "Counter" has incompatible type "Added"; expected "Add"
        await ref.subtract(Add(1))  # E: "Counter" has no attribute "subtract"
        reveal_type(blocking.call(ref.add(Add(1)), timeout_s=1))  # R: actor_refs.Added | actor_refs.Refused
