"""What is kept of a run of a benchmark: its rows, and what they were measured on. Printed as a table, kept as JSON."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from psrl.bench.rounds import Row
from psrl.errors import BenchError

_ROOT = Path(__file__).resolve().parents[2]
_SLACK = 1.05  # a burst may carry a socket a little over its nominal rate


class Record:
    """Make it before the run, `finish` it after: both load averages count."""

    def __init__(self, bench: str, settings: dict[str, Any]) -> None:
        self._bench, self._settings, self._load = bench, settings, os.getloadavg()[0]

    def finish(self, rows: list[Row], transport: str = "") -> dict[str, Any]:
        """`transport`: what the links say of themselves; with UCX its version and what it runs over."""
        return {
            "bench": self._bench,
            "rows": rows,
            "settings": self._settings,
            "transport": transport.replace(f"{sys.prefix}/", ""),
            "load_average": [round(self._load, 2), round(os.getloadavg()[0], 2)],
            **machine(),
        }


def machine() -> dict[str, Any]:
    return {
        "device": _device(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """Of the checkout that this package stands in; empty for an installed copy."""
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    with open("/proc/cpuinfo") as lines:
        names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.machine()


def table(record: dict[str, Any]) -> str:
    """For people: a line for each row, then what it was measured on."""
    lines = []
    for row in record["rows"]:
        low, high = row["spread"]
        head = f"{row['what']:<44} {row['ratio']:>7.3f} {row['measure']} {row['limit']} ({low:.3f} to {high:.3f})"
        shown = ("what", "ratio", "spread", "rounds", "measure", "limit")
        lines.append(head)
        lines.append("    " + ", ".join(f"{key} {value}" for key, value in row.items() if key not in shown))
    before, after = record["load_average"]
    lines.append(f"load average {before} before, {after} after, on {record['num_cpus']} CPUs ({record['device']})")
    if after > record["num_cpus"]:
        lines.append("the machine was busy: these figures say little")
    if record["transport"]:
        lines.append(f"transport {record['transport']}")
    return "\n".join(lines)


def require_possible(rows: list[Row], gbit: float) -> None:
    """Raises BenchError if rows cannot be true on links of `gbit`: below 1.0 x size/bandwidth, or a raw socket that was
    quicker than its link."""
    reasons = []
    for row in rows:
        multiple = row["to_sent"] if row["measure"] == "times" else 1 / row["ratio"]
        if multiple < 1.0:
            reasons.append(f"{row['what']}: {multiple:.4f} x size/bandwidth, so bytes went around the links")
        if row["raw_gbit_per_s"] > _SLACK * gbit:
            reasons.append(
                f"{row['what']}: a raw socket gave {row['raw_gbit_per_s']:.3f} Gbit/s on links of {gbit:g}, so their "
                "limit is not in force"
            )
    if reasons:
        raise BenchError("refused, these are impossible: " + "; ".join(reasons))
