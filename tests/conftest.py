"""What all tests share: property tests judge results, never how long an example took.

The gate draws the same examples each time, so that it fails for what changed; the deep tier draws new ones.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings


def pytest_configure(config: pytest.Config) -> None:
    for name, derandomize in (("gate", True), ("deep", False)):
        settings.register_profile(
            name, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=derandomize
        )
    settings.load_profile("gate" if config.getoption("markexpr") == "not deep" else "deep")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What has properties is kept in bench/results/deep.json: each long proof."""
    if item.get_closest_marker("deep"):
        item.user_properties.append(("tier", "deep"))


@pytest.fixture
def holders() -> Callable[[int], list[str]]:
    """Which processes, this one too, still have a memory file open or mapped; by the file's inode number."""

    def is_it(descriptor: Path, inode: int) -> bool:
        try:
            return descriptor.readlink().name.startswith("memfd:psrl:") and os.stat(descriptor).st_ino == inode
        except OSError:  # closed meanwhile
            return False

    def find(inode: int) -> list[str]:
        gc.collect()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                name = (process / "comm").read_text().strip()
                mapped = (line.split(maxsplit=5)[4:] for line in (process / "maps").read_text().splitlines())
                has = any(parts[0] == str(inode) and "memfd:psrl:" in parts[-1] for parts in mapped)
                if has or any(is_it(descriptor, inode) for descriptor in (process / "fd").iterdir()):
                    found.append(f"{process.name} {name}")
            except OSError:  # it has just ended
                continue
        return found

    return find
