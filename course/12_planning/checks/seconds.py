"""Lab 12, the time of a step from FLOPs, rates and waits; and the two shares of the peak that are confused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake


def step_time(
    matrices: float, square: float, batch: int, gpus: int, peak: float, reached: float, p: int, v: int, m: int,
    full: bool, waits: float, gradients: float, **mistake: Any,
) -> dict[str, float]:  # fmt: skip
    """The seconds of a step and its terms; keywords of `mistake` make mistakes."""
    sample = matrices + square * mistake.get("half", 0.5)
    model = mistake.get("three", 3) * batch * sample
    forward = batch * sample / (gpus * (1 if mistake.get("whole_batch") else m) * peak * reached)
    forward *= (gpus if mistake.get("one_gpu") else 1) * (reached if mistake.get("at_peak") else 1)
    backward = (mistake.get("back", mistake.get("three", 3) - 1) + full * mistake.get("again", 1)) * forward
    one = forward + backward + mistake.get("times_waited", 1) * waits
    bubble = mistake["bubble"](p, v, m) if "bubble" in mistake else (p - 1) / (v * m)
    passes = m * one * (1 + bubble)
    if mistake.get("bubble_of_work"):
        passes = m * ((forward + backward) * (1 + bubble) + waits)
    hidden = mistake["hidden"](forward, backward, m, v) if "hidden" in mistake else backward
    seconds = passes + max(0.0, gradients - hidden)
    if mistake.get("signed"):
        seconds = passes + gradients - hidden
    done = model / (seconds * gpus * peak)
    more = 4 / 3 if full else 1.0
    shares = {"mfu": done, "hfu": done * more}
    if mistake.get("counts_recompute"):
        shares["mfu"] = done * more
    if mistake.get("of_reached"):
        shares = {name: share / reached for name, share in shares.items()}
    if mistake.get("hfu_is_mfu"):
        shares["hfu"] = done
    if mistake.get("other_way"):
        shares = {"mfu": done / more, "hfu": done}
    return {"seconds": seconds, **shares}


_TINY = {"matrices": 900.0, "square": 200.0, "batch": 8, "gpus": 4, "peak": 1000.0, "reached": 0.5, "p": 1, "v": 1,
         "m": 2, "full": False, "waits": 0.0, "gradients": 0.0}  # fmt: skip
_PIPE = {**_TINY, "p": 3, "m": 4, "batch": 12, "gpus": 6, "full": True}
_WAITS = {**_TINY, "waits": 0.75, "gradients": 7.0}


def _some(draw: Draw) -> dict[str, Any]:
    p = draw.choice([1, 2, 4, 8])
    v = draw.choice([1, 2, 5]) if p > 1 else 1
    m = p * draw.integer(1, 8) if v > 1 else draw.integer(1, 20)
    gpus = p * draw.choice([3, 8, 24])
    matrices, peak = float(draw.integer(100, 900)) * 1e12, 1e12 * draw.choice([312, 989, 2250])
    forward = matrices * m * 3 / (gpus * m * peak * 0.6)
    return {"matrices": matrices, "square": matrices * draw.choice([0.1, 0.7, 3.0]), "batch": 3 * m, "gpus": gpus,
            "peak": peak, "reached": draw.choice([0.5, 0.65, 0.8]), "p": p, "v": v, "m": m,
            "full": draw.choice([True, False]), "waits": forward * draw.choice([0.0, 0.3, 1.0]),
            "gradients": forward * draw.choice([0.0, 1.0, 4.0, 30.0])}  # fmt: skip


_FIXED = [
    {**_TINY, "p": 4, "v": v, "m": 8, "full": full, "waits": 0.25, "gradients": gradients, "gpus": 8}
    for v in (1, 3) for full in (True, False) for gradients in (0.0, 0.3, 50.0)
] + [
    {**_TINY, "square": 33.0},
    *({**_TINY, "p": p, "m": m, "batch": 2 * m, "gpus": 16, "full": full}  # fewer microbatches than ranks, and as many
      for p, m in ((8, 3), (8, 1), (4, 4), (2, 1)) for full in (True, False)),
    {**_TINY, "p": 4, "v": 3, "m": 4, "gpus": 12, "waits": 0.5, "gradients": 9.0},
]  # fmt: skip


def _with(**mistake: Any) -> Callable[..., dict[str, float]]:
    return lambda **inputs: step_time(**inputs, **mistake)


def _whole_in_time(**inputs: Any) -> dict[str, float]:
    found, longer = step_time(**inputs), step_time(**inputs, half=1.0)["seconds"]
    share = found["seconds"] / longer
    return {"seconds": longer, "mfu": found["mfu"] * share, "hfu": found["hfu"] * share}


STEP = Exercise(
    "step_time",
    reference=step_time,
    cases=[
        Case("the example: 4 GPUs, 2 microbatches, nothing else", _TINY),
        Case("3 stages, 4 microbatches, full recompute", _PIPE),
        Case("0.75 seconds of waiting in each microbatch, gradients of 7 seconds", _WAITS),
        Case("other runs, some with fewer microbatches than ranks", _some, points=3, hidden=True, fixed=_FIXED),
    ],
    mistakes=[
        Mistake(_with(half=1.0), "That is the whole square of attention. Megatron's convention counts the half that a "
                "causal mask shows."),
        Mistake(_whole_in_time, "The time, too, follows from model FLOPs: attention's half square."),
        Mistake(_with(half=0.0), "Attention's scores and values are missing."),
        Mistake(_with(three=2), "A backward pass has twice the products of the forward pass."),
        Mistake(_with(three=1), "The backward pass is missing."),
        Mistake(_with(counts_recompute=True), "What is computed a second time counts in the HFU, not in the MFU."),
        Mistake(_with(other_way=True), "The MFU does not lose by recompute but by the time that it takes: model FLOPs "
                "stay the same."),
        Mistake(_with(hfu_is_mfu=True), "With full recompute the GPU computes a forward pass more than the model "
                "needs: the HFU counts it."),
        Mistake(_with(of_reached=True), "Both are shares of the peak, not of what large products reach."),
        Mistake(_with(again=0), "Full recompute runs the forward pass a second time."),
        Mistake(_with(back=1), "A backward pass has twice the products of the forward pass: it takes twice as long."),
        Mistake(_with(bubble=lambda p, v, m: min(1.0, (p - 1) / (v * m))), "With fewer microbatches than ranks the "
                "bubble is more than the work, p - 1 passes: nothing limits it."),
        Mistake(_with(bubble=lambda p, v, m: (p - 1) / (v * m) if m >= p else 0.0), "A pipeline with fewer "
                "microbatches than ranks has a bubble, too, and the longest one."),
        Mistake(_with(bubble=lambda p, v, m: (p - 1) / (v * m) if m > p else 0.0), "A pipeline with as many "
                "microbatches as ranks, or fewer, has a bubble, too."),
        Mistake(_with(bubble=lambda p, v, m: 0.0), "The bubble is missing."),
        Mistake(_with(bubble=lambda p, v, m: (p - 1) / m), "With v chunks the bubble is smaller."),
        Mistake(_with(bubble=lambda p, v, m: (p - 1) / (v * m + p - 1)), "That is the share of the whole time. As a "
                "share of the work the bubble is larger."),
        Mistake(_with(bubble=lambda p, v, m: p / (v * m)), "A pipeline of one rank has no bubble."),
        Mistake(_with(bubble_of_work=True), "While a rank waits for messages in a microbatch, the ranks behind it "
                "wait, too: the bubble is a share of all of a microbatch's time."),
        Mistake(_with(times_waited=0), "A microbatch takes `waits` seconds longer."),
        Mistake(_with(times_waited=2), "`waits` are the seconds of both passes together."),
        Mistake(_with(one_gpu=True), "The FLOPs of a microbatch are shared by all GPUs."),
        Mistake(_with(at_peak=True), "Products reach a share of the peak, `reached`; at the peak itself they would "
                "be faster."),
        Mistake(_with(whole_batch=True), "That is the time of all microbatches; a rank computes one of m at a time."),
        Mistake(_with(hidden=lambda f, b, m, v: 0.0), "Gradients travel while the last backward pass still "
                "computes: only what takes longer is waited for."),
        Mistake(_with(hidden=lambda f, b, m, v: m * b), "Gradients are complete in the last backward "
                "pass; only that one can hide them."),
        Mistake(_with(hidden=lambda f, b, m, v: 2 * f), "With full recompute the backward pass is "
                "longer, and hides more."),
        Mistake(_with(hidden=lambda f, b, m, v: b / v), "The backward pass of a microbatch is that "
                "of all its v chunks on the rank."),
        Mistake(_with(hidden=lambda f, b, m, v: f + b), "Gradients hide behind the backward "
                "pass alone."),
        Mistake(_with(hidden=lambda f, b, m, v: b / m), "`m` is in the backward pass already: it is that of one "
                "microbatch."),
        Mistake(_with(hidden=lambda f, b, m, v: float("inf")), "Messages of gradients that take longer than the last "
                "backward "
                "pass are waited for."),
        Mistake(_with(signed=True), "Gradients that are fast do not make a step shorter."),
    ],
    idea="Begin with the forward pass of one microbatch on one rank; every other time is a multiple of it or is added.",
    hint="sample = matrices + square / 2; forward = batch sample / (gpus m peak reached); backward = 2 forward, 3 with "
    "full; seconds = m (forward + backward + waits) (1 + (p - 1)/(v m)) + max(0, gradients - backward); mfu = 3 batch "
    "sample / (seconds gpus peak); hfu is 4/3 of it with full.",
)  # fmt: skip
