"""The whole build: Sphinx without a warning, every link leads somewhere, and nothing is asked of another machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    done = subprocess.run(
        [sys.executable, "-m", "docs.site", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = re.search(r"(\d+) pages, (\d+) MB", done.stdout)
    assert said and int(said[1]) > 800 and int(said[2]) < 100
    html = tmp_path / "html"
    lab = (html / "labs" / "01_process_groups.html").read_text()
    assert "data:image" in lab or "_images/" in lab, "stored figures are shown"
    assert '<span class="k">%%exercise</span>' in lab, "magics are highlighted"
    chinese = (html / "zh" / "labs" / "01_process_groups.html").read_text()
    assert re.search(r'<html[^>]* lang="zh-CN"', chinese) and re.search(r'<html[^>]* lang="en"', lab)
    mesh = (html / "api" / "minimegatron" / "comm" / "mesh.html").read_text()
    assert 'id="minimegatron.comm.mesh.Mesh.build"' in mesh
    assert '_modules/minimegatron/comm/mesh.html#Mesh.build"' in mesh, "a name leads to its source"
    assert 'href="axis.html#minimegatron.comm.axis.Axis"' in mesh, "a type leads to its class"
    architecture = (html / "docs" / "architecture.html").read_text()
    assert 'href="../api/minimegatron/comm/async_ops.html' in architecture, "a path leads to its page"
    index = (html / "searchindex.js").read_text()
    assert "minimegatron.comm.mesh" in index and "labs/04_context_parallel" in index
