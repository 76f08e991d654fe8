"""Keeps what `scripts/test --deep` found, which left it in build/: bench/results/deep.json.

Of each fuzzer how many inputs it was fed and from which seed, of each long proof how it ended and what it recorded.
"""

import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from psrl.bench.record import machine

ROOT = Path(__file__).resolve().parents[1]


def fuzzers() -> list[dict[str, Any]]:
    lines = (line.split() for line in sorted((ROOT / "build/fuzzed").read_text().splitlines()))
    return [
        {"fuzzer": path.removeprefix("build/"), "inputs": int(runs), "seed": int(seed), "seconds": int(seconds)}
        for path, runs, seed, seconds in lines
    ]


def proofs() -> tuple[list[dict[str, Any]], int]:
    """The tests that recorded something, and how many there were in all."""
    cases = list(ElementTree.parse(ROOT / "build/deep.xml").iter("testcase"))
    found = []
    for case in cases:
        recorded = {entry.get("name"): entry.get("value") for entry in case.iter("property")}
        if recorded:
            bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            name = f"{case.get('classname')}.{case.get('name')}"
            found.append(
                {"test": name, "ended": bad or "passed", "seconds": round(float(case.get("time", 0))), **recorded}
            )
    return found, len(cases)


def main() -> None:
    found, num_tests = proofs()
    record = {
        "question": "did the long proofs hold",
        "command": "scripts/test --deep",
        **machine(),
        "load_average": round(os.getloadavg()[0], 2),
        "num_tests": num_tests,
        "proofs": found,
        "fuzzers": fuzzers(),
    }
    (ROOT / "bench/results/deep.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
