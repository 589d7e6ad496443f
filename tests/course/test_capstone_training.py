"""Capstone 01: a right training gets every point, and each fault loses those of its criterion, and is told why.

The trainings here are processes without a model (`fake_training`); the reference solution, with one, and hand-ins that
differ from it in a line are `thorough`.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from labkit import acceptance
from labkit.ranks.pool import shared_pool
from minimegatron import cli
from minimegatron.commands import convert
from minimegatron.config import TransformerConfig
from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from tests.course import fake_training as fake
from tests.thorough import SLOW, mostly_thorough

ROOT = Path(__file__).resolve().parents[2]
CAPSTONE = importlib.import_module("course.capstones.01_train_and_resume").CAPSTONE
CRITERIA = importlib.import_module("course.capstones.01_train_and_resume.criteria")
ORACLE = importlib.import_module("course.capstones.01_train_and_resume.oracle")
TRAINING = importlib.import_module("course.capstones.01_train_and_resume.training")
SOLUTION = ROOT / "course" / "capstones" / "01_train_and_resume" / "solution"
MODEL = TransformerConfig(num_layers=3)
STEPS, EVERY = 60, 5
FACTS = {
    "parameters": ORACLE.parameters(MODEL),
    "tokens_a_step": 1024,
    "tokens": 1024 * STEPS,
    "bytes_a_rank": 1000,
    "warmup_share": 5 / STEPS,
}
WHY = {"num_layers": "Three layers, since a fake has no use for more and two are the default."}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Seconds that are enough for a fake."""
    monkeypatch.setattr(TRAINING, "LEFT_SECONDS", 3.0)


class FakeJudge:
    """Answers from the numbers of `fake_training`."""

    class Data:
        words = {"data": "data", "tokenizer": "tokenizer"}
        tokenizer, held_out = None, ["a document"]

        def __init__(self, random, folder):
            pass

    @staticmethod
    def exported(path):
        return json.loads(path.read_text())

    @staticmethod
    def bits_per_byte(model, tokenizer, texts, length):
        return 2.0 if model["iteration"] == STEPS else 9.0

    @staticmethod
    def samples_of(config, samples):
        return SimpleNamespace(batch=lambda numbers: {"tokens": torch.zeros(2, 4)})

    @staticmethod
    def read_after(model, train, done, size, loss, tolerance):
        right = fake.loss_of(model["state"], done * size)
        return "" if abs(right - loss) <= tolerance and model["iteration"] == done else f"{right} is not {loss}"

    @staticmethod
    def same_weights(one, other):
        return "" if fake.saved(one) == fake.saved(other) else "a weight"

    @staticmethod
    def check_export(save, model, tokens):
        acceptance.require(fake.saved(save) == model, "other logits")
        return "equal"


def hand_in(folder: Path, faults: str = "", again: str = "", export: str = "export", **more) -> Path:
    """A folder with a fake training.

    Args:
        faults: of all its commands.
        again: of `elsewhere` alone.
        more: `facts`, `why`, `ranks`, `steps`, `every`, `elsewhere` (ranks), `config`: fields of the model.
    """
    config = {"event": "config", **RunConfig(TransformerConfig(num_layers=3, **more.get("config", {}))).to_dict()}
    for name, ranks in (("train", more.get("ranks", 2)), ("elsewhere", more.get("elsewhere", 1))):
        config["machine"] = {"world_size": ranks}
        (folder / f"{name}.json").write_text(json.dumps(config))
    python = f"env PYTHONPATH={ROOT} {{python}} -m tests.course.fake_training"
    steps, every = more.get("steps", STEPS), more.get("every", EVERY)
    lines = ["[start]"]
    for name, ranks in (("train", more.get("ranks", 2)), ("elsewhere", more.get("elsewhere", 1))):
        what = f"{faults}, {again}" if name == "elsewhere" else faults
        line = f"{python} {{save}} {{log}} {{seed}} {name}.json {ranks} {steps} {every} '{what}' {{data}} {{tokenizer}}"
        lines.append(f'{name} = "{line}"')
    lines.append(f'export = "{python} {export} {{save}} {{model}}"')
    facts, why = more.get("facts", FACTS), more.get("why", WHY)
    lines += ["[facts]", *(f"{name} = {value}" for name, value in facts.items())]
    lines += ["[why]", *(f"{name} = {json.dumps(text)}" for name, text in why.items())]
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    return folder


