"""What does a call between two processes cost, against the socket itself and against others' calls?

`psrl-bench rpc` without the others. Prints one JSON object. Peers live in a virtualenv of their own; those that it
lacks are named and left out:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install grpcio xoscar ray
    python bench/bench_rpc.py --peers /tmp/peers/bin/python [--rounds N] [--calls N] [--bytes N]
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from psrl.bench.echo import CONTENDERS
from psrl.bench.record import Record
from psrl.bench.rpc import LIMITS, OURS, measure, row

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"grpc_aio": "grpc", "xoscar": "xoscar", "ray": "ray"}


def has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="of a virtualenv that has grpcio, xoscar and ray, or some")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=300, help="of each contender in a round")
    parser.add_argument("--bytes", type=int, default=100, help="payload of a message")
    options = parser.parse_args()
    peers = [name for name in MODULES if options.peers and has(options.peers, MODULES[name])]
    skipped = [name for name in MODULES if name not in peers]
    for name in skipped:
        print(f"{name} is left out: see --peers", file=sys.stderr)
    os.environ["PYTHONPATH"] = str(ROOT)
    theirs = (str(options.peers), str(ROOT / "bench" / "rpc_contenders.py"))
    record = Record("rpc against peers", {**vars(options), "skipped": skipped})
    commands = {**dict.fromkeys(CONTENDERS, OURS), **dict.fromkeys(peers, theirs)}
    times = measure(commands, options.bytes, options.rounds, options.calls)
    p50 = {name: statistics.median(itertools.chain(*times[name])) for name in times}
    rows = [row(times, ours, limit) for ours, limit in LIMITS.items()]
    rows += [row(times, ours, peer) for ours in ("psrl_tcp", "psrl_unix") for peer in peers]
    result = record.finish(rows) | {"best_peer": min(peers, key=p50.__getitem__, default=None)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
