"""`psrl doctor`: what this machine offers to a run, one line each, with a word where it will hurt."""

import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from psrl import ucx
from psrl.errors import PsrlError

_PACKAGES = (
    "psrl",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "msgspec",
    "grpcio",
    "pyarrow",
    "hydra-core",
    "wandb",
)
_GIB = 1 << 30


def report() -> str:
    """Several lines of `name: finding`. Imports torch, as the only way to ask it."""
    return "\n".join(f"{name + ':':14} {finding}" for name, finding in _findings())


def _findings() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    for package in _PACKAGES:
        yield package, installed(package)
    yield "devices", _devices()
    yield "C++ core", _core()
    yield "UCX", _ucx()
    yield "RDMA", ", ".join(ucx.rdma_devices()) or "no adapter"
    cpus = len(os.sched_getaffinity(0))
    yield "CPUs", f"{cpus} of {os.cpu_count()} usable; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}"
    yield "memory", _memory()
    yield "/dev/shm", _shm()
    yield "open files", _limit(resource.RLIMIT_NOFILE, 1024)
    yield "locked memory", _locked()
    yield "disk here", f"{shutil.disk_usage('.').free / _GIB:.1f} GiB free in {os.getcwd()}"


def installed(package: str) -> str:
    """Its version, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"no CUDA device; torch runs on the CPU with {torch.get_num_threads()} threads"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def _core() -> str:
    try:
        from psrl._core import memory_available
    except ImportError as error:
        return f"cannot be loaded: {error}"
    return f"loaded; {memory_available() / _GIB:.1f} GiB may still be touched (free memory and memory cgroups)"


def _ucx() -> str:
    """The one that links would use, with what it can do."""
    try:
        found = ucx.load()
    except PsrlError as error:
        return str(error)
    text = f"{found.version} ({found.file}); self, tcp, posix, sysv, {', '.join(found.plugins)}"
    if ucx.rdma_devices() and not found.has_rdma:
        return f"{text}: RDMA NIC present but this UCX has no ib; install the system's UCX and set PSRL_UCX=system"
    return text


def _locked() -> str:
    text = _limit(resource.RLIMIT_MEMLOCK, None, 1 << 20, "MiB")
    limited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY
    return f"{text}: RDMA locks all segments, set ulimit -l unlimited" if limited and ucx.rdma_devices() else text


def _memory() -> str:
    with open("/proc/meminfo") as lines:
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB\n")}
    return f"{sizes['MemAvailable'] / _GIB:.1f} of {sizes['MemTotal'] / _GIB:.1f} GiB available"


def _shm() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except FileNotFoundError:
        return "not mounted (PSRL does not need it: its segments are memfds)"
    return f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free (PSRL's segments are memfds, outside it)"


def _limit(which: int, least: int | None, unit: int = 1, unit_name: str = "") -> str:
    soft, hard = resource.getrlimit(which)

    def shown(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit:,} {unit_name}".strip()

    low = least is not None and soft != resource.RLIM_INFINITY and soft < least
    return f"{shown(soft)} (hard limit {shown(hard)})" + (f": low, try ulimit -n {least}" if low else "")
