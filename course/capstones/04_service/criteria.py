"""What is asked of a deployment, and what the answers have to be.

| criteria                          | how it is seen from outside                                                  |
|-----------------------------------|------------------------------------------------------------------------------|
| words, stop, refusals, streams_64 | answers beside the judge's own words                                         |
| latency, batching                 | times of this deployment on this machine, divided by each other              |
| queue, deadline                   | more than it can hold; less time than an answer takes                        |
| killed_replica                    | SIGKILL to a process, requests under way                                     |
| soak                              | its pages, its memory, after a load with clients that vanish                 |
| balance                           | CPU seconds of each replica                                                  |
| report                            | the learner's ratios beside the judge's                                      |

No criterion is about seconds: a machine that is half as fast halves both sides of each ratio.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil

from labkit.acceptance import FAULTS, Criteria, Criterion, Missed, Result, Tell, missed, require
from minimegatron.errors import DataError, MinimegatronError
from minimegatron.serving.workload import WORDS

from .deployment import RATIOS, Answer, Deployment, Plan, running

STREAMS, TOKENS, LONGEST = 64, 48, 448  # at once; of an answer; prompt and answer together
FLOOD, PENALTY = 320, 1.0
DEADLINE, SHORT_DEADLINE, GRACE = 60.0, 0.25, 5.0  # seconds
MOST_LATENCY, LEAST_BATCHING = 32.0, 2.0
BACK_SECONDS, EMPTY_SECONDS, SOAK_SECONDS = 60.0, 10.0, 20.0
WARM_SECONDS = 30.0  # until all replicas have worked
WORKED, COMPARED = 0.03, 1.0  # seconds of CPU of a replica that had requests; of all that make shares comparable
GROWTH, SLACK = 1.25, 64 << 20  # a library that compiles a product for each number of rows fills up first
SAME = 7 / 8  # of answers: near a tie another kernel may draw another token
DIFFERENT = 3 / 4  # of the judge's own


@dataclasses.dataclass(frozen=True)
class Words:
    """The judge's own answer to a prompt, of at most `TOKENS` tokens."""

    text: str
    tokens: int
    reason: str


@dataclasses.dataclass
class Session:
    """One grading.

    Attributes:
        folder, checkpoint, plan: what was handed in.
        random: draws what is asked.
        words: prompt -> the judge's own answer.
        soak: seconds.
        logs: folder for what deployments print.
        ratios: what was measured, of `RATIOS`.
        rate: tokens a second of the service among `STREAMS`.
    """

    folder: Path
    checkpoint: Path
    plan: Plan
    random: Random
    words: Mapping[str, Words]
    soak: float
    logs: Path
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    rate: float = 0.0

    @contextlib.asynccontextmanager
    async def start(self, kind: str = "service", deadline: float = DEADLINE) -> AsyncIterator[Deployment]:
        """A deployment that is ready.

        Raises:
            Missed: it does not begin.
        """
        log = self.logs / f"{self.folder.name}-{kind}.log"
        async with running(self.plan.start[kind], self.folder, self.checkpoint, deadline, log) as (deployment, why):
            if why:
                raise Missed(f"`{kind}` does not start: {why}")
            yield deployment

    def body(self, prompt: str, **more: Any) -> dict[str, Any]:
        """A greedy request. Without a penalty so small a model says the same to all prompts."""
        fields = {"max_tokens": TOKENS, "temperature": 0, "frequency_penalty": PENALTY}
        return {"prompt": prompt, **fields, **more}

    def stream(self, prompt: str, **more: Any) -> dict[str, Any]:
        """A greedy request for a stream that counts its tokens."""
        return self.body(prompt, stream=True, stream_options={"include_usage": True}, **more)


Try = Callable[[Session, Deployment], Awaitable[str]]
CRITERIA = criterion = Criteria[Try]()