def graded(folder: Path, *only: str, seed: int = 0) -> dict[str, acceptance.Result]:
    scratch = folder / "scratch"
    scratch.mkdir()
    size = CRITERIA.Size(0, 2e6, 1e6, 2.6)
    plan = TRAINING.read_plan(folder / "run.toml")
    session = CRITERIA.Session(folder, plan, Random(seed), scratch, size, FakeJudge)
    criteria = [criterion for criterion in CAPSTONE.criteria if not only or criterion.name in only]
    return {criterion.name: CRITERIA.CRITERIA.result(criterion, session) for criterion in criteria}


def test_a_right_training_gets_every_point(tmp_path):
    results = graded(hand_in(tmp_path))
    assert not [result.told for result in results.values() if not result.met]
    assert "1 of 2 ranks was killed" in results["killed"].told


# faults of the training, and what each criterion says of them
FAULTS = [
    ("does not load", {}, {"killed": "it began at step 1", "resumed": "it began at step 1", "order": "at step 1"}),
    ("forgets its moments", {}, {"resumed": r"after the kill, step \d+ has the loss", "order": "is not"}),
    ("begins the data again", {}, {"resumed": "after the kill", "order": "is not"}),
    ("reads a batch twice", {}, {"order": "is not"}),
    ("leaves a batch out", {}, {"order": "is not"}),
    ("is never twice the same", {}, {"resumed": "before the kill, two runs of the same command differ: step 1 "}),
    ("hides its end", {}, {"killed": "the command's exit status is 0"}),
    ("leaves ranks behind", {}, {"killed": "1 processes are left"}),
    ("", {"elsewhere": 2}, {"elsewhere": "has the layout of `train`: data 2"}),
    ("", {"again": "forgets its moments"}, {"elsewhere": r"one rank: step \d+ has the loss"}),
    ("", {"every": 1000}, {"killed": "no checkpoint was there", "elsewhere": "no checkpoint"}),
    ("", {"steps": 20}, {"loss": "a run of 20 steps", "killed": "a run of 20 steps"}),
    ("", {"config": {"hidden_dropout": 0.2}}, {"order": "hidden_dropout is 0.2", "explained": "have hidden_dropout"}),
]


@pytest.mark.parametrize(
    "faults, more, told",
    mostly_thorough(FAULTS, [1, 6]),
    ids=[faults or str(more) for faults, more, _ in FAULTS],
)
def test_a_fault_loses_its_criterion_and_is_told(tmp_path, faults, more, told):
    results = graded(hand_in(tmp_path, faults, **more), *told, seed=2)
    for name, words in told.items():
        assert not results[name].met and re.search(words, results[name].told), results[name].told


def test_few_steps_may_be_taken_again():
    session = SimpleNamespace(
        killed=lambda: "1 of 2 ranks was killed",
        broken=lambda: SimpleNamespace(last=37),
        resumed=lambda: SimpleNamespace(first=29),
        whole=lambda: SimpleNamespace(last=60),
    )
    (killed,) = (criterion for criterion in CAPSTONE.criteria if criterion.name == "killed")
    result = CRITERIA.CRITERIA.result(killed, session)
    assert not result.met and result.told == "killed after step 37, it went on at 29: 9 of 60 steps again"
    session.resumed = lambda: SimpleNamespace(first=32)
    assert CRITERIA.CRITERIA.result(killed, session).met


@pytest.mark.parametrize(
    "more, told",
    [
        ({"why": {}}, {"explained": r"\[why\] does not have num_layers"}),
        ({"why": {**WHY, "lr": WHY["num_layers"]}}, {"explained": r"\[why\] has lr, which `train` does not set"}),
        ({"why": {"num_layers": "three"}}, {"explained": r"too short a why: num_layers \(5\)"}),
        ({"facts": {**FACTS, "tokens": 7}}, {"facts": "^tokens is 61440, not 7$"}),
        ({"facts": {**FACTS, "warmup_share": 0.1}}, {"facts": "^warmup_share is 0.0833333, not 0.1$"}),
        ({"facts": {"tokens": 61440}}, {"facts": "parameters is not there; tokens_a_step is not"}),
    ],
)
def test_what_is_said_of_a_configuration(tmp_path, more, told):
    steps = [
        {"learning_rate": 0.1 * min(1, s / 5) * (1 - s / 1000), "global_batch_size": 4} for s in range(1, STEPS + 1)
    ]
    config = json.loads((hand_in(tmp_path, **more) / "train.json").read_text())
    run = TRAINING.Run(config, {n: {**s, "memory_by_owner": {"all": 1000}} for n, s in enumerate(steps, 1)})
    session = SimpleNamespace(plan=TRAINING.read_plan(tmp_path / "run.toml"), whole=lambda: run, folder=tmp_path)
    for criterion in CAPSTONE.criteria:
        if criterion.name in told:
            result = CRITERIA.CRITERIA.result(criterion, session)
            assert not result.met and re.search(told[criterion.name], result.told), result.told


