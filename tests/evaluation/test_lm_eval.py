"""The harness says the same of our engine as of transformers' model: log-probabilities, texts, answers, a task."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from minimegatron.data.tokenizer import HuggingFaceTokenizer
from minimegatron.evaluation.likelihood import engine_of
from tests.inference.models import ours
from tests.inference.test_command import published

pytest.importorskip("lm_eval", reason="pip install lm-eval")


@pytest.mark.thorough
def test_the_harness_has_the_same_numbers_as_with_transformers(tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from minimegatron.evaluation.lm_eval import Harness, tasks_of

    folder = published("llama2", tmp_path / "model")
    lines = [{"q": f"{a} + 1 =", "right": str(a + 1), "wrong": str(a + 7)} for a in range(12)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/sums.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4, max_length=32)
    engine = engine_of(ours("llama2"))
    engine.max_model_len = engine.scheduler.max_model_len = 33
    mine = Harness(engine, HuggingFaceTokenizer(folder, split_special_tokens=False))

    def asked(*args):
        return SimpleNamespace(args=args)

    pairs = [asked("Who is it", " that knows?"), asked("", "A text"), asked("many words " * 6, "end")]
    for (value, greedy), (want, also) in zip(mine.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert value == pytest.approx(want, rel=1e-4) and greedy == also
    texts = [asked("A text that is longer than one window of thirty two letters, by far."), asked("short")]
    found = zip(mine.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), strict=True)
    assert all(value == pytest.approx(want, rel=1e-4) for value, want in found)
    prompts = [asked("Go on", {"until": ["."], "max_gen_toks": 8, "do_sample": False})]
    assert mine.generate_until(prompts) == theirs.generate_until(prompts)
    ours_of = tasks_of(engine, mine.words, ["sums"], include_path=str(tmp_path / "tasks"))["sums"]
    known = TaskManager(include_path=str(tmp_path / "tasks"))
    theirs_of = simple_evaluate(theirs, tasks=["sums"], task_manager=known)["results"]["sums"]
    assert ours_of["acc"] == theirs_of["acc,none"] and ours_of["acc_norm"] == theirs_of["acc_norm,none"]