async def try_all(session: Session, criteria: Sequence[Criterion], tell: Tell) -> None:
    """Each criterion on one deployment, which is started again where it has ended."""
    left = list(criteria)
    while left:
        try:
            async with session.start() as deployment:
                await _all_work(session, deployment, 0, WARM_SECONDS)  # the first requests compile, and lay weights out
                while left and deployment.alive:
                    tell(await _try(session, deployment, left[0]))
                    del left[0]
        except (Missed, MinimegatronError) as error:
            for each in left:
                tell(Result(each, False, str(error)))
            return


async def _try(session: Session, deployment: Deployment, what: Criterion) -> Result:
    try:
        return Result(what, True, await CRITERIA.function(what)(session, deployment))
    except (*FAULTS, psutil.Error) as error:
        return missed(what, error)


async def _all_work(session: Session, deployment: Deployment, least: int, seconds: float) -> bool:
    """Ask until all replicas, `least` or more, have computed; False where they have not in time."""
    until, first = time.monotonic() + seconds, dict[int, float]()
    while True:
        first = {**deployment.cpu_seconds(), **first}
        await together(deployment, [session.stream(prompt) for prompt in session.words])
        now = deployment.cpu_seconds()
        if sum(spent > first.get(pid, spent) + WORKED for pid, spent in now.items()) >= max(least, len(now)):
            return True
        if time.monotonic() > until:
            return False


async def together(deployment: Deployment, bodies: Sequence[Mapping[str, Any]], **how: Any) -> list[Answer]:
    """All requests at once."""
    return await asyncio.gather(*(deployment.ask(body, **how) for body in bodies))


def check(answers: Sequence[Answer], words: Sequence[Words], what: str) -> None:
    """Answers are whole, and nearly all are the judge's own.

    Raises:
        Missed: which are not.
    """
    lost = [answer for answer in answers if not answer.served]
    require(
        not lost, f"{len(lost)} of {len(answers)} {what} were not answered; the first: {lost[0].error}" if lost else ""
    )
    cut = [a for a, w in zip(answers, words, strict=True) if len(a.text) < len(w.text) and w.text.startswith(a.text)]
    require(not cut, f"{len(cut)} of {len(answers)} {what} are cut off before their end, and say they are whole")
    same = sum(answer.text == own.text for answer, own in zip(answers, words, strict=True))
    shown = next((a.text for a, own in zip(answers, words, strict=True) if a.text != own.text), "")
    told = f"{same} of {len(answers)} {what} have the checkpoint's words; one that has not: {shown[:60]!r}"
    require(same >= SAME * len(answers), told)


# ------------------------------------------------------------------------------------------------------ answers


@criterion(10, "whole and streamed answers are equal, counted, and in 7 of 8 cases the checkpoint's greedy words")
async def words(session: Session, deployment: Deployment) -> str:
    """Eight prompts, one after the other."""
    prompts = list(session.words)[:8]
    whole, streamed = [], []
    for prompt in prompts:
        whole.append(await deployment.ask(session.body(prompt)))
        streamed.append(await deployment.ask(session.stream(prompt)))
    own = [session.words[prompt] for prompt in prompts]
    check(whole, own, "whole answers")
    check(streamed, own, "streamed answers")
    for kind, answers in (("whole", whole), ("streamed", streamed)):
        for answer, word in zip(answers, own, strict=True):
            if answer.text == word.text:
                told = f"a {kind} answer says finish_reason {answer.reason!r} and {answer.tokens} tokens, "
                told += f"where it has {word.reason!r} and {word.tokens}"
                require((answer.reason, answer.tokens) == (word.reason, word.tokens), told)
    different = sum(a.text != b.text for a, b in zip(whole, streamed, strict=True))
    require(different == 0, f"{different} of 8 streams say something else than the same request as a whole")
    return "16 answers"


