"""A kernel that is forked obeys its manager as an executed one does."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.faults.helpers import alive, wait_for
from tests.labkit.kernel import Kernel
from tests.thorough import SLOW
from tests.warm_kernels import WarmManager


@SLOW
def test_it_is_interrupted_restarted_and_ended(tmp_path: Path) -> None:
    sign = tmp_path / "begun"
    with Kernel(tmp_path, WarmManager, PLANTED="here") as kernel:
        said = kernel.run("import os, sys\nos.environ['PLANTED'], os.getcwd(), 'torch' in sys.modules").text
        assert ast.literal_eval(said) == ("here", str(tmp_path), True)
        cell = kernel.start(f"open({str(sign)!r}, 'w').close()\nimport time\ntime.sleep(600)")
        wait_for(sign.exists, 60, "the cell to begin")
        kernel.manager.interrupt_kernel()
        assert "KeyboardInterrupt" in kernel.wait(cell).error
        first = kernel.pid
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=60)
        assert kernel.run("'sys' in globals()").text == "False"
        second = kernel.pid
        assert alive(second) and not alive(first)
    wait_for(lambda: not alive(second), 10, "the kernel to end")
