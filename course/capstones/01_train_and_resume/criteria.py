"""What is asked of a training, and how it is seen.

    whole     steps 1 ... T                                        nobody disturbs it
    broken    steps 1 ... k, then a rank gets SIGKILL              k is drawn between T/4 and T/2
    resumed   the same command again: c + 1 ... T                  c: the checkpoint that it found
    elsewhere the other command, beside a copy of that folder      c + 1 ... c + 5

| criteria           | from                                                                                     |
|--------------------|------------------------------------------------------------------------------------------|
| explained, facts   | the configuration that `whole` has logged, beside `run.toml`                             |
| killed             | processes and exit status of `broken`; the first step of `resumed`                       |
| resumed, elsewhere | losses beside those of `whole`                                                           |
| order              | the loss of step c + 1 that transformers has, before it is taken (`oracle`)              |
| export, loss       | the model that `export` makes of the end of `whole`                                      |

No criterion is about time, and none about a machine's last digits but those that the same command gives twice.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from labkit.acceptance import Criteria, Missed, once, require
from minimegatron.config import TransformerConfig

from . import oracle
from .training import END_SECONDS, Plan, Run, attempt, completed, different, named_in

SHORTEST, BEYOND = 40, 5  # steps of a run; of `elsewhere`
LOST = 0.1  # of all steps, those between checkpoint and kill
CLOSE = 1e-3  # nats a token, in fp32
ROUNDED = 3e-2  # in 16 bits
REASON = 40  # letters of a `why`
EXPORT_SECONDS = 300.0
EXACT, NEARLY = 1e-9, 0.02  # of a fact: counted; bytes that last and shares of steps


@dataclasses.dataclass(frozen=True)
class Size:
    """What may be trained.

    Attributes:
        least, most: parameters.
        tokens: of all steps.
        bits: a byte of the held-out text, at most.
    """

    least: float
    most: float
    tokens: float
    bits: float


LAPTOP = Size(0, 2e6, 1e6, 2.9)
SIZES = {"laptop": LAPTOP, "125m": Size(100e6, 160e6, 200e6, 2.9)}


@dataclasses.dataclass
class Session:
    """One grading; each run happens when a criterion first asks for it.

    Attributes:
        folder, plan: what was handed in.
        random: draws what is asked.
        scratch: folder for all that is written.
        size: what may be trained.
        judge: answers what is not in a log (`oracle`).
    """

    folder: Path
    plan: Plan
    random: Random
    scratch: Path
    size: Size
    judge: Any = oracle

    def __post_init__(self) -> None:
        self.seed, self.place = self.random.randrange(1, 2**31), self.random.uniform(0.25, 0.5)
        self.victim = Random(self.random.random())

    @once
    def data(self) -> oracle.Data:
        """The judge's text."""
        data: oracle.Data = self.judge.Data(Random(self.seed), self.scratch)
        return data

    def words(self, name: str) -> dict[str, Any]:
        """What commands are given that write below `name`."""
        home = self.scratch / name
        home.mkdir(exist_ok=True)
        own = {"save": home / "save", "log": home / "log.jsonl", "seed": self.seed}
        return {**own, **self.data().words}

    def begin(self, name: str, command: str = "train") -> Any:
        """Start a training that writes below `name`."""
        words = self.words(name)
        return attempt(self.plan.start[command], self.folder, words, self.scratch / f"{name}.log")

    @once
    def whole(self) -> Run:
        """A run that nobody disturbs."""
        with self.begin("whole") as training:
            training.until(1 << 60)
            status = training.program.status
            require(status == 0, f"`train` ended with status {status}: {training.program.last_words()}")
            run: Run = training.run()
        require(run.last >= SHORTEST and run.first == 1, f"a run of {len(run.steps)} steps: {SHORTEST} or more")
        return run

    @once
    def killed(self) -> str:
        """A run of which a rank is killed; `killed/` is a copy of its folder, before it goes on."""
        step = round(self.place * self.whole().last)
        with self.begin("broken") as training:
            if not training.until(step):
                raise Missed(f"`train` ended before step {step}: {training.program.last_words()}")
            told: str = training.kill_a_rank(self.victim)
            self.before_kill: Run = training.run()
        if (save := self.scratch / "broken" / "save").is_dir():
            shutil.copytree(save, self.scratch / "killed" / "save")
        return told

    @once
    def broken(self) -> Run:
        """What it had logged before."""
        self.killed()
        return self.before_kill

    @once
    def resumed(self) -> Run:
        """The same command again, until its end."""
        self.killed()
        with self.begin("broken") as training:
            training.until(1 << 60)
            status = training.program.status
            told = f"`train`, started again after the kill, ended with status {status}: "
            require(status == 0, told + training.program.last_words())
            run: Run = training.run()
        first, last = run.first, self.whole().last
        require(
            first > 1, "started again after the kill, it began at step 1: no checkpoint was there, or none was read"
        )
        require(run.last == last, f"started again after the kill, it ended at step {run.last}, not {last}")
        return run

    @once
    def elsewhere(self) -> Run:
        """The other command beside the copy, for some steps."""
        done = self.resumed().first - 1
        shutil.copytree(self.scratch / "killed" / "save", self.scratch / "elsewhere" / "save")
        with self.begin("elsewhere", "elsewhere") as training:
            training.until(done + BEYOND)
            run: Run = training.run()
        require(run.first > 1, "`elsewhere` began at step 1: it has not read the checkpoint")
        return run

    def model(self, name: str) -> Any:
        """transformers' model of the newest checkpoint below `name`."""
        words = {**self.words(name), "model": self.scratch / name / "model"}
        completed(self.plan.start["export"], self.folder, words, self.scratch / f"{name}-export.log", EXPORT_SECONDS)
        return self.judge.exported(words["model"])

    @once
    def final(self) -> Any:
        """The exported model of the end of `whole`."""
        self.whole()
        return self.model("whole")

    def tolerance(self) -> float:
        """Of a loss, between two ways to compute it."""
        return CLOSE if self.whole().field("params_dtype") == "fp32" else ROUNDED


