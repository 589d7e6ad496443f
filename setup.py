"""A wheel brings the kernels for CPUs compiled, if there is a compiler (`minimegatron/kernels/prebuilt.py`).

All else about the package stands in `pyproject.toml`. An editable install compiles nothing.
"""

import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

prebuilt = runpy.run_path(str(Path(__file__).parent / "minimegatron" / "kernels" / "prebuilt.py"))


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode and prebuilt["can_build"]():
            prebuilt["build"](Path(self.build_lib, "minimegatron", "kernels", "prebuilt"))


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether a wheel is of one platform."""
        return bool(prebuilt["can_build"]())


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Of any Python 3: the libraries are loaded by `ctypes`."""
        *_, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel}, distclass=WithLibraries)
