"""The actor that `psrl-bench rpc` calls."""

import asyncio

import msgspec

from psrl.actor import Actor, handler


class Ask(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Wait(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    payload: bytes


class Echo(Actor):
    @handler
    async def ask(self, message: Ask) -> Answer:
        return Answer(message.payload)

    @handler
    async def wait(self, message: Wait) -> Answer:
        await asyncio.sleep(0)
        return Answer(message.payload)