@criterion(10, "an answer ends before the first text of `stop`, whole and streamed, with finish_reason `stop`")
async def stop(session: Session, deployment: Deployment) -> str:
    """Texts that are in the middle of known answers."""
    for prompt in list(session.words)[8:12]:
        known = (await deployment.ask(session.body(prompt))).text
        at = session.random.randrange(len(known) // 4, max(len(known) // 2, len(known) // 4 + 1))
        wanted = known[at : at + session.random.randint(2, 4)]
        require(bool(wanted), "an answer without text")
        expected = known[: known.index(wanted)]
        for kind, body in (("whole", session.body(prompt)), ("streamed", session.stream(prompt))):
            answer = await deployment.ask({**body, "stop": ["\0\0", wanted]})
            require(answer.served, f"a request with `stop` was not answered: {answer.error}")
            told = f"a {kind} answer with stop={wanted!r} ends with {answer.text[-20:]!r}, where it ends with "
            require(answer.text == expected, told + repr(expected[-20:]))
            require(answer.reason == "stop", f"finish_reason of a {kind} answer is {answer.reason!r}, not 'stop'")
    return "8 answers ended where they were asked to"


@criterion(5, "what cannot be answered is refused with 4xx and `error.message`, and the next request is served")
async def refusals(session: Session, deployment: Deployment) -> str:
    """Requests that are wrong."""
    long = " ".join(session.random.choice(WORDS) for _ in range(4 * LONGEST))
    wrong: dict[str, Mapping[str, Any] | bytes] = {
        "a prompt that is too long": session.body(long),
        "more tokens than the context has": session.body("a", max_tokens=10**6),
        "another model": session.body("a", model=f"no-{session.random.random()}"),
        "a temperature of -1": session.body("a", temperature=-1),
        "no JSON": b'{"prompt": "a"',
    }
    for what, body in wrong.items():
        answer = await deployment.ask(body)
        require(400 <= answer.status < 500, f"{what}: {answer.status or answer.error}, where 4xx is right")
        error = answer.body.get("error") if isinstance(answer.body, dict) else None
        told = f"{what}: the refusal has no error.message"
        require(isinstance(error, dict) and bool(error.get("message")), told)
    answer = await deployment.ask(session.body("a"))
    require(answer.served, f"after that a request was not served: {answer.error}")
    return "5 refused"


# ---------------------------------------------------------------------------------------------------- many at once


@criterion(15, f"{STREAMS} streams at once are all whole and end with [DONE]; 7 of 8 have the checkpoint's words")
async def streams_64(session: Session, deployment: Deployment) -> str:
    """All prompts together."""
    answers = await together(deployment, [session.stream(prompt) for prompt in session.words])
    check(answers, list(session.words.values()), "streams")
    short = [a for a in answers if a.reason == "length" and a.tokens != TOKENS]
    require(not short, f"{len(short)} streams say `length` before {TOKENS} tokens")
    return f"{len(answers)} streams, {sum(a.tokens for a in answers)} tokens"


async def _measure(session: Session, deployment: Deployment, rounds: int = 3) -> tuple[float, float]:
    """(p95 of a request's seconds, tokens a second) of `STREAMS` at once: the best of some rounds."""
    slow, rate = [], []
    for _ in range(rounds):
        began = time.monotonic()
        answers = await together(deployment, [session.stream(prompt) for prompt in session.words])
        taken = time.monotonic() - began
        lost = [answer for answer in answers if not answer.served]
        require(
            not lost,
            f"{len(lost)} of {len(answers)} streams were not answered" + (f": {lost[0].error}" if lost else ""),
        )
        slow.append(float(np.percentile([answer.seconds for answer in answers], 95)))
        rate.append(sum(answer.tokens for answer in answers) / taken)
    return min(slow), max(rate)


@criterion(
    10,
    f"p95 of a request among {STREAMS} is at most `promise.latency` times one that is alone; a promise is at most "
    f"{MOST_LATENCY:g}",
)
async def latency(session: Session, deployment: Deployment) -> str:
    """Alone, then with all others."""
    promised = session.plan.promised
    require(promised <= MOST_LATENCY, f"{promised:g} times are promised: more than {MOST_LATENCY:g}")
    alone = [(await deployment.ask(session.stream(prompt))).seconds for prompt in list(session.words)[:7]]
    slow, session.rate = await _measure(session, deployment)
    session.ratios["latency"] = ratio = slow / statistics.median(alone)
    told = f"p95 is {ratio:.1f} times one alone"
    require(ratio <= promised, f"{told}, and {promised:g} times were promised")
    return f"{told}, {promised:g} promised"


@criterion(
    10,
    f"of {FLOOD} requests at once some get 429 with Retry-After and all others, {STREAMS} or more, their answer; then "
    "the next is served",
)
async def queue(session: Session, deployment: Deployment) -> str:
    """More than it should hold."""
    prompts = [f"{session.random.choice(WORDS)} {session.random.choice(WORDS)} {i}" for i in range(FLOOD)]
    answers = await together(deployment, [session.body(prompt, max_tokens=2 * TOKENS) for prompt in prompts])
    full = [answer for answer in answers if answer.status == 429]
    lost = [answer for answer in answers if answer.status != 429 and not answer.served]
    require(not lost, f"{len(lost)} of {FLOOD} were neither answered nor refused: {lost[0].error}" if lost else "")
    require(bool(full), f"all {FLOOD} were accepted: nothing limits the queue")
    require(len(full) <= FLOOD - STREAMS, f"{len(full)} of {FLOOD} were refused: fewer than {STREAMS} have room")
    silent = sum(not answer.headers.get("retry-after", "").isdigit() for answer in full)
    require(not silent, f"{silent} of {len(full)} answers 429 have no Retry-After in seconds")
    answer = await deployment.ask(session.body("a"))
    require(answer.served, f"after the flood a request was not served: {answer.error}")
    return f"{len(full)} of {FLOOD} were told to come again"


@criterion(
    5,
    f"with a {{deadline}} of {SHORT_DEADLINE:g} s long answers are over within {GRACE:g} s more, and those that are "
    "cut say so",
)
async def deadline(session: Session, _: Deployment) -> str:
    """Another start of the service, with less time than an answer takes."""
    async with session.start(deadline=SHORT_DEADLINE) as short:
        tokens = LONGEST - 32
        bodies = [session.stream(prompt.split()[0], max_tokens=tokens) for prompt in list(session.words)[:32]]
        answers = await together(short, bodies, seconds=SHORT_DEADLINE + GRACE)
    late = [answer for answer in answers if answer.error.startswith("not over")]
    require(not late, f"{len(late)} of {len(answers)} requests were not over {GRACE:g} s after their deadline")
    told = [a for a in answers if a.status in (408, 503, 504) or (a.status == 200 and a.error and not a.over)]
    cut = [a for a in answers if a.served and a.reason == "length" and a.tokens < tokens]
    require(not cut, f"{len(cut)} of {len(answers)} answers were cut, and say that they are whole")
    strange = [a for a in answers if 400 <= a.status < 500 and a.status not in (408, 429)]
    require(not strange, f"a request of {tokens} tokens was refused: {strange[0].body}" if strange else "")
    require(bool(told), f"not one of {len(answers)} requests met its deadline: it is not kept")
    return f"{len(told)} of {len(answers)} were told"


@criterion(
    15,
    f"a replica gets SIGKILL: whole answers under way all come, streams end with [DONE] or an error, "
    f"{BACK_SECONDS:g} s later as many replicas work",
)
async def killed_replica(session: Session, deployment: Deployment) -> str:
    """SIGKILL, with 32 whole answers and 32 streams under way."""
    count = len(replicas := deployment.replicas())
    require(count >= 2, f"{count} processes serve other ports: fewer than 2 replicas")
    victim = session.random.choice(replicas)
    half = len(session.words) // 2
    bodies = [(session.stream if i < half else session.body)(prompt) for i, prompt in enumerate(session.words)]
    answers = [Answer() for _ in bodies]
    asked = [deployment.ask(body, answer=answer) for body, answer in zip(bodies, answers, strict=True)]
    sent = asyncio.gather(*asked)
    while sum(answer.begun for answer in answers) < 3 * half / 4 and not sent.done():
        await asyncio.sleep(0.002)
    victim.kill()
    await sent  # no deadline: each request has one
    check(answers[half:], list(session.words.values())[half:], "whole answers while a replica was killed")
    cut = [a for a in answers[:half] if not a.served]
    silent = [a for a in cut if not (a.status == 200 and a.error.startswith("{"))]
    told = f"{len(silent)} of {half} streams ended without [DONE] and without an error event"
    require(not silent, f"{told}: {silent[0].error}" if silent else "")
    began = time.monotonic()
    back = await _all_work(session, deployment, count, BACK_SECONDS)
    require(back, f"{BACK_SECONDS:g} s later fewer than {count} replicas work")
    took = f"{count} replicas worked again after {time.monotonic() - began:.0f} s"
    return f"{len(answers) - half} whole answers came, {len(cut)} of {half} streams were told; {took}"


@criterion(
    5,
    f"{EMPTY_SECONDS:g} s after a soak ({SOAK_SECONDS:g} s, --soak 600) with clients that vanish no page is in use, "
    "and memory has grown by at most a quarter and 64 MiB since half of it",
)
async def soak(session: Session, deployment: Deployment) -> str:
    """64 clients that ask, one after the other; every eighth leaves in the middle."""
    began, numbers = time.monotonic(), itertools.count()
    until, early = began + session.soak, began + session.soak / 2
    prompts, failed, memory = list(session.words), list[Answer](), list[int]()

    async def client() -> None:
        while time.monotonic() < until:
            number, prompt = next(numbers), session.random.choice(prompts)
            body = session.stream(prompt) if number % 4 else session.body(prompt)
            leaves = number % 8 == 5
            answer = await deployment.ask(body, leave_after=session.random.randint(1, 9) if leaves else 0)
            if not answer.served and not leaves:
                failed.append(answer)
            if not memory and time.monotonic() > early:
                memory.append(deployment.memory())

    await asyncio.gather(*(client() for _ in range(STREAMS)))
    count = next(numbers)
    require(not failed, f"{len(failed)} of {count} failed; the first: {failed[0].error}" if failed else "")
    left: dict[str, float | None] = {}
    empty = time.monotonic() + EMPTY_SECONDS
    while True:
        left = {what: await deployment.metrics(name) for what, name in session.plan.metrics.items()}
        if not any(left.values()) or time.monotonic() > empty:
            break
        await asyncio.sleep(0.5)
    absent = [session.plan.metrics[what] for what, value in left.items() if value is None]
    require(not absent, f"GET /metrics has no {', '.join(absent)}: name your server's in [metrics]")
    told = ", ".join(f"{session.plan.metrics[what]} is {value:g}" for what, value in left.items() if value)
    require(not told, f"{EMPTY_SECONDS:g} s after the last request {told}")
    grown = deployment.memory() / memory[0] if memory else 1.0
    most = GROWTH + (SLACK / memory[0] if memory else 0)
    require(grown <= most, f"memory has grown to {grown:.2f} of what it was at half time")
    return f"{count} requests in {time.monotonic() - began:.0f} s; memory {grown:.2f} of what it was, all pages free"


# ------------------------------------------------------------------------------------------------------ ablations


@criterion(5, f"tokens a second among {STREAMS} are at least {LEAST_BATCHING:g} times those of `no_batching`")
async def batching(session: Session, deployment: Deployment) -> str:
    """The same load on a deployment that answers one after the other."""
    if not session.rate:
        _, session.rate = await _measure(session, deployment)
    async with session.start("no_batching") as plain:
        _, rate = await _measure(session, plain, rounds=1)
    session.ratios["batching"] = ratio = session.rate / rate
    told = f"{session.rate:.0f} tokens a second are {ratio:.1f} times the {rate:.0f} of no_batching"
    require(ratio >= LEAST_BATCHING, told)
    return told


@criterion(5, "each of n replicas does at least 1/2n of the work, also where all prompts begin alike")
async def balance(session: Session, deployment: Deployment) -> str:
    """CPU seconds of each, for a load of different prompts and for one with a beginning in common."""
    shared = " ".join(session.random.choice(WORDS) for _ in range(40))
    told = []
    for what, beginning in (("different prompts", ""), ("prompts that begin alike", shared)):
        before = deployment.cpu_seconds()
        require(len(before) >= 2, f"{len(before)} processes serve other ports: fewer than 2 replicas")
        for i in range(10):
            bodies = [session.stream(f"{beginning} {prompt} {i}") for prompt in session.words]
            await together(deployment, bodies)
            spent = {pid: seconds - before.get(pid, 0.0) for pid, seconds in deployment.cpu_seconds().items()}
            if sum(spent.values()) > COMPARED:
                break
        least = min(spent.values()) / sum(spent.values()) if sum(spent.values()) else 0.0
        shares = " : ".join(f"{seconds:.2f}" for seconds in spent.values())
        require(least >= 0.5 / len(spent), f"with {what} the replicas computed {shares} seconds")
        told.append(f"{what} {shares} s")
    async with session.start("one_replica") as one:
        await together(one, [session.stream(prompt) for prompt in session.words])
        _, alone = await _measure(session, one, rounds=2)
    if not session.rate:
        _, session.rate = await _measure(session, deployment)
    session.ratios["replicas"] = session.rate / alone
    return f"{'; '.join(told)}; {session.ratios['replicas']:.2f} times the tokens a second of one replica"


@criterion(
    5,
    "`predicted` and `measured` have latency, batching and replicas; what you measured is within a factor of 2; `why` "
    "says in 100 characters or more where a prediction went wrong",
)
async def report(session: Session, _: Deployment) -> str:
    """The learner's numbers beside the judge's."""
    for table, numbers in (("predicted", session.plan.predicted), ("measured", session.plan.measured)):
        absent = [name for name in RATIOS if name not in numbers]
        require(not absent, f"[{table}] has no {', '.join(absent)}")
    require(len(session.plan.why) >= 100, f"[report] why has {len(session.plan.why)} characters")
    far = []
    for name in RATIOS:
        if name in session.ratios:
            seen, said = session.ratios[name], session.plan.measured[name]
            if not 0.5 <= said / seen <= 2:
                far.append(f"{name} was measured as {said:g} by you and as {seen:.2g} here")
    require(not far, "; ".join(far))
    return ", ".join(f"{name} {session.plan.measured[name]:g} : {seen:.2g}" for name, seen in session.ratios.items())


# -------------------------------------------------------------------------------------------- the judge's own words


def drawn_prompts(random: Random) -> list[str]:
    """As many different prompts as there are streams, of 2 to 24 words."""
    prompts = dict[str, None]()
    while len(prompts) < STREAMS:
        prompts[" ".join(random.choice(WORDS) for _ in range(random.randint(2, 24)))] = None
    return list(prompts)


def own_words(checkpoint: Path, prompts: Sequence[str], scratch: Path) -> dict[str, Words]:
    """Greedy answers of `minimegatron generate`, in a process of their own.

    Raises:
        DataError: it fails.
    """
    asked = scratch / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    line = [sys.executable, "-m", "minimegatron", "generate", str(checkpoint), "--prompts-file", str(asked)]
    line += ["--max-new-tokens", str(TOKENS), "--frequency-penalty", str(PENALTY)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise DataError(
            f"the judge cannot generate: {done.stderr[-300:]}", where=str(checkpoint), fix="another --checkpoint"
        )
    answers = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    if (different := len({answer["text"] for answer in answers})) < DIFFERENT * len(prompts):
        raise DataError(
            f"{len(prompts)} prompts have {different} different answers, so an answer to another one would not be seen",
            where=str(checkpoint),
            fix="a model that was trained longer",
        )
    return {a["prompt"]: Words(a["text"], len(a["tokens"]), a["finish_reason"]) for a in answers}