def test_a_training_that_fails_is_told_once_with_its_last_words(tmp_path):
    hand_in(tmp_path)
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace("{seed}", "no-number-{seed}"))
    results = graded(tmp_path)
    assert len(results) == 8 and not any(result.met for result in results.values())
    assert all("ValueError: invalid literal" in result.told for result in results.values())
    assert len((tmp_path / "scratch" / "whole.log").read_text().split("Traceback")) == 2, "it was tried again"


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("[start]", "[begin]", "begin"),
        ("train = ", "trian = ", "no `train`"),
        ("{seed}", "1", "does not use {seed}"),
        ("{model}", "model", "`export` does not use {model}"),
        ("tokens = ", "tokns = ", "[facts] tokns is"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, old, new, told):
    path = hand_in(tmp_path) / "run.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError) as error:
        TRAINING.read_plan(path)
    assert told in error.value.what and error.value.fix


def test_fields_are_found_in_flags_in_a_file_and_in_the_log(tmp_path):
    (tmp_path / "more.json").write_text('{"optimizer": {"lr": 1}, "model": {"num_layers": 2}}')
    line = "minimegatron train --config more.json --no-scale-output-init --seed {seed} --clip-grad=2 --load {save}"
    assert TRAINING.named_in(line, tmp_path) == {"lr", "num_layers", "scale_output_init", "clip_grad"}
    config = {**RunConfig(TransformerConfig(hidden_dropout=0.1, activation="relu")).to_dict(), "machine": {}}
    assert TRAINING.Run(config, {}).chosen() == {"activation"}, "0.1 is the command line's default"
    with pytest.raises(ConfigError, match=r"--config none\.json"):
        TRAINING.named_in("train --config none.json", tmp_path)


@pytest.mark.parametrize(
    "old, new, told",
    [
        (
            '"losses": {"lm loss":',
            '"losses": {"loss":',
            "step 1 in the log has losses.lm loss None, where",
        ),
        ('"grad_norm": ', '"grad_norms": ', "has grad_norm None"),
        ('"world_size": 2', '"world_size": 0', "machine.world_size 0"),
        ('"hidden_size": ', '"width": ', "has no model.hidden_size"),
        ('"event": "config"', '"event": "configuration"', "it has logged no step: the last word"),
    ],
)
def test_a_log_that_is_none_is_told(tmp_path, old, new, told):
    config = json.loads((hand_in(tmp_path) / "train.json").read_text())
    step = {"event": "train", "iteration": 1, "losses": {"lm loss": 5.0}, "grad_norm": 1.0, "learning_rate": 0.1}
    step |= {"global_batch_size": 4, "memory_by_owner": {"all": 1}}
    log = tmp_path / "log"
    program = SimpleNamespace(last_words=lambda: "the last word")
    log.write_text(f"{json.dumps(config)}\n{json.dumps(step)}\n" + '{"event": "train", "itera')
    assert TRAINING.Attempt(program, log, 0).run().last == 1, "a line that is cut off is left out"
    log.write_text(log.read_text().replace(old, new))
    with pytest.raises(acceptance.Missed, match=re.escape(told)):
        TRAINING.Attempt(program, log, 0).run()


def test_an_attempt_that_begins_a_log_of_its_own_is_read_from_its_beginning(tmp_path):
    config, log = (hand_in(tmp_path) / "train.json").read_text(), tmp_path / "log"
    step = {"event": "train", "iteration": 7, "losses": {"lm loss": 5.0}, "grad_norm": 1.0, "learning_rate": 0.1}
    log.write_text(f"{config}\n{json.dumps(step | {'global_batch_size': 4, 'memory_by_owner': {'all': 1}})}\n")
    training = TRAINING.Attempt(SimpleNamespace(), log, 1, log.stat().st_ino)
    assert training.runs() == []
    log.rename(tmp_path / "log.1")
    log.write_text((tmp_path / "log.1").read_text())
    assert training.run().first == 7


