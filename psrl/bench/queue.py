"""`psrl-bench queue`: the sample queue on a node (`--transport shm`), or read from other nodes (`tcp`, `ucx`)."""

import argparse
import contextlib
import itertools
import statistics
import time
from typing import Any

import numpy as np

from psrl.bench.messages import NodeAt, QueueSetup, ReadPlan
from psrl.bench.node import run_nodes, token
from psrl.bench.places import environment_of, hosts_of, receivers_of, settings
from psrl.bench.queue_core import MIB, Fields, copies, sample, view
from psrl.bench.queue_house import Load, all_at_once, client, house
from psrl.bench.queue_node import ROW_BYTES
from psrl.bench.record import Record, require_possible
from psrl.bench.rounds import Row, gbytes_per_s, median_ms, multiple, quantiles_us, share

Rounds = list[list[float]]


def queue(options: argparse.Namespace) -> dict[str, Any]:
    record = Record("queue", settings(options))
    if options.transport == "shm":
        with hosts_of(options):  # which is this one
            return record.finish(_on_a_node(options), "shared memory")
    return _across(options, record)


# -- on a node --------------------------------------------------------------------------------------------------------


def _on_a_node(options: argparse.Namespace) -> list[Row]:
    rows, rounds, total = list[Row](), options.rounds, int((options.mib or 256.0) * MIB)
    if "core" in options.parts:
        rows += [view(size, rounds) for size in options.sizes]
        rows += copies(f"a sample of {options.tokens} tokens, 6 fields", sample(options.tokens), total, rounds)
        for size in options.sizes:
            rows += copies(f"a row of {size:,} bytes", plain(size), max(total, size), rounds)
    load = Load(num_tokens=options.tokens, num_rows=options.rows)
    for num_readers in options.receivers or [1]:
        if "latency" in options.parts:
            rows += latency(load, rounds, num_readers)
        if "batch" in options.parts:
            rows += batch(load, rounds, num_readers)
    return rows


def plain(size: int) -> Fields:
    """A row of one field."""
    return {"x": np.zeros(size, np.uint8)}


def latency(load: Load, rounds: int, num_readers: int) -> list[Row]:
    """One sample: put until all processes see it; got; put until readers that wait for it have it. Beside an echo."""
    put, got, seen, echo = Rounds(), Rounds(), Rounds(), Rounds()
    arena_bytes = 3 * (load.count + 4) * load.sample_bytes + 64 * MIB
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(house(arena_bytes, 256 << 10))
        writer, *readers = (stack.enter_context(client(directory, f"client {i}", load)) for i in range(num_readers + 1))
        for turn in range(rounds + 1):
            put.append(writer.ask(f"samples {turn}"))
            echo.append(writer.ask("echo"))
            got.append([*itertools.chain(*all_at_once(readers, f"read {turn}-0"))])
            for reader in readers:
                reader.ask(f"await {turn}-new")
            time.sleep(0.02)  # so that they wait
            (began,) = writer.ask(f"put_one {turn}-new")
            seen.append([had - began for reader in readers for had in reader.hear()])
            writer.ask("clear")
    limit = [statistics.median(taken) for taken in echo[1:]]
    what = f"a sample of {load.num_tokens} tokens"
    return [
        {"what": name, "size_bytes": load.sample_bytes}
        | multiple([statistics.median(taken) for taken in found[1:]], limit, "a bare echo over a Unix socket")
        | quantiles_us([*itertools.chain(*found[1:])])
        for name, found in (
            (f"put of {what} until others see it", put),
            (f"get of {what} by {num_readers} at once", got),
            (f"put of {what} until {num_readers} waiting have it", seen),
        )
    ]


def batch(load: Load, rounds: int, num_readers: int) -> list[Row]:
    """A batch put by one process, and got by some at once; packing it copies all bytes, views copy none."""
    put, copied, views, packed, packed_limit = (list[float]() for _ in range(5))
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(house(int(1.6 * load.batch_bytes) + 64 * MIB, MIB))
        writer, *readers = (stack.enter_context(client(directory, f"client {i}", load)) for i in range(num_readers + 1))
        for _ in range(rounds + 1):
            put += writer.ask("put")
            copied += writer.ask("memcpy")
            views.append(max(itertools.chain(*all_at_once(readers, "get"))))
            packed.append(max(itertools.chain(*all_at_once(readers, "get_packed"))))
            packed_limit.append(max(itertools.chain(*all_at_once(readers, "memcpy"))))
            writer.ask("clear")
    num_bytes = load.batch_bytes
    what, together = f"a batch of {load.num_rows} rows", f"memcpy by {num_readers} at once"
    return [
        {"what": name, "size_bytes": num_bytes}
        | share(found[1:], limit[1:], limit_name)
        | {"median_ms": median_ms(found[1:]), "memcpy_GBps": gbytes_per_s(num_bytes, limit[1:])}
        for name, found, limit, limit_name in (
            (f"put of {what}", put, copied, "memcpy"),
            (f"get of {what} as views by {num_readers} at once", views, packed_limit, together),
            (f"get of {what}, packed, by {num_readers} at once", packed, packed_limit, together),
        )
    ]


# -- across nodes -----------------------------------------------------------------------------------------------------


def _across(options: argparse.Namespace, record: Record) -> dict[str, Any]:
    rows, transport = list[Row](), ""
    num_rows = max(int((options.mib or 64.0) * MIB) // ROW_BYTES, 1)
    with hosts_of(options) as hosts:
        for num_receivers in receivers_of(options, len(hosts)):
            shared = {"token": token(), "transport": options.transport, "environment": environment_of(options)}
            some = hosts[: num_receivers + 1]
            setups = [
                QueueSetup(name=host.name, host=host.address, number=i, num_rows=num_rows, **shared)
                for i, host in enumerate(some)
            ]

            def plan(peers: tuple[NodeAt, ...]) -> ReadPlan:
                return ReadPlan(peers=peers, rounds=options.rounds)

            found = run_nodes(some, setups, plan, python=options.python, timeout_s=options.timeout_s)
            rows += found.rows
            transport = found.transport
    if options.gbit is not None:
        require_possible(rows, options.gbit)
    return record.finish(rows, transport)
