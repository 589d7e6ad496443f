"""docs/architectures.md as it stands: its files are compared over ranks and asked to generate, its commands run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.thorough import SLOW

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architectures.md").read_text()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The page's files, in a folder from which they can be imported."""
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        (tmp_path / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@SLOW
def test_the_files_are_the_same_in_every_layout_and_generate(files, ranks):
    from course.capstone02.trying import first_step, from_states, model_of

    import course  # noqa: F401  makes course.capstone02

    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    for spec, layout in (
        ("short_convolution layers", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("unigrams both", "--pipeline-model-parallel-size 2"),
        ("unigrams model", "--tensor-model-parallel-size 2 --vocab-size 51"),
    ):
        assert "are those of one process" in ranks(2).run(first_step, f"--spec {spec} {layout}")[0]
        model = model_of(f"--spec {spec}").eval()
        with torch.no_grad():
            whole = model.full_logits(tokens)
            assert (from_states(model, tokens, left=torch.nan) - whole).abs().max() <= 1e-12
            ids = (torch.arange(16) > 6).long().expand(2, 16)
            apart = model.full_logits(tokens, document_ids=ids)[:, 7:] - model.full_logits(tokens[:, 7:])
            assert apart.abs().max() <= 1e-12


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_commands_run_one_after_the_other(files):
    script = "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.S))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=files,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("losses and norm agree") == 2