def test_what_is_kept_is_not_gone_on_from(tmp_path):
    hand_in(tmp_path)
    (tmp_path / "kept" / tmp_path.name).mkdir(parents=True)
    (tmp_path / "kept" / tmp_path.name / "log").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        acceptance.main([str(tmp_path), "--capstone", "01", "--keep", str(tmp_path / "kept")])


# ------------------------------------------------------------------------------------------------------ the oracle


class Counting(torch.nn.Module):
    """Logits that depend on the token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table[input_ids])


class Samples:
    """Random ids; the last label of each row does not count."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, 16, (40, 9), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def batch(self, numbers):
        rows = self.ids[list(numbers)]
        mask = torch.ones(len(rows), 8)
        mask[:, -1] = 0
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": mask}


@pytest.mark.parametrize(
    "read, told", [(3, ""), (0, "the data began again"), (2, "read twice"), (4, "was left out"), (7, "other samples")]
)
def test_the_loss_of_a_step_says_which_samples_it_has_read(read, told):
    samples, model = Samples(), Counting()
    rows = samples.ids[4 * read : 4 * read + 4]
    losses = torch.nn.functional.cross_entropy(model.table[rows[:, :-2]].flatten(0, 1), rows[:, 1:-1].flatten())
    found = ORACLE.read_after(model, samples, 3, 4, float(losses), 1e-3)
    assert (found == "") == (told == "") and told in found
    assert not told or "samples 12 to 15 have the loss" in found


def test_a_model_that_does_not_load_or_compute_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "none"}')
    with pytest.raises(acceptance.Missed, match="transformers does not load the exported folder"):
        ORACLE.exported(tmp_path)
    with pytest.raises(acceptance.Missed, match="does not compute: IndexError"):
        ORACLE.logits_of(Counting(), torch.tensor([[99]]))


def test_every_token_of_a_held_out_text_is_predicted_once():
    tokenizer = SimpleNamespace(eod=0, tokenize=lambda text: [ord(letter) % 16 for letter in text])
    texts = ["abcdefghijk", "x", "naïve " * 9]
    bits = ORACLE.bits_per_byte(
        lambda input_ids: SimpleNamespace(logits=torch.zeros(*input_ids.shape, 16)), tokenizer, texts, 4
    )
    assert bits == pytest.approx(4 * sum(map(len, texts)) / sum(len(text.encode()) for text in texts))


def save_three_steps(rank, world, folder):
    """A rank trains a tiny Llama, and saves after each step."""
    line = (
        "--mock-data --vocab-size 96 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 24 --swiglu"
    )
    line += " --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --hidden-dropout 0 --lr 1e-2"
    line += " --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --save-interval 1"
    run = parse_args([*line.split(), "--save", f"{folder}/save", "--log-file", f"{folder}/log.jsonl"], world_size=world)
    trainer = build_trainer(run, quiet=False)
    trainer.train()
    trainer.close()


@SLOW
def test_the_page_says_what_125_million_parameters_take(capsys):
    page = (ROOT / "docs" / "capstones.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^minimegatron (plan (?:.*\\\n)*.*)\n# (.*) \.\.\. (.*)$", page, re.MULTILINE)
    words = command[0].replace("\\\n", " ").split()
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert command[1] in out and command[2] in out
    flags = ["--mock-data", *words[words.index("--num-layers") : words.index("--tokens")]]
    size, page = CRITERIA.SIZES["125m"], " ".join(page.split())
    count = ORACLE.parameters(parse_args(flags, 2).model)
    assert size.least <= count <= size.most and f"with a gate {count / 1e6:.0f} million" in page
    count_without = ORACLE.parameters(parse_args([flag for flag in flags if flag != "--swiglu"], 2).model)
    assert count_without < size.least and f"GPT-2's size have {count_without / 1e6:.0f} million" in page
    lasts = next(line for line in out.splitlines() if line.startswith("rank 0, layers")).split()[4:8]
    saved = sum(float(text.replace(",", "")) for text in (lasts[0], lasts[1], lasts[3])) * 2**20  # not the gradients
    assert saved == pytest.approx(14 * count, rel=0.02)
    assert f"{saved / 1e9:.1f} GB" in page and f"{4 * 2 * saved / 1e9:.0f} GB" in page


