"""Choosing UCX. Each case is a process of its own: a library once loaded stays."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from psrl import ucx

_wheel = importlib.util.find_spec("libucx")
needs_wheel = pytest.mark.skipif(_wheel is None, reason="the package libucx-cu12 is not installed")
_SAY = """
import json, logging
logging.basicConfig(level=logging.INFO)
from psrl import ucx
from psrl.errors import PsrlError
try:
    found = ucx.load()
    assert ucx.load() is found
    print(json.dumps([str(found.file), found.version, list(found.plugins), found.has_rdma]))
except PsrlError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def loaded(choice: str | None, before: str = "") -> tuple[list[object], str]:
    """What load() finds or raises, and the log."""
    environment = {name: value for name, value in os.environ.items() if name != "PSRL_UCX"}
    if choice is not None:
        environment["PSRL_UCX"] = choice
    done = subprocess.run(
        [sys.executable, "-c", before + _SAY], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout), done.stderr


def wheel_folder() -> Path:
    assert _wheel is not None
    assert _wheel.submodule_search_locations is not None
    return Path(_wheel.submodule_search_locations[0])


def system_has_one() -> bool:
    command = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libucp.so.0')"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@needs_wheel
def test_the_wheels_is_loaded_and_said_once() -> None:
    (file, version, plugins, has_rdma), log = loaded("wheel")
    assert str(file).startswith(str(wheel_folder().resolve()))
    assert str(version).startswith("1.")
    assert "cma" in plugins
    assert not has_rdma
    assert log.count(f"UCX {version} from {file}") == 1


@needs_wheel
@pytest.mark.skipif(ucx.rdma_devices() != (), reason="with RDMA devices the system's comes first")
def test_auto_takes_the_wheels_without_rdma_devices() -> None:
    assert loaded(None)[0] == loaded("wheel")[0]
    assert loaded("auto")[0] == loaded("wheel")[0]


@needs_wheel
def test_auto_takes_the_systems_where_there_are_rdma_devices(tmp_path: Path) -> None:
    pretend = f"import pathlib, psrl.ucx; psrl.ucx._DEVICES = pathlib.Path({str(tmp_path)!r})\n"
    expected = "system" if system_has_one() else "wheel"
    assert loaded("auto", before=pretend)[0] == loaded(expected)[0]


@needs_wheel
@pytest.mark.parametrize("below", ["", "lib"])
def test_a_folder_is_taken_at_its_word(below: str) -> None:
    assert loaded(str(wheel_folder() / below))[0] == loaded("wheel")[0]


def test_a_folder_without_ucx_says_so(tmp_path: Path) -> None:
    (error, text), _ = loaded(str(tmp_path))
    assert error == "LinkError"
    assert str(tmp_path) in str(text)
    assert "pip install libucx-cu12" in str(text)


def test_an_unknown_choice_is_an_error() -> None:
    (error, text), _ = loaded("wheal")
    assert error == "ConfigError"
    assert "PSRL_UCX=wheal" in str(text)


@needs_wheel
@pytest.mark.skipif(not system_has_one(), reason="the system has no libucp.so.0")
def test_what_was_loaded_before_stays() -> None:
    first = f"import ctypes; ctypes.CDLL({str(wheel_folder() / 'lib' / 'libucp.so.0')!r})\n"
    assert loaded("system", before=first)[0] == loaded("wheel")[0]
