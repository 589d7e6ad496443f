"""Ragged lines of text for each task."""

from __future__ import annotations

import json
import random

import pytest


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ragged lines for each task."""
    folder, draw = tmp_path_factory.mktemp("lines"), random.Random(0)
    word = lambda n: "".join(draw.choice("abcdef") for _ in range(n))  # noqa: E731
    lines: dict[str, list[dict[str, str]]] = {"sft": [], "dpo": []}
    for _ in range(30):
        lines["sft"].append({"prompt": word(draw.randint(1, 9)), "completion": word(draw.randint(1, 12))})
        lines["dpo"].append(
            {
                "prompt": word(draw.randint(1, 5)),
                "chosen": word(draw.randint(1, 6)),
                "rejected": word(draw.randint(1, 9)),
            }
        )
    for name, some in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    words = {name: f"--data-path {folder}/{name}.jsonl" for name in lines}
    return words | {"reward": words["dpo"], "grpo": "", "ppo": ""}
