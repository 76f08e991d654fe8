"""How near does a link come to a plain TCP socket over the same path?

Two processes. In each round a put and a pull of the link, and raw sends with four sizes of writes of which the best
counts, all of the same bytes between warm memories. Prints one JSON object.

    python bench/bench_link.py [--transport tcp|ucx] [--mib N] [--rounds N]     over loopback
    python bench/bench_link.py --netns [--gbit R]       between two network namespaces (root), optionally rate-limited
"""

import argparse
import contextlib
import json
import os
import select
import shlex
import statistics
import subprocess
import sys
from typing import Any

import numpy as np

from psrl._core import LinkEndpoint
from psrl.bench.hosts import here
from psrl.bench.netns import namespaces
from psrl.bench.raw import RawClient, RawServer, best_of
from psrl.bench.record import Record
from psrl.bench.rounds import gbytes_per_s, seconds, share

TOKEN = b"a benchmark's token"
TIMEOUT_S = 120.0


def wait_for(endpoint: LinkEndpoint, op: int) -> int:
    """The peer of an operation that has ended well."""
    while True:
        select.select([endpoint.fd], [], [], TIMEOUT_S)
        for event in endpoint.poll():
            if event.kind == "done" and event.op == op:
                if event.status != "ok":
                    raise SystemExit(f"{event.status}: {event.data.decode()}")
                return event.peer


def serve(host: str, transport: str, num_bytes: int) -> None:
    """The other process: says where it is; threads do the rest, until its input ends."""
    endpoint = LinkEndpoint(transport, name="receiver", host=host, token=TOKEN)
    region = endpoint.add_region(np.ones(num_bytes, np.uint8))
    windows = [endpoint.advertise(region, 0, num_bytes, access).hex() for access in ("put", "pull")]
    print(json.dumps([RawServer(host).port, endpoint.address, *windows]), flush=True)
    sys.stdin.read()
    endpoint.close(1.0)


def measure(host: str, transport: str, rounds: int, num_bytes: int, where: list[Any]) -> dict[str, Any]:
    raw_port, address, put_window, pull_window = where
    endpoint = LinkEndpoint(transport, name="sender", host=host, token=TOKEN)
    region = endpoint.add_region(np.ones(num_bytes, np.uint8))
    peer = wait_for(endpoint, endpoint.connect(address, TIMEOUT_S))
    put_advert, pull_advert, whole = bytes.fromhex(put_window), bytes.fromhex(pull_window), [(0, 0, num_bytes)]
    raw = RawClient(address.removeprefix(f"{transport}:").rpartition(":")[0], raw_port, num_bytes)

    def put() -> None:
        wait_for(endpoint, endpoint.put(peer, put_advert, region, whole, b"", TIMEOUT_S))

    def pull() -> None:
        wait_for(endpoint, endpoint.pull(peer, pull_advert, region, whole, TIMEOUT_S))

    times: dict[str, list[float]] = {"put": [], "pull": [], "raw": []}
    for turn in range(-1, rounds):
        for name, action in (("put", put), ("pull", pull))[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(action))
        times["raw"].append(best_of(raw.send))
    times = {name: taken[1:] for name, taken in times.items()}
    transport = endpoint.description
    raw.close()
    endpoint.close(1.0)
    rows = [
        {"what": name, "size_bytes": num_bytes, "GBps": gbytes_per_s(num_bytes, times[name])}
        | share(times[name], times["raw"], "raw socket")
        | {"raw_GBps": round(num_bytes / statistics.median(times["raw"]) / 1e9, 4)}
        for name in ("put", "pull")
    ]
    return {"rows": rows, "transport": transport}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--netns", action="store_true")
    parser.add_argument("--gbit", type=float)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "receiver":
        return serve(options.host, options.transport, options.mib << 20)
    if options.role:
        where = json.loads(options.role)
        print(json.dumps(measure(options.host, options.transport, options.rounds, options.mib << 20, where)))
        return None
    with contextlib.ExitStack() as stack:
        near, far = stack.enter_context(namespaces(2, options.gbit)) if options.netns else here(2)
        if options.netns:
            os.environ["UCX_TLS"] = "tcp,self"  # namespaces share a kernel, so UCX would find a way around their links

        def command(host: Any, role: str) -> list[str]:
            shared = ["--transport", options.transport, "--mib", str(options.mib), "--rounds", str(options.rounds)]
            words = [sys.executable, __file__, *shared, "--role", role, "--host", host.address]
            return [*host.shell, f"exec {shlex.join(words)}"]

        record = Record("link", vars(options))
        pipe = subprocess.PIPE
        receiver = stack.enter_context(subprocess.Popen(command(far, "receiver"), stdin=pipe, stdout=pipe, text=True))
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        stack.callback(receiver.stdin.close)
        sender = subprocess.run(
            command(near, receiver.stdout.readline()), stdout=pipe, text=True, check=True, timeout=600
        )
        print(json.dumps(record.finish(**json.loads(sender.stdout)), indent=1))
    return None


if __name__ == "__main__":
    main()
