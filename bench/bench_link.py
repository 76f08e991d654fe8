"""How near does a link come to a plain TCP socket over the same path?

Two processes; rounds of raw sends (64 KiB, 256 KiB, 1 MiB and 4 MiB a write) and of puts and pulls of the link, all of
the same bytes between warm memories, go through each other in turn. Rates are medians over the rounds; `put_to_raw` and
`pull_to_raw` are the median over the rounds of the ratio to the raw size that was fastest over all of them. Prints one
JSON object.

    python bench/bench_link.py [--transport tcp|ucx] [--mib N] [--rounds N]     over loopback
    python bench/bench_link.py --netns [--gbit R]       between two network namespaces (root), optionally rate-limited
"""

import argparse
import contextlib
import json
import os
import platform
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from psrl._core import LinkEndpoint

WRITES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
TOKEN = b"a benchmark's token"
TIMEOUT_S = 120.0
ORDER = struct.Struct("<QQ")  # bytes in all, bytes a write


def wait_for(endpoint: LinkEndpoint, op: int) -> int:
    """The peer of an operation that has ended well."""
    while True:
        select.select([endpoint.fd], [], [], TIMEOUT_S)
        for event in endpoint.poll():
            if event.kind == "done" and event.op == op:
                if event.status != "ok":
                    raise SystemExit(f"{event.status}: {event.data.decode()}")
                return event.peer


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


def serve(host: str, transport: str, num_bytes: int) -> None:
    """The other process: says where it is, takes raw sends, lets the link's thread do the rest."""
    endpoint = LinkEndpoint(transport, name="receiver", host=host, token=TOKEN)
    memory = np.ones(num_bytes, np.uint8)
    region = endpoint.add_region(memory)
    windows = [endpoint.advertise(region, 0, num_bytes, access).hex() for access in ("put", "pull")]
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        print(json.dumps([port, endpoint.address, endpoint.description, *windows]), flush=True)
        raw, _ = listener.accept()
    with raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        view, order = memoryview(memory), bytearray(ORDER.size)
        while raw.recv_into(order, ORDER.size, socket.MSG_WAITALL):
            num_bytes, _ = ORDER.unpack(order)
            receive_exactly(raw, view[:num_bytes])
            raw.sendall(b"!")
    endpoint.close(1.0)


def measure(host: str, transport: str, rounds: int, num_bytes: int, replies: IO[str]) -> dict[str, Any]:
    port, address, description, put_window, pull_window = json.loads(replies.readline())
    memory = np.ones(num_bytes, np.uint8)
    endpoint = LinkEndpoint(transport, name="sender", host=host, token=TOKEN)
    region = endpoint.add_region(memory)
    peer = wait_for(endpoint, endpoint.connect(address, TIMEOUT_S))
    put_advert, pull_advert = bytes.fromhex(put_window), bytes.fromhex(pull_window)
    remote = address.removeprefix(f"{transport}:").rpartition(":")[0]
    raw = socket.create_connection((remote, port))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view, all_of_it = memoryview(memory), [(0, 0, num_bytes)]

    def send_raw(write: int) -> None:
        raw.sendall(ORDER.pack(num_bytes, write))
        for at in range(0, num_bytes, write):
            raw.sendall(view[at : at + write])
        raw.recv(1)

    def put() -> None:
        wait_for(endpoint, endpoint.put(peer, put_advert, region, all_of_it, b"", TIMEOUT_S))

    def pull() -> None:
        wait_for(endpoint, endpoint.pull(peer, pull_advert, region, all_of_it, TIMEOUT_S))

    def gbytes_per_s(action: Callable[[], None]) -> float:
        start = time.perf_counter()
        action()
        return num_bytes / (time.perf_counter() - start) / 1e9

    actions: dict[str, Callable[[], None]] = {"put": put, "pull": pull}
    for write in WRITES:
        actions[f"raw_{write >> 10}k"] = lambda write=write: send_raw(write)  # type: ignore[misc]
    for action in actions.values():
        action()  # warm
    rates: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rates[name].append(gbytes_per_s(actions[name]))
    raw.close()
    endpoint.close(1.0)
    best = max((name for name in names if name.startswith("raw")), key=lambda name: statistics.median(rates[name]))
    ratios = {
        name: [ours / theirs for ours, theirs in zip(rates[name], rates[best], strict=True)] for name in ("put", "pull")
    }
    return {
        "link": description,
        "gbytes_per_s": {name: round(statistics.median(found), 4) for name, found in rates.items()},
        "best_raw": best,
        "put_to_raw": round(statistics.median(ratios["put"]), 3),
        "pull_to_raw": round(statistics.median(ratios["pull"]), 3),
        "spread": {name: [round(min(found), 3), round(max(found), 3)] for name, found in ratios.items()},
    }


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def namespaces(gbit: float | None) -> Iterator[tuple[list[str], str, list[str], str]]:
    """Two network namespaces joined by a veth pair: for each its command prefix and its address."""
    names = [f"psrl-link-{side}-{os.getpid()}" for side in "ab"]
    hosts = ["10.78.0.1", "10.78.0.2"]
    with contextlib.ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for name, host in zip(names, hosts, strict=True):
            run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "veth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            if gbit is not None:
                limit = ("rate", f"{gbit}gbit", "burst", "128kb", "latency", "30ms")
                run("tc", "-n", name, "qdisc", "add", "dev", "veth0", "root", "tbf", *limit)
        prefixes = [["ip", "netns", "exec", name] for name in names]
        yield prefixes[0], hosts[0], prefixes[1], hosts[1]


def start(prefix: list[str], *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [*prefix, sys.executable, __file__, *arguments]
    return subprocess.Popen(command, text=True, env=environment, **streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--netns", action="store_true")
    parser.add_argument("--gbit", type=float)
    parser.add_argument("--role", choices=["sender", "receiver"], help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_bytes = options.mib << 20
    if options.role == "receiver":
        return serve(options.host, options.transport, num_bytes)
    if options.role == "sender":
        print(json.dumps(measure(options.host, options.transport, options.rounds, num_bytes, sys.stdin)))
        return None
    with contextlib.ExitStack() as stack:
        near, near_host, far, far_host = [], "127.0.0.1", [], "127.0.0.1"  # type: ignore[var-annotated]
        if options.netns:
            near, near_host, far, far_host = stack.enter_context(namespaces(options.gbit))
        shared = ("--transport", options.transport, "--mib", str(options.mib), "--rounds", str(options.rounds))
        pipe = subprocess.PIPE
        load = os.getloadavg()[0]
        receiver = start(far, "--role", "receiver", "--host", far_host, *shared, stdout=pipe)
        sender = start(near, "--role", "sender", "--host", near_host, *shared, stdin=receiver.stdout, stdout=pipe)
        found, _ = sender.communicate()
        receiver.wait(TIMEOUT_S)
    result = {
        "question": "a link's share of what a raw socket gives",
        "path": f"namespaces{f' at {options.gbit} Gbit/s' if options.gbit else ''}" if options.netns else "loopback",
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "load_average": round(load, 1),
        "num_bytes": num_bytes,
        "rounds": options.rounds,
        **json.loads(found),
    }
    print(json.dumps(result, indent=2))
    return None


if __name__ == "__main__":
    main()