Try = Callable[[Session], str]
CRITERIA = criterion = Criteria[Try]()


# --------------------------------------------------------------------------------------------------- what is said


@criterion(
    15,
    f"[why] has each field that `train` sets, in {REASON} letters or more, no two alike, and no other; what is filled "
    "in needs none",
)
def explained(session: Session) -> str:
    """Fields that are not the default's, flags, and the keys of --config."""
    why, run = session.plan.why, session.whole()
    wanted = run.chosen() | named_in(session.plan.start["train"], session.folder)
    absent, more = sorted(wanted - why.keys()), sorted(why.keys() - wanted)
    require(not absent, f"[why] does not have {', '.join(absent)}")
    require(not more, f"[why] has {', '.join(more)}, which `train` does not set")
    short = [f"{name} ({len(text.strip())})" for name, text in why.items() if len(text.strip()) < REASON]
    require(not short, f"letters of too short a why: {', '.join(short)}")
    texts = [text.strip().lower() for text in why.values()]
    alike = [name for name, text in why.items() if texts.count(text.strip().lower()) > 1]
    require(not alike, f"the same words for {', '.join(alike)}")
    return f"{len(wanted)} fields are explained"


@criterion(
    10,
    "[facts] has parameters, tokens_a_step, tokens, exact; bytes_a_rank (weights, gradients and the optimizer's state, "
    "between steps, on rank 0) and warmup_share (steps until the highest rate, of all) within 2 %",
)
def facts(session: Session) -> str:
    """Computed from the log of `whole`."""
    run = session.whole()
    seen = facts_of(run)
    wrong = []
    for name, value in seen.items():
        said = session.plan.facts.get(name)
        near = NEARLY if name in ("bytes_a_rank", "warmup_share") else EXACT
        if said is None:
            wrong.append(f"{name} is not there")
        elif abs(said - value) > near * abs(value):
            wrong.append(f"{name} is {value:.6g}, not {said:.6g}")
    require(not wrong, "; ".join(wrong))
    return ", ".join(f"{name} {value:.6g}" for name, value in seen.items())


