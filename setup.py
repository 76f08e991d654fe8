"""Builds psrl._core with CMake; everything else stands in pyproject.toml."""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str, directory_attribute: str) -> str:
    """The program of the build requirement `name`, else the system's."""
    if importlib.util.find_spec(name):
        directory = getattr(importlib.import_module(name), directory_attribute)
        return str(Path(directory) / name)
    found = shutil.which(name)
    if not found:
        raise SystemExit(f"psrl needs {name} to build its C++ core: pip install {name}")
    return found


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve() / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        cmake = tool("cmake", "CMAKE_BIN_DIR")
        configure = [
            cmake, "-S", ROOT, "-B", build, "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja', 'BIN_DIR')}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            # Checked in our own builds; a newer compiler's new warning must not break an installation.
            "-DPSRL_WERROR=OFF",
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", build, "--target", "_core", "-j", str(os.cpu_count() or 1)], check=True)


setup(ext_modules=[Extension("psrl._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