@SLOW
def test_the_oracle_knows_the_next_loss_of_a_real_training_and_its_export(tmp_path):
    shared_pool(2).run(save_three_steps, str(tmp_path))
    (run,) = TRAINING.read_log(tmp_path / "log.jsonl")
    for step in (2, 3):
        convert.main(
            ["--load", f"{tmp_path}/save", "--save", f"{tmp_path}/{step}", "--to", "hf", "--ckpt-step", str(step)]
        )
    second, third = (ORACLE.exported(tmp_path / str(step)) for step in (2, 3))
    samples = ORACLE.samples_of(run.config, 12)
    assert ORACLE.read_after(second, samples, 2, 4, run.loss(3), 1e-3) == ""
    assert "other samples, or other weights" in ORACLE.read_after(third, samples, 2, 4, run.loss(3), 1e-3)
    tokens = samples.batch(range(2))["tokens"]
    assert "agree" in ORACLE.check_export(tmp_path / "save", third, tokens)
    with pytest.raises(acceptance.Missed, match="of the newest checkpoint differ"):
        ORACLE.check_export(tmp_path / "save", second, tokens)
    assert ORACLE.same_weights(tmp_path / "save", tmp_path / "save") == ""
    shutil.rmtree(shutil.copytree(tmp_path / "save", tmp_path / "older") / "iter_0000003")
    assert ORACLE.same_weights(tmp_path / "save", tmp_path / "older") != ""


# ---------------------------------------------------------------------------------------------- with a real training


def real(folder: Path, edits: dict[str, tuple[str, str]], *options: str) -> dict[str, dict]:
    """Grade a copy of the solution in which texts are replaced, {file: (old, new)}; results by name."""
    shutil.copytree(SOLUTION, folder / "mine")
    for name, (old, new) in edits.items():
        text = (folder / "mine" / name).read_text()
        assert old in text, old
        (folder / "mine" / name).write_text(text.replace(old, new))
    line = [sys.executable, "-m", "minimegatron", "grade", "mine", "--capstone", "01", "--json", "marks.json", *options]
    done = subprocess.run(line, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=1500)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (results,) = json.loads((folder / "marks.json").read_text())["learners"].values()
    return {result["name"]: result for result in results}


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_solution_gets_every_point(tmp_path):
    results = real(tmp_path, {})
    assert len(results) == 8 and not [result["told"] for result in results.values() if not result["met"]]


SHORT = ('"train_iters": 200', '"train_iters": 60')
EDITS = [
    ("run.toml", "--load {save} --log-file", "--log-file", {"killed": "it began at step 1"}),
    ("run.toml", "--log-file", "--no-load-optim --log-file", {"resumed": "after the kill, step"}),
    ("run.toml", "[facts]", "[facts]", {"loss": "bits a byte of"}),
    ("run.toml", "--to hf", "--to hf --ckpt-step 10", {"export": "differ by|ended with status"}),
    ("run.json", '"duplicated"', '"blockwise"', {"elsewhere": "tensor 2: step"}),
    ("run.json", '"num_layers": 4', '"num_layers": 4, "hidden_dropout": 0.1', {"order": "hidden_dropout is 0.1"}),
    ("run.json", '"hidden_size": 128', '"hidden_size": 256', {"loss": "where 0 to 2 million are allowed"}),
    ("run.json", '"save_interval": 10', '"save_interval": 50', {"killed": "it began at step 1"}),
]


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file, old, new, told", EDITS, ids=[next(iter(told.values())) for *_, told in EDITS])
def test_a_real_training_that_loses(tmp_path, file, old, new, told):
    """The solution with a line changed, and fewer steps."""
    edits = {"run.json": SHORT, file: (old, new)}
    if file == "run.json":
        text = (SOLUTION / file).read_text()
        edits = {file: (text, text.replace(*SHORT).replace(old, new))}
    results = real(tmp_path, edits, "--only", ",".join(told))
    for name, words in told.items():
        assert not results[name]["met"] and re.search(words, results[name]["told"]), results[name]["told"]