def facts_of(run: Run) -> dict[str, float]:
    """What `facts` asks, of a run."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in run.config["model"].items()}
    steps = [run.steps[step] for step in sorted(run.steps)]
    rates = [float(step["learning_rate"]) for step in steps]
    samples = sum(int(step["global_batch_size"]) for step in steps)
    length = run.field("seq_length")
    return {
        "parameters": oracle.parameters(TransformerConfig.from_dict(fields)),
        "tokens_a_step": steps[-1]["global_batch_size"] * length,
        "tokens": samples * length,
        "bytes_a_rank": sum(steps[-1]["memory_by_owner"].values()),
        "warmup_share": (rates.index(max(rates)) + 1) / len(rates),
    }


@criterion(
    20,
    f"at most {LAPTOP.most / 1e6:g} million parameters and {LAPTOP.tokens / 1e6:g} million tokens; the exported model "
    f"has at most {LAPTOP.bits:g} bits a byte on documents that nobody trained on (--size 125m: 100 to 160 million "
    "parameters)",
)
def loss(session: Session) -> str:
    """transformers reads the held-out text."""
    of, size = facts_of(session.whole()), session.size
    told = f"{of['parameters']:.0f} parameters, where {size.least / 1e6:g} to {size.most / 1e6:g} million are allowed"
    require(size.least <= of["parameters"] <= size.most, told)
    require(of["tokens"] <= size.tokens, f"{of['tokens']:.0f} tokens, where {size.tokens:g} are allowed")
    data, length = session.data(), session.whole().field("seq_length")
    bits = session.judge.bits_per_byte(session.final(), data.tokenizer, data.held_out, length)
    told = f"{bits:.3f} bits a byte of {len(data.held_out)} held-out documents"
    require(bits <= size.bits, told)
    return told


# ------------------------------------------------------------------------------------------------- kill and resume


@criterion(
    15,
    f"a rank gets SIGKILL: the command ends within {END_SECONDS:.0f} s, not with 0, leaves no process, and at most "
    f"{100 * LOST:g} % of all steps are taken again",
)
def killed(session: Session) -> str:
    """At a step that is drawn."""
    told = session.killed()
    before, after, steps = session.broken().last, session.resumed().first, session.whole().last
    lost = before + 1 - after
    require(lost <= LOST * steps, f"killed after step {before}, it went on at {after}: {lost} of {steps} steps again")
    return f"{told}; after step {before} it went on at {after}"


@criterion(
    20,
    "the same command again gives every loss, gradient norm and learning rate of the run without interruption, and the "
    "same final weights, to the last bit",
)
def resumed(session: Session) -> str:
    """Bit for bit, before the kill and after it."""
    whole, before, after = session.whole(), session.broken(), session.resumed()
    told = different(before, whole, range(1, before.last + 1), 0)
    require(not told, f"before the kill, two runs of the same command differ: {told} in the run without interruption")
    told = different(after, whole, range(after.first, after.last + 1), 0)
    require(not told, f"after the kill, {told} in the run without interruption")
    name = session.judge.same_weights(session.scratch / "broken" / "save", session.scratch / "whole" / "save")
    require(not name, f"all losses are equal, and of the final weights {name} is another")
    return f"{after.last - after.first + 1} steps and the final weights are equal to the last bit"


@criterion(
    10,
    f"the first step after the kill has read the next samples, none twice and none left out: its loss is the one that "
    f"transformers computes on the checkpoint's weights, within {CLOSE:g} ({ROUNDED:g} in 16 bits); no dropout",
)
def order(session: Session) -> str:
    """Of the checkpoint that was there when the rank was killed."""
    run = session.resumed()
    for field in ("hidden_dropout", "attention_dropout"):
        require(run.field(field) == 0, f"{field} is {run.field(field)}: no loss can be told in advance")
    for field in ("reset_attention_mask", "reset_position_ids", "sequence_packing"):
        require(not run.field(field), f"{field}: transformers does not compute it so")
    done, size = run.first - 1, run.steps[run.first]["global_batch_size"]
    total = sum(step["global_batch_size"] for step in session.whole().steps.values())
    train, model = session.judge.samples_of(run.config, total), session.model("killed")
    wrong = session.judge.read_after(model, train, done, size, run.loss(run.first), session.tolerance())
    require(not wrong, f"step {run.first}: {wrong}")
    return f"step {run.first} has read samples {done * size} to {(done + 1) * size - 1}"


@criterion(
    5,
    f"`elsewhere` goes on from the same checkpoint in another layout (dp2 to tp2, say), and {BEYOND} losses are those "
    f"of the run without interruption within {CLOSE:g} ({ROUNDED:g} in 16 bits)",
)
def elsewhere(session: Session) -> str:
    """The first steps."""
    run, whole = session.elsewhere(), session.whole()
    require(run.layout != whole.layout, f"`elsewhere` has the layout of `train`: {_said(run.layout)}")
    steps = range(run.first, run.first + BEYOND)
    told = different(run, whole, steps, session.tolerance())
    require(not told, f"{_said(run.layout)}: {told} in the run without interruption")
    worst = max(abs(run.loss(step) - whole.loss(step)) for step in steps)
    return f"from {_said(whole.layout)} to {_said(run.layout)}: {BEYOND} losses agree to {worst:.1g}"


def _said(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {n}" for axis, n in layout.items() if n > 1) or "one rank"


@criterion(
    5,
    f"`export` makes a model of the newest checkpoint that transformers loads, with its logits to {oracle.LOGITS:g} of "
    "the largest",
)
def export(session: Session) -> str:
    """At the end of the run without interruption."""
    run, model = session.whole(), session.final()
    total = sum(step["global_batch_size"] for step in run.steps.values())
    batch = session.judge.samples_of(run.config, total).batch(range(2))
    told: str = session.judge.check_export(session.scratch / "whole" / "save", model, batch["tokens"])
    return told
