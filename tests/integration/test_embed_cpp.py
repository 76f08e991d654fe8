"""examples/embed/cpp as its README says: a project of its own that takes the core by add_subdirectory.

That the program runs is a test of the C++ ones (target `embed`), which have the core compiled; to compile it once more
takes minutes.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import psrl

PROJECT = Path(psrl.__file__).parents[1] / "examples/embed/cpp"

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which(os.environ.get("CXX", "c++")) is None,
    reason="needs cmake and a C++ compiler",
)


def configured(build: Path) -> list[str]:
    """The names of its targets."""
    subprocess.run(["cmake", "-S", PROJECT, "-B", build], check=True, capture_output=True, timeout=200)
    listed = subprocess.run(
        ["cmake", "--build", build, "--target", "help"], check=True, capture_output=True, text=True, timeout=60
    )
    return [word.rstrip(":") for line in listed.stdout.splitlines() for word in line.split()]


def test_the_core_is_all_that_another_project_gets(tmp_path: Path) -> None:
    targets = configured(tmp_path / "build")
    assert {"embed", "psrl_core"} <= set(targets)
    assert not {"_core", "psrl_tests"} & set(targets)
    cache = (tmp_path / "build/CMakeCache.txt").read_text()
    for option in ("PSRL_BUILD_PYTHON", "PSRL_BUILD_TESTS", "PSRL_WERROR"):
        assert f"{option}:BOOL=OFF" in cache


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_it_builds_and_runs(tmp_path: Path) -> None:
    build = tmp_path / "build"
    configured(build)
    parallel = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", build, "-j", parallel], check=True, capture_output=True, timeout=1100)
    ran = subprocess.run([build / "embed"], check=True, capture_output=True, text=True, timeout=60)
    assert "sink: has version 1" in ran.stdout
    assert "the sink ended with 0" in ran.stdout
