"""Which UCX this process uses for links: chosen and loaded here, before the core makes its first ucx endpoint.

The core links no libucp. It asks for `libucp.so.0` by name and gets the one loaded already, so `load()` decides,
by the environment variable PSRL_UCX:

    auto     the system's if there are RDMA devices (no wheel has InfiniBand) and it loads; else the wheel's; else the
             system's
    wheel    that of the package libucx-cu12
    system   what the dynamic loader finds
    a path   the folder of libucp.so.0, or the one above its lib/

One that something else in this process loaded before stays: two at a time would share symbols.
"""

import ctypes
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from psrl.errors import ConfigError, LinkError

_SONAME = "libucp.so.0"
_DEVICES = Path("/dev/infiniband")
_log = logging.getLogger(__name__)


class Ucx(NamedTuple):
    file: Path
    version: str

    @property
    def plugins(self) -> tuple[str, ...]:
        """Transports beside it, for example cma, ib, rdmacm; self, tcp, posix and sysv are built in."""
        found = {path.name.split(".")[0].removeprefix("libuct_") for path in self.file.parent.glob("ucx/libuct_*.so*")}
        return tuple(sorted(found))

    @property
    def has_rdma(self) -> bool:
        return any(name == "ib" or name.startswith("ib_") for name in self.plugins)


@functools.cache
def load() -> Ucx:
    """Once per process. ConfigError: PSRL_UCX is none of the above. LinkError: no UCX can be loaded."""
    choice = os.environ.get("PSRL_UCX", "auto")
    failures = []
    for file in [_loaded()] if _loaded() else _candidates(choice):
        try:
            library = ctypes.CDLL(str(file))
        except OSError as error:
            failures.append(str(error))
            continue
        library.ucp_get_version_string.restype = ctypes.c_char_p
        found = Ucx(_loaded() or Path(str(file)), library.ucp_get_version_string().decode())
        _log.info("UCX %s from %s (PSRL_UCX=%s)", found.version, found.file, choice)
        return found
    tried = "; ".join(failures) or "the package libucx-cu12 is not installed"
    raise LinkError(f"no UCX with PSRL_UCX={choice} ({tried}): pip install libucx-cu12, or the system's package")


def rdma_devices() -> tuple[str, ...]:
    """InfiniBand and RoCE adapters that the kernel knows, for example mlx5_0."""
    try:
        return tuple(sorted(os.listdir("/sys/class/infiniband")))
    except OSError:
        return ()


def _candidates(choice: str) -> Iterator[Path | str]:
    """Files to try, best first. A bare name is looked up by the dynamic loader."""
    if "/" in choice:
        yield from (Path(choice) / _SONAME, Path(choice) / "lib" / _SONAME)
    elif choice == "wheel":
        yield from _wheel()
    elif choice == "system":
        yield _SONAME
    elif choice == "auto":
        if _DEVICES.exists():
            yield _SONAME
        yield from _wheel()
        if not _DEVICES.exists():
            yield _SONAME
    else:
        raise ConfigError(f"PSRL_UCX={choice} is neither auto, wheel, system nor a folder with {_SONAME}")


def _wheel() -> Iterator[Path]:
    spec = importlib.util.find_spec("libucx")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield Path(folder) / "lib" / _SONAME


def _loaded() -> Path | None:
    """The file of the libucp that this process has mapped."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            name = line.rstrip("\n").partition("/")[2]
            if name.rpartition("/")[2].startswith("libucp.so"):
                return Path("/" + name)
    return None
