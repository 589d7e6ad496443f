"""A wheel brings more than the packages: labs, solutions, and the kernels for CPUs compiled, if there is a compiler.

| in the wheel                              | from                                                    |
|-------------------------------------------|---------------------------------------------------------|
| `course/labs/`, `course/solutions/`       | `labs/`, `solutions/`                                   |
| `minimegatron/kernels/prebuilt/`          | `minimegatron/kernels/prebuilt.py`, which compiles them |
| the environment's `etc/ipython/startup/`  | `labkit/ipython_startup.py`                             |

All else about the package stands in `pyproject.toml`. An editable install has none of this: it finds the checkout.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
prebuilt = runpy.run_path(str(ROOT / "minimegatron" / "kernels" / "prebuilt.py"))


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in ("labs", "solutions"):
            target = Path(self.build_lib, "course", name)
            shutil.rmtree(target, ignore_errors=True)  # of an earlier build, which may have had other labs
            target.mkdir(parents=True)
            for notebook in sorted((ROOT / name).glob("[0-9][0-9]_*.ipynb")):
                shutil.copy(notebook, target)
        startup = Path(self.build_lib).parent / "50-minimegatron.py"
        shutil.copy(ROOT / "labkit" / "ipython_startup.py", startup)
        self.distribution.data_files = [("etc/ipython/startup", [str(startup)])]
        if prebuilt["can_build"]():
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
