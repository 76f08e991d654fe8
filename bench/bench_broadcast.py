"""How long does a version take to get to all nodes, compared with one copy over one link?

Nodes are network namespaces on a bridge, each with a link of `--gbit` in both directions (needs root). In each round a
plain socket sends as many bytes from the first node to the second (B = bytes/time), then a version is published at the
first and brought to all others, by chain, tree and star in turn. `ratio` is the median over rounds of time x B / size:
1.0 is what a chain of infinitely small pieces would need; less means that bytes went another way, and fails.

    python bench/bench_broadcast.py [--mib 64] [--gbit 1] [--receivers 1 2 3] [--rounds 5] [--kinds chain tree star]
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from psrl._core import LinkEndpoint, Segment, WeightStore
from psrl.actor import Runtime, UnixAddress
from psrl.actor.bulk import Bulk
from psrl.types import Epoch, Version
from psrl.weights.broadcast import Broadcaster, BroadcastSettings
from psrl.weights.manifest import Manifest
from psrl.weights.server import ParameterServer

TOKEN = b"a benchmark's token"
RAW_PORT = 4790
RAW_WRITE = 1 << 20


def manifest_of(num_bytes: int) -> Manifest:
    return Manifest.of([("weights", "bfloat16", (num_bytes // 2,))])


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# -- a node -----------------------------------------------------------------------------------------------------------


def take_raw(host: str) -> None:
    """Receives what plain sockets send and says when it has all."""
    buffer = bytearray(RAW_WRITE)
    with socket.create_server((host, RAW_PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
                while left:
                    left -= connection.recv_into(buffer, min(left, len(buffer)))
                connection.sendall(b"!")


def send_raw(host: str, num_bytes: int) -> None:
    payload = memoryview(bytearray(RAW_WRITE))
    with socket.create_connection((host, RAW_PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(num_bytes.to_bytes(8, "little"))
        started, left = time.perf_counter(), num_bytes
        while left:
            connection.sendall(payload[: min(left, len(payload))])
            left -= min(left, len(payload))
        connection.recv(1)
    print(time.perf_counter() - started)


async def serve(name: str, fd: int, path: str, host: str, num_bytes: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    bulk = Bulk(LinkEndpoint("tcp", name=name, host=host, token=TOKEN))
    async with Runtime(name, listen=UnixAddress(path)) as runtime:
        runtime.spawn("weights", ParameterServer(name, Segment.attach(fd), manifest_of(num_bytes), bulk))
        threading.Thread(target=take_raw, args=(host,), daemon=True).start()
        print("ready", flush=True)
        await ended.wait()
    await bulk.close(timeout_s=2)


# -- the cluster ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def namespaces(num: int, gbit: float) -> Iterator[list[tuple[list[str], str]]]:
    """Namespaces on a bridge: for each its command prefix and its address."""
    tag = f"psrlb{os.getpid() % 100000}"
    limit = ("rate", f"{gbit}gbit", "burst", "128kb", "latency", "30ms")
    with contextlib.ExitStack() as stack:

        def add(name: str) -> None:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")

        add(f"{tag}-bridge")
        run("ip", "-n", f"{tag}-bridge", "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", f"{tag}-bridge", "link", "set", "bridge", "up")
        nodes = []
        for i in range(num):
            name, port, host = f"{tag}-{i}", f"port{i}", f"10.79.0.{i + 1}"
            add(name)
            run("ip", "link", "add", "eth0", "mtu", "1500", "netns", name, "type", "veth", "peer", "name", port, "mtu",
                "1500", "netns", f"{tag}-bridge")  # fmt: skip
            run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            run("ip", "-n", f"{tag}-bridge", "link", "set", port, "master", "bridge")
            for where, device in ((name, "eth0"), (f"{tag}-bridge", port)):
                run("ip", "-n", where, "link", "set", device, "up")
                run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *limit)
            nodes.append((["ip", "netns", "exec", name], host))
        yield nodes


async def measure(
    num_receivers: int, num_bytes: int, gbit: float, rounds: int, kinds: list[str]
) -> list[dict[str, Any]]:
    manifest, source = manifest_of(num_bytes), np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    script = [sys.executable, str(Path(__file__))]
    names = [f"n{i}" for i in range(num_receivers + 1)]
    segments = {name: Segment.create(name, WeightStore.required_bytes(manifest.total_bytes)) for name in names}
    stores = {name: WeightStore.format(segment, manifest.total_bytes) for name, segment in segments.items()}
    with namespaces(len(names), gbit) as nodes, tempfile.TemporaryDirectory(prefix="psrl-") as folder:
        children = [
            subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
                [*prefix, *script, "--node", name, str(segments[name].fd), f"{folder}/{name}", host, str(num_bytes)],
                pass_fds=[segments[name].fd],
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, (prefix, host) in zip(names, nodes)
        ]
        try:
            for child in children:
                assert child.stdout is not None
                if child.stdout.readline() != "ready\n":
                    raise SystemExit("a node did not start")
            async with Runtime("bench") as runtime:
                servers = {
                    name: await runtime.connect(ParameterServer, "weights", UnixAddress(f"{folder}/{name}"))
                    for name in names
                }
                broadcasters = {kind: Broadcaster(servers, BroadcastSettings(kind=kind, mode="full")) for kind in kinds}
                seconds: dict[str, list[float]] = {name: [] for name in ("raw", *kinds)}
                version = 0
                for _ in range(rounds):
                    sender = [*nodes[0][0], *script, "--send", nodes[1][1], str(num_bytes)]
                    sent = await asyncio.to_thread(
                        subprocess.run, sender, check=True, capture_output=True, text=True, timeout=600
                    )
                    seconds["raw"].append(float(sent.stdout))
                    for kind in kinds:
                        source[version::4096] ^= 1
                        ticket = stores["n0"].begin(0, version, manifest.digest)
                        stores["n0"].put(ticket, 0, source)
                        stores["n0"].seal(ticket, manifest.payload_bytes)
                        stores["n0"].commit(0, version, ticket.slot)
                        report = await broadcasters[kind].broadcast("n0", Epoch(0), Version(version), timeout_s=600)
                        report.require_all()
                        seconds[kind].append(report.seconds)
                        version += 1
                for store in stores.values():
                    lease = store.acquire("bench", version - 1)
                    assert lease is not None
                    assert np.array_equal(store.view(lease), source)
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(timeout=20)
    found = []
    for kind in kinds:
        ratios = [ours / raw for ours, raw in zip(seconds[kind], seconds["raw"])]
        found.append(
            {
                "kind": kind,
                "receivers": num_receivers,
                "gbit": gbit,
                "mib": num_bytes >> 20,
                "ratio": round(statistics.median(ratios), 3),
                "spread": [round(min(ratios), 3), round(max(ratios), 3)],
                "seconds": round(statistics.median(seconds[kind]), 4),
                "raw_gbit_per_s": round(8 * num_bytes / statistics.median(seconds["raw"]) / 1e9, 4),
            }
        )
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--node"]:
        name, fd, path, host, num_bytes = sys.argv[2:]
        asyncio.run(serve(name, int(fd), path, host, int(num_bytes)))
        return
    if sys.argv[1:2] == ["--send"]:
        send_raw(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["chain", "tree", "star"], choices=["chain", "tree", "star"])
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for num_receivers in options.receivers:
        found += asyncio.run(measure(num_receivers, options.mib << 20, options.gbit, options.rounds, options.kinds))
    result = {
        "transport": "tcp",
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "rounds": options.rounds,
        "broadcasts": found,
    }
    print(json.dumps(result, indent=1))
    if short := [one for one in found if one["ratio"] < 1.0]:
        raise SystemExit(f"quicker than the link: {short}")


if __name__ == "__main__":
    main()
