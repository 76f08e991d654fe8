"""Keeps what a part of `scripts/test --deep` found in bench/results/deep.json, in place of what was known of it before.

    python bench/deep_results.py threads CTEST_JUNIT_XML    C++ tests under the thread sanitizer
    python bench/deep_results.py fuzzers FILE               a line a fuzzer: PATH INPUTS SEED SECONDS
    python bench/deep_results.py proofs PYTEST_JUNIT_XML    long proofs in Python that record what they did

Only what held is given to it: scripts/test stops at the first part that did not. Each entry says on what it was found.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from psrl.bench.record import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results/deep.json"

Entries = dict[str, dict[str, Any]]


def threads(path: Path) -> Entries:
    cases = list(ElementTree.parse(path).iter("testcase"))
    skipped = sorted(str(case.get("name")) for case in cases if case.get("status") in ("notrun", "disabled"))
    seconds = round(sum(float(case.get("time", 0)) for case in cases))
    return {"C++ tests": {"num_passed": len(cases) - len(skipped), "skipped": skipped, "seconds": seconds}}


def fuzzers(path: Path) -> Entries:
    lines = (line.split() for line in sorted(path.read_text().splitlines()))
    return {
        name.removeprefix("build/"): {"inputs": int(runs), "seed": int(seed), "seconds": int(seconds)}
        for name, runs, seed, seconds in lines
    }


def proofs(path: Path) -> Entries:
    found: Entries = {}
    for case in ElementTree.parse(path).iter("testcase"):
        recorded = {str(entry.get("name")): entry.get("value") for entry in case.iter("property")}
        ended = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        if recorded and not ended:
            found[f"{case.get('classname')}.{case.get('name')}"] = {
                "seconds": round(float(case.get("time", 0))),
                **recorded,
            }
    return found


PARTS: dict[str, Callable[[Path], Entries]] = {"threads": threads, "fuzzers": fuzzers, "proofs": proofs}


def main() -> None:
    part, path = sys.argv[1:]
    found = PARTS[part](Path(path))
    record: dict[str, Any] = {"question": "did the long proofs hold"}
    if RESULTS.exists():
        record = json.loads(RESULTS.read_text())
    on = {**machine(), "load_average": round(os.getloadavg()[0], 2)}
    known = record.setdefault(part, {})
    for name, entry in found.items():
        known[name] = {**entry, **on}
    record[part] = dict(sorted(known.items()))
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
