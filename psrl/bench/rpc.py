"""`psrl-bench rpc`: a round trip to an actor in another process, next to one over the bare socket.

Each contender (`psrl.bench.echo`) has a serving process for each receiver and a calling one; all are up during the
whole run, and the rounds go through them in turn.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from psrl.bench.places import settings
from psrl.bench.process import Process
from psrl.bench.record import Record
from psrl.bench.rounds import Row, multiple, quantiles_us

Command = tuple[str, ...]
"""How a contender's sides are started: a program that takes their command line."""
OURS: Command = (sys.executable, "-m", "psrl.bench.echo")
BY_TRANSPORT = {
    "tcp": ("raw_tcp", "psrl_tcp", "psrl_tcp_waiting"),
    "unix": ("raw_unix", "psrl_unix"),
    "process": ("raw_unix", "psrl_in_process"),
}
LIMITS = {
    "psrl_tcp": "raw_tcp",
    "psrl_tcp_waiting": "raw_tcp",
    "psrl_unix": "raw_unix",
    "psrl_in_process": "raw_unix",
}
Times = dict[str, list[list[float]]]
"""Seconds of each call, by contender and round."""


def rpc(options: argparse.Namespace) -> dict[str, Any]:
    record, rows = Record("rpc", settings(options)), list[Row]()
    names = dict.fromkeys(itertools.chain(*(BY_TRANSPORT[transport] for transport in options.transport)))
    for num_bytes in options.bytes:
        times = measure(dict.fromkeys(names, OURS), num_bytes, options.rounds, options.calls, options.receivers)
        rows += [row(times, name, LIMITS[name]) | {"size_bytes": num_bytes} for name in times if name in LIMITS]
    return record.finish(rows, ", ".join(options.transport))


def row(times: Times, ours: str, limit: str) -> Row:
    """The ratio is that of a round's medians."""
    medians = {name: [statistics.median(taken) for taken in times[name]] for name in (ours, limit)}
    found = {"what": f"round trip: {ours}"} | multiple(medians[ours], medians[limit], limit)
    return found | quantiles_us([*itertools.chain(*times[ours])]) | {"limit_p50_us": _p50_us(times[limit])}


def _p50_us(rounds: Sequence[Sequence[float]]) -> float:
    return round(1e6 * statistics.median(itertools.chain(*rounds)), 2)


def measure(
    contenders: Mapping[str, Command], num_bytes: int, rounds: int, num_calls: int, num_receivers: int = 1
) -> Times:
    with contextlib.ExitStack() as stack:
        callers = {name: _sides(stack, name, command, num_bytes, num_receivers) for name, command in contenders.items()}
        for caller in callers.values():
            caller.ask(max(num_calls // 5, 1))  # warm
        times: Times = {name: [] for name in callers}
        for _ in range(rounds):
            for name, caller in callers.items():
                times[name].append(caller.ask(num_calls))
        return times


def _sides(stack: contextlib.ExitStack, name: str, command: Command, num_bytes: int, num_receivers: int) -> Process:
    """Start a contender's processes; returns the one that calls: told a number of calls, it answers their seconds."""
    servers = [stack.enter_context(Process(f"serve {name}", [*command, "serve", name])) for _ in range(num_receivers)]
    places = json.dumps([server.hear() for server in servers])
    caller = stack.enter_context(Process(f"call {name}", [*command, "call", name, places, str(num_bytes)]))
    caller.hear()
    return caller
