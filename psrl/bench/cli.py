"""`psrl-bench`: micro-benchmarks of PSRL's parts. Each sets its figures beside the machine's own limit, measured in
turns with them, and says the ratio. docs/bench.md tells how to read it.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from psrl.bench.hosts import SSH
from psrl.errors import ConfigError, PsrlError
from psrl.launch.console import delivered, open_missing
from psrl.launch.doctor import installed

TOPOLOGIES = ("chain", "tree", "star")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 failed or impossible, 2 what was asked for cannot be."""
    open_missing()
    options = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and namespaces are taken down
    try:
        return delivered("psrl-bench", lambda: _do(options))
    finally:
        signal.signal(signal.SIGTERM, before)


def _do(options: argparse.Namespace) -> int:
    from psrl.bench.record import table

    try:
        if options.json and not os.access(options.json.parent, os.W_OK):  # before the minutes that it takes
            raise ConfigError(f"--json {options.json}: its folder is not there, or not to be written to")
        record = options.run(options)
    except ConfigError as error:
        print("\n".join(f"psrl-bench: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except PsrlError as error:
        print(f"psrl-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(record))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="psrl-bench", description=__doc__)
    parser.add_argument("--version", action="version", version=f"psrl {installed('psrl')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    rpc = _command(commands, "rpc", _rpc, "a round trip to an actor in another process, next to a bare socket's", 11)
    rpc.add_argument("--transport", nargs="+", choices=("tcp", "unix", "process"), default=["tcp", "unix", "process"])
    rpc.add_argument("--bytes", nargs="+", type=_size, default=[100], metavar="SIZE", help="of a message: 100, 64k")
    rpc.add_argument("--calls", type=_at_least(1), default=300, help="in a round")
    rpc.add_argument("--receivers", type=_at_least(1), default=1, help="actors that are called at once")

    queue = _command(commands, "queue", _queue, "the sample queue, next to memcpy or raw sockets", 7)
    queue.add_argument("--transport", choices=("shm", "tcp", "ucx"), default="shm", help="shm: on one node")
    queue.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of shm")
    queue.add_argument("--sizes", nargs="+", type=_size, default=[256 << 10, 4 << 20, 64 << 20], metavar="SIZE",
                       help="of a field that is viewed, and of a row that is copied: 64k, 4m")  # fmt: skip
    queue.add_argument("--tokens", type=_at_least(1), default=2048, help="of a sample")
    queue.add_argument("--rows", type=_at_least(20), default=1024, help="of a batch, 9 fields of 8192 fp32 each")
    queue.add_argument("--mib", type=_positive, help="in a round: copied (256), or read from another node (64)")
    queue.add_argument("--receivers", nargs="+", type=_at_least(1), help="processes or nodes that read at once")
    _places(queue)

    sync = _command(commands, "weight-sync", _weight_sync, "weights to all nodes, next to size/bandwidth", 5)
    sync.add_argument("--transport", choices=("tcp", "ucx", "shm"), default="tcp", help="shm: replicas of one node")
    sync.add_argument("--mib", nargs="+", type=_positive, default=[64.0], metavar="MIB", help="of a version")
    sync.add_argument("--model", choices=MODELS, help="its tensors, instead of --mib")
    sync.add_argument("--receivers", nargs="+", type=_at_least(1), metavar="N", help="nodes, besides the trainer's")
    sync.add_argument("--replicas", type=_at_least(0), default=0, help="on each receiver; they overwrite parameters")
    sync.add_argument("--device", default="cpu", help="of the replicas: cpu, cuda, cuda:N")
    sync.add_argument("--topology", nargs="+", choices=TOPOLOGIES, default=["chain"])
    sync.add_argument("--mode", nargs="+", choices=("full", "delta", "auto"), default=["full"])
    sync.add_argument("--lr", type=_positive, default=1e-5, help="of the AdamW step between versions")
    _places(sync)

    delta = _command(commands, "delta", _delta, "exact patches, next to the entropy floor, reading and memcpy", 7)
    delta.add_argument("--mib", nargs="+", type=_positive, default=[256.0], metavar="MIB", help="of a version")
    delta.add_argument("--model", choices=MODELS, help="its tensors, instead of --mib")
    delta.add_argument("--lr", nargs="+", type=_positive, default=[1e-6, 1e-5, 2e-5, 4e-5], metavar="LR")
    delta.add_argument("--versions", type=Path, metavar="FOLDER", help="real ones, of bench/bench_delta.py")
    return parser


PARTS = ("core", "latency", "batch")
MODELS = ("smollm2-135m",)


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], dict[str, Any]], text: str, rounds: int
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--rounds", type=_at_least(1), default=rounds, help=f"what is told is their median ({rounds})")
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the result there")
    parser.set_defaults(run=run)
    return parser


def _places(parser: argparse.ArgumentParser) -> None:
    places = parser.add_argument_group("where the nodes are; by default processes of this machine")
    places.add_argument("--hosts", type=Path, metavar="FILE", help="a cluster: a host a line, the source first")
    places.add_argument("--ssh", default=SSH, metavar="TEMPLATE", help=f"runs a shell command on {{host}} ({SSH})")
    places.add_argument("--python", default=sys.executable, help="on the hosts (%(default)s)")
    places.add_argument("--netns", type=int, metavar="N", help="N network namespaces of this machine (root)")
    places.add_argument("--gbit", type=float, metavar="R", help="rate of their links, in Gbit/s")
    places.add_argument("--timeout-s", type=_positive, default=1800.0, help="for all of it (%(default)g)")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _size(text: str) -> int:
    """Bytes: 100, 64k, 4m, 1g."""
    unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(text[-1:].lower())
    value = int(text[:-1]) * unit if unit else int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no size")
    return value


def _rpc(options: argparse.Namespace) -> dict[str, Any]:
    from psrl.bench.rpc import rpc

    return rpc(options)


def _queue(options: argparse.Namespace) -> dict[str, Any]:
    from psrl.bench.queue import queue

    return queue(options)


def _weight_sync(options: argparse.Namespace) -> dict[str, Any]:
    from psrl.bench.weight_sync import weight_sync

    return weight_sync(options)


def _delta(options: argparse.Namespace) -> dict[str, Any]:
    from psrl.bench.delta import delta

    return delta(options)


if __name__ == "__main__":
    sys.exit(main())
