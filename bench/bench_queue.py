"""How many times faster than the package `transferqueue` (its SimpleStorage) is the sample queue?

python bench/bench_queue.py --against DIR [--rounds N] [--json FILE]     prints one JSON object

The case of transferqueue's own benchmark: 1024 samples of 9 fields of 8192 fp32, put and got whole, and one sample
there and back. Both run in the same rounds, in as many processes (controller, storage, client), with the same data.
DIR is where the package is installed (pip install --target). `psrl-bench queue` is the comparison with the machine.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psrl.bench.queue_core import MIB
from psrl.bench.queue_house import Load, client, house
from psrl.bench.record import Record
from psrl.bench.rounds import median_ms, multiple

Times = dict[str, list[float]]
WORDS = {"put": "put", "get": "get", "one": "put_get"}
"""What both do: the name here and with transferqueue, and the word of our client."""


@contextlib.contextmanager
def transferqueue(directory: str) -> "Iterator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("bench_queue_tq.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": directory},
    )
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":
            if not line:
                raise SystemExit("transferqueue did not start")
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def measure(directory: str, rounds: int) -> tuple[Times, Times]:
    ours: Times = {what: [] for what in (*WORDS, "get_packed", "memcpy")}
    theirs: Times = {what: [] for what in WORDS}
    load = Load()
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(house(2 * load.batch_bytes, MIB))
        mine = stack.enter_context(client(home, "client", load))
        other = stack.enter_context(transferqueue(directory))

        def ask(what: str) -> float:
            print(what, file=other.stdin, flush=True)
            assert other.stdout is not None
            return float(json.loads(other.stdout.readline()))

        for _ in range(rounds + 1):
            for what in ours:
                ours[what].append(statistics.mean(mine.ask(WORDS.get(what, what))))
                if what in theirs:
                    theirs[what].append(ask(what))
            mine.ask("clear")
            ask("clear")
    return ({what: taken[1:] for what, taken in times.items()} for times in (ours, theirs))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, help="folder(s) with the package transferqueue, as PYTHONPATH")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    record = Record("queue against transferqueue", {"rounds": options.rounds})
    ours, theirs = measure(options.against, options.rounds)
    rows: list[dict[str, Any]] = [
        {"what": f"transferqueue's {what}", "size_bytes": Load().batch_bytes}
        | multiple(theirs[what], ours[ours_too], f"ours ({ours_too})")
        | {"ours_ms": median_ms(ours[ours_too]), "theirs_ms": median_ms(theirs[what])}
        for what, ours_too in (("put", "put"), ("get", "get"), ("get", "get_packed"), ("one", "one"))
    ]
    result = record.finish(rows) | {"memcpy_ms": median_ms(ours["memcpy"])}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
