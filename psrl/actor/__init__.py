"""Actors: typed messages between tasks and processes, with a deadline on every call."""

from psrl.actor.actor import Actor
from psrl.actor.blocking import BlockingRuntime
from psrl.actor.handler import handler
from psrl.actor.loop import run
from psrl.actor.ref import within
from psrl.actor.runtime import Failed, Runtime
from psrl.actor.tcp import TcpAddress
from psrl.actor.token import Token
from psrl.actor.transport import Address
from psrl.actor.unix import UnixAddress

__all__ = [
    "Actor",
    "Address",
    "BlockingRuntime",
    "Failed",
    "Runtime",
    "TcpAddress",
    "Token",
    "UnixAddress",
    "handler",
    "run",
    "within",
]
