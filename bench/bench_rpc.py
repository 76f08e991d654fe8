"""What does a call between two processes cost, against the socket itself and against others' calls?

Round trips one after another. Each contender (bench/rpc_contenders.py) has a server and a caller process of its own;
all are up during the whole run, and the rounds go through them in turn, so that all see the same machine. Prints one
JSON object: the p50 of all calls of each, and the median over the rounds of the ratios of p50s.

    python bench/bench_rpc.py [--peers PYTHON] [--rounds N] [--calls N] [--bytes N]

Peers live in a virtualenv of their own; those that it lacks are named and left out:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install grpcio xoscar ray
    python bench/bench_rpc.py --peers /tmp/peers/bin/python
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rpc_contenders import CONTENDERS, PEERS

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "bench" / "rpc_contenders.py"
MODULES = {"grpc_aio": "grpc", "xoscar": "xoscar", "ray": "ray"}
RATIOS = [
    ("psrl_tcp", "raw_tcp"),
    ("psrl_tcp_waiting", "raw_tcp"),
    ("psrl_unix", "raw_unix"),
    *(("psrl_tcp", peer) for peer in PEERS),
    *(("psrl_unix", peer) for peer in PEERS),
]


class Side:
    """A process of a contender, spoken to in lines of JSON."""

    def __init__(self, stack: contextlib.ExitStack, python: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [python, str(PROGRAM), *arguments]
        pipe = subprocess.PIPE
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment)
        )
        stack.callback(self._process.communicate)  # its input ends, and it goes
        self._name = " ".join(arguments[:2])

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended early; run it by hand to see why")
        return json.loads(line)

    def ask(self, num_calls: int) -> list[float]:
        """Seconds of each of `num_calls` round trips."""
        assert self._process.stdin is not None
        print(num_calls, file=self._process.stdin, flush=True)
        times: list[float] = self.hear()
        return times


def has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def measure(callers: dict[str, Side], rounds: int, num_calls: int) -> dict[str, list[list[float]]]:
    """Seconds of each call, by contender and round."""
    for caller in callers.values():
        caller.ask(num_calls // 5)  # warm
    times: dict[str, list[list[float]]] = {name: [] for name in callers}
    for _ in range(rounds):
        for name, caller in callers.items():
            times[name].append(caller.ask(num_calls))
    return times


def summary(times: dict[str, list[list[float]]]) -> dict[str, Any]:
    medians = {name: [statistics.median(found) for found in rounds] for name, rounds in times.items()}
    p50 = {name: statistics.median(itertools.chain(*rounds)) for name, rounds in times.items()}
    ratios = {
        f"{ours}/{theirs}": round(statistics.median(a / b for a, b in zip(medians[ours], medians[theirs])), 2)
        for ours, theirs in RATIOS
        if ours in medians and theirs in medians
    }
    peers = [name for name in PEERS if name in medians]
    return {
        "p50_us": {name: round(found * 1e6, 1) for name, found in p50.items()},
        "ratios": ratios,
        "best_peer": min(peers, key=p50.__getitem__, default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", metavar="PYTHON", help="of a virtualenv that has grpcio, xoscar and ray, or some")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=300, help="of each contender in a round")
    parser.add_argument("--bytes", type=int, default=100, help="payload of a message")
    options = parser.parse_args()
    pythons = {name: options.peers if name in PEERS else sys.executable for name in CONTENDERS}
    skipped = [name for name in PEERS if options.peers is None or not has(options.peers, MODULES[name])]
    for name in skipped:
        print(f"{name} is left out: see --peers", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        callers = {}
        for name, python in pythons.items():
            if name not in skipped:
                where = json.dumps(Side(stack, python, "serve", name).hear())
                callers[name] = Side(stack, python, "call", name, where, str(options.bytes))
                callers[name].hear()
        load = os.getloadavg()[0]
        result = summary(measure(callers, options.rounds, options.calls))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    about = {
        "bytes": options.bytes,
        "rounds": options.rounds,
        "calls": options.calls,
        "skipped": skipped,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cpus": os.cpu_count(),
        "commit": commit.strip(),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps({"bench": "rpc", **result, **about}, indent=1))


if __name__ == "__main__":
    main()
