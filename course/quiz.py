"""Questions with numbers, for `minimegatron quiz`: each is asked with other numbers every time, and computed here.

A question is a function that draws its numbers and returns `Asked`. `can` is the line of the check-list that it
belongs to ("You can ..."); several questions may share a line. The questions that end the labs are taken from the labs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

LEVELS = ("basic", "intermediate", "advanced")
# Lab -> level of the questions at its end.
LABS = {
    "01": "basic", "02": "basic", "09": "basic", "03": "intermediate", "04": "intermediate", "06": "intermediate",
    "08": "intermediate", "05": "advanced", "07": "advanced", "10": "advanced", "11": "advanced", "12": "advanced",
    "13": "advanced",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A question with its numbers.

    Attributes:
        text: the question; it says in which unit the answer is wanted.
        answer: a whole number where things are counted, and then the answer must be that; else 2 % off will do.
        how: how one computes it, with these numbers.
    """

    text: str
    answer: float
    how: str


@dataclass(frozen=True)
class Numeric:
    """A question for which numbers are drawn."""

    name: str
    level: str
    can: str
    ask: Callable[[Random], Asked]


QUESTIONS: dict[str, Numeric] = {}


def question(level: str, can: str) -> Callable[[Callable[[Random], Asked]], Callable[[Random], Asked]]:
    """Put a function among the questions."""
    assert level in LEVELS, f"{level} is none of {LEVELS}"

    def keep(ask: Callable[[Random], Asked]) -> Callable[[Random], Asked]:
        QUESTIONS[ask.__name__] = Numeric(ask.__name__, level, can, ask)
        return ask

    return keep


def _powers(draw: Random, *highest: int) -> Iterator[int]:
    """For each: a power of two from 2 to it."""
    for high in highest:
        yield 2 ** draw.randint(1, high.bit_length() - 1)


# ------------------------------------------------------------------------------------------------------------- basic
GROUPS = "say which ranks form each group of a layout"
MESSAGES = "say how many bytes a collective sends, and how long it takes"
SIZES = "count the parameters of a transformer, and the bytes of its state"
LOG = "read the log of a training"


@question("basic", GROUPS)
def replicas(draw: Random) -> Asked:
    tp, cp, pp, dp = _powers(draw, 8, 4, 8, 16)
    ep = 2 ** draw.randint(1, (dp * cp).bit_length() - 1)
    world = tp * cp * pp * dp
    text = f"A run on {world} GPUs has tp {tp}, cp {cp}, pp {pp}, ep {ep}. How large is dp?"
    return Asked(text, dp, f"{world} / ({tp} · {cp} · {pp}): experts take ranks of dp, and need none of their own")


@question("basic", GROUPS)
def stage_of_a_rank(draw: Random) -> Asked:
    tp, cp, dp, pp = _powers(draw, 8, 2, 8, 8)
    rank = draw.randrange(tp * cp * dp * pp)
    inside = tp * cp * dp
    text = f"tp {tp}, cp {cp}, dp {dp}, pp {pp}, in this order, the fastest first. Which stage does rank {rank} run?"
    return Asked(
        text, rank // inside, f"a stage has {tp} · {cp} · {dp} = {inside} neighbouring ranks; {rank} // {inside}"
    )


@question("basic", GROUPS)
def next_in_the_group(draw: Random) -> Asked:
    tp, cp, dp, pp = _powers(draw, 8, 2, 8, 4)
    inside = tp * cp
    rank = draw.randrange(inside)
    text = (
        f"tp {tp}, cp {cp}, dp {dp}, pp {pp}, in this order, the fastest first. Which is the second rank in the dp "
        f"group of rank {rank}?"
    )
    return Asked(text, rank + inside, f"neighbours in dp are tp · cp = {inside} ranks apart")


@question("basic", GROUPS)
def same_experts(draw: Random) -> Asked:
    ep, pp, edp = _powers(draw, 16, 8, 8)
    world = ep * pp * edp
    text = f"{world} GPUs, pp {pp}, ep {ep}, etp 1. How many ranks hold the same experts?"
    return Asked(text, edp, f"edp = {world} / (etp · ep · pp) = {world} / (1 · {ep} · {pp})")


@question("basic", MESSAGES)
def ring_bytes(draw: Random) -> Asked:
    (ranks,) = _powers(draw, 64)
    megabytes = draw.choice((64, 96, 320, 640, 1280))
    text = f"{ranks} ranks sum gradients of {megabytes} MB by a ring all-reduce. How many MB does each rank send?"
    how = f"2 n (N - 1) / N = 2 · {megabytes} · {ranks - 1} / {ranks}: a reduce-scatter, then an all-gather"
    return Asked(text, 2 * megabytes * (ranks - 1) / ranks, how)


@question("basic", MESSAGES)
def ring_seconds(draw: Random) -> Asked:
    (ranks,) = _powers(draw, 64)
    kilobytes, latency, rate = draw.choice((64, 256, 1024)), draw.choice((5, 10, 20)), draw.choice((25, 50, 100))
    text = (
        f"A ring of {ranks} ranks sums {kilobytes} kB. A step of the ring costs {latency} µs of latency, and a link "
        f"carries {rate} GB/s. How many µs does it take?"
    )
    steps, moving = 2 * (ranks - 1), 2 * kilobytes * (ranks - 1) / ranks / rate
    return Asked(
        text, steps * latency + moving, f"2 (N - 1) = {steps} steps of {latency} µs, and {moving:.4g} µs for the bytes"
    )


@question("basic", MESSAGES)
def gathered(draw: Random) -> Asked:
    (ranks,) = _powers(draw, 64)
    megabytes = draw.choice((3, 5, 12))
    text = f"Each of {ranks} ranks holds a shard of {megabytes} MB. How many MB does a rank receive in an all-gather?"
    return Asked(text, megabytes * (ranks - 1), f"the shards of the {ranks - 1} others")


@question("basic", MESSAGES)
def tensor_parallel_messages(draw: Random) -> Asked:
    layers = draw.choice((12, 24, 32, 80))
    text = (
        f"A model of {layers} layers runs with tensor parallelism, without sequence parallelism or recomputation. How "
        "many all-reduces does a microbatch cause in its layers, forward and backward?"
    )
    return Asked(
        text,
        4 * layers,
        "attention and MLP have one each forward (after the row-parallel product) and one each backward",
    )


@question("basic", SIZES)
def parameters(draw: Random) -> Asked:
    layers, heads = draw.choice((16, 24, 32)), draw.choice((16, 32))
    groups, words = draw.choice((4, 8)), draw.choice((32_000, 128_256))
    h = 128 * heads
    ffn = draw.choice((5632, 11_008, 14_336))
    text = (
        f"A Llama has {layers} layers, hidden size {h}, {heads} heads of 128, {groups} groups of keys and values, an "
        f"MLP (SwiGLU) of {ffn}, {words:,} words, and a head of its own. How many billions of parameters has it?"
    )
    a_layer = 2 * h * h + 2 * h * groups * 128 + 3 * h * ffn
    total = layers * a_layer + 2 * words * h
    how = (
        f"a layer: q and o 2 h², k and v 2 · h · {groups} · 128, MLP 3 · h · {ffn}: {a_layer / 1e6:.4g} M; embedding "
        f"and head 2 · {words:,} · h = {2 * words * h / 1e6:.0f} M; norms are lost in the rounding"
    )
    return Asked(text, total / 1e9, how)


@question("basic", SIZES)
def state(draw: Random) -> Asked:
    billions = draw.choice((1.3, 7, 8, 13, 70))
    text = (
        "bf16 weights, fp32 gradients, Adam with fp32 main parameters: how many GB of state has a model of "
        f"{billions} billion parameters, without any sharding?"
    )
    return Asked(
        text, 18 * billions, "2 + 4 + 4 + 4 + 4 = 18 bytes a parameter: weight, gradient, main parameter, two moments"
    )


@question("basic", SIZES)
def shard_of_a_column(draw: Random) -> Asked:
    (tp,) = _powers(draw, 8)
    h, ffn = draw.choice((1024, 2048, 4096)), draw.choice((8192, 14_336, 28_672))
    text = (
        f"A column-parallel layer takes {h} numbers to {ffn}, on tp {tp}. How many weights does a rank hold (no bias)?"
    )
    return Asked(text, h * ffn // tp, f"the output is cut: {ffn} / {tp} rows of {h} numbers")


@question("basic", LOG)
def tokens_of_a_step(draw: Random) -> Asked:
    dp, m, b = *_powers(draw, 16, 16), draw.choice((1, 2, 4))
    s = draw.choice((2048, 4096, 8192))
    text = (
        f"Sequences of {s} tokens, micro batch {b}, dp {dp}, {m} microbatches a step, cp 1. How many tokens has a step?"
    )
    return Asked(text, s * b * dp * m, f"{s} · {b} · {dp} · {m}; tp and pp ranks read the same samples")


@question("basic", LOG)
def microbatches(draw: Random) -> Asked:
    dp, m, b = *_powers(draw, 16, 32), draw.choice((1, 2, 4))
    text = f"Global batch {b * dp * m}, micro batch {b}, dp {dp}. How many microbatches has a step?"
    return Asked(text, m, f"{b * dp * m} / ({b} · {dp})")


@question("basic", LOG)
def epochs(draw: Random) -> Asked:
    steps, batch, s = draw.choice((500, 2000, 5000)), draw.choice((64, 256)), draw.choice((1024, 2048))
    millions = draw.choice((40, 250, 900))
    text = f"{steps} steps of {batch} samples of {s} tokens; the data has {millions} million tokens. How many epochs?"
    return Asked(text, steps * batch * s / (millions * 1e6), f"{steps} · {batch} · {s} / {millions}·10⁶")


@question("basic", LOG)
def first_loss(draw: Random) -> Asked:
    words = draw.choice((1024, 4096, 32_000, 50_257, 128_256))
    text = f"{words:,} words; the weights are fresh and small. Near which loss does a training begin?"
    return Asked(text, math.log(words), f"all words are equally likely: ln {words:,}")


@question("basic", LOG)
def bits_per_byte(draw: Random) -> Asked:
    loss, length = draw.choice((2.1, 2.6, 3.2)), draw.choice((3.2, 3.9, 4.4))
    text = (
        f"The loss is {loss} a token (natural logarithm), and a token has {length} bytes on average. How many bits "
        "per byte?"
    )
    return Asked(text, loss / math.log(2) / length, f"{loss} / ln 2 bits a token, over {length} bytes")


@question("basic", LOG)
def model_flops_utilization(draw: Random) -> Asked:
    billions, gpus = draw.choice((7, 13, 70)), draw.choice((64, 256, 1024))
    share = draw.uniform(0.25, 0.55)
    rate = round(share * gpus * 989e12 / (6 * billions * 1e9), -3)
    text = (
        f"A dense model of {billions} billion parameters trains at {rate:,.0f} tokens a second on {gpus} H100 (peak "
        "989 TFLOP/s in bf16). How many percent is the MFU? (Leave out attention's square.)"
    )
    return Asked(
        text,
        100 * 6 * billions * 1e9 * rate / (gpus * 989e12),
        f"6 · P · tokens/s over {gpus} · 989·10¹²; forward 2 P, backward 4 P",
    )


# ------------------------------------------------------------------------------------------------------ intermediate
BUBBLES = "predict the bubble and the memory of a pipeline"
SHARDING = "say what ZeRO saves, and what it sends"
ACTIVATIONS = "say what is kept for the backward pass, and what recomputation costs"
CONTEXT = "say who holds which tokens, and what context parallelism sends"
RESUME = "plan checkpoints and data so that a run can go on"
STEPS = "follow an optimizer's step by hand"


@question("intermediate", BUBBLES)
def bubble(draw: Random) -> Asked:
    p, v, m = *_powers(draw, 16, 4), draw.choice((16, 32, 64))
    text = (
        f"1F1B, interleaved: {p} ranks, {v} chunks each, {m} microbatches. Its bubble is how many percent of the work?"
    )
    return Asked(text, 100 * (p - 1) / (v * m), f"(p - 1) / (v m) = {p - 1} / ({v} · {m})")


@question("intermediate", BUBBLES)
def microbatches_for_a_bubble(draw: Random) -> Asked:
    p, v, percent = *_powers(draw, 16, 4), draw.choice((3, 5, 8))
    text = (
        f"{p} ranks, {v} chunks each. With how many microbatches at least is the bubble at most {percent} % of the "
        "work?"
    )
    return Asked(text, -(-100 * (p - 1) // (v * percent)), f"(p - 1) / (v m) ≤ {percent} / 100, rounded up")


@question("intermediate", BUBBLES)
def microbatches_in_flight(draw: Random) -> Asked:
    p, m = *_powers(draw, 16), draw.randint(3, 40)
    rank = draw.randrange(p)
    text = (
        f"1F1B, {p} stages, {m} microbatches. Of how many microbatches does stage {rank} (from 0) hold activations at "
        "most?"
    )
    return Asked(text, min(m, p - rank), f"min(m, p - r) = min({m}, {p - rank}); GPipe holds all {m}")


@question("intermediate", SHARDING)
def zero_bytes(draw: Random) -> Asked:
    stage, billions = draw.choice((1, 2, 3)), draw.choice((7, 13, 70))
    (dp,) = _powers(draw, 64)
    text = (
        f"ZeRO-{stage} on dp {dp}; bf16 weights, fp32 gradients, Adam with fp32 main parameters. How many GB of state "
        f"has a rank for {billions} billion parameters?"
    )
    whole = {1: 6, 2: 2, 3: 0}[stage]
    return Asked(
        text,
        billions * (whole + (18 - whole) / dp),
        f"{whole} bytes a parameter are whole, {18 - whole} are cut by {dp}",
    )


@question("intermediate", SHARDING)
def zero3_gathers(draw: Random) -> Asked:
    dp, m, billions = *_powers(draw, 64, 8), draw.choice((1, 7, 8))
    text = (
        f"ZeRO-3 with bf16 weights on dp {dp}, {billions} billion parameters, {m} microbatches; a layer's weights are "
        "freed after each use. How many GB of weights does a rank receive in a step?"
    )
    how = f"{m} times, forward and backward, 2 · P bytes, of which (N - 1) / N come from others"
    return Asked(text, 2 * m * 2 * billions * (dp - 1) / dp, how)


@question("intermediate", ACTIVATIONS)
def kept_by_a_layer(draw: Random) -> Asked:
    (t,) = _powers(draw, 8)
    s, h = draw.choice((2048, 4096)), draw.choice((4096, 8192))
    text = (
        f"A GPT layer in 16 bits (ffn 4 h, dropout, no flash attention) under tp {t} with sequence parallelism, and "
        f"attention's scores are recomputed. It keeps how many MiB for a sequence of {s} tokens, h {h}?"
    )
    return Asked(text, 34 * s * h / t / 2**20, f"34 s b h / t bytes (Korthikanti et al. 2022): 34 · {s} · {h} / {t}")


@question("intermediate", ACTIVATIONS)
def price_of_full_recompute(draw: Random) -> Asked:
    mfu = draw.choice((36, 39, 42, 45))
    text = (
        f"A run with full recomputation has an MFU of {mfu} %. How many percent is its HFU (attention's square left "
        "out)?"
    )
    return Asked(text, mfu * 4 / 3, "a further forward pass: 8 P instead of 6 P FLOPs a token")


@question("intermediate", CONTEXT)
def second_chunk(draw: Random) -> Asked:
    (cp,) = _powers(draw, 16)
    rank = draw.randrange(cp)
    text = (
        f"cp {cp}, zigzag: the sequence is cut into {2 * cp} chunks, numbered from 0. Rank {rank} holds chunk {rank}, "
        "and which other one?"
    )
    return Asked(
        text,
        2 * cp - 1 - rank,
        f"2 cp - 1 - r = {2 * cp} - 1 - {rank}: an early and a late one, so all compute as much",
    )


@question("intermediate", CONTEXT)
def ring_of_keys(draw: Random) -> Asked:
    (cp,) = _powers(draw, 16)
    s, groups = draw.choice((32_768, 131_072)), draw.choice((4, 8))
    text = (
        f"Ring attention, cp {cp}, a sequence of {s} tokens, {groups} groups of 128 in bf16. How many MiB of keys and "
        "values does a rank send in the forward pass of a layer?"
    )
    block = 2 * s // cp * groups * 128 * 2
    return Asked(text, (cp - 1) * block / 2**20, f"{cp - 1} times a block of 2 · {s}/{cp} · {groups} · 128 · 2 bytes")


@question("intermediate", RESUME)
def bytes_to_go_on(draw: Random) -> Asked:
    billions = draw.choice((1.3, 8, 70, 405))
    text = (
        f"{billions} billion parameters, trained in bf16 with Adam. How many GB has a checkpoint from which the run "
        "goes on?"
    )
    return Asked(
        text, 14 * billions, "2 + 4 + 4 + 4 bytes: weight, main parameter, two moments; gradients are not kept"
    )


@question("intermediate", RESUME)
def youngs_interval(draw: Random) -> Asked:
    seconds, hours = draw.choice((15, 40, 90)), draw.choice((3, 8, 24))
    text = (
        f"A save stops the run for {seconds} s, and a failure comes every {hours} h. After how many minutes of work "
        "is the next save best?"
    )
    return Asked(text, math.sqrt(2 * seconds * hours * 3600) / 60, f"Young 1974: √(2 · {seconds} s · {hours} · 3600 s)")


@question("intermediate", RESUME)
def samples_of_a_text(draw: Random) -> Asked:
    s, tokens = draw.choice((128, 512, 2048)), draw.randint(5000, 900_000)
    text = (
        f"A text of {tokens:,} tokens is cut into samples of {s} tokens; the last token of a sample is only a label. "
        "How many whole samples in one epoch?"
    )
    return Asked(
        text, (tokens - 1) // s, f"({tokens:,} - 1) // {s}: neighbours share a token, since each sample needs s + 1"
    )


@question("intermediate", STEPS)
def clipped(draw: Random) -> Asked:
    norm, limit = draw.choice((2.5, 4, 12.5)), draw.choice((0.5, 1))
    text = f"The gradient norm is {norm}, --clip-grad {limit}. By which factor are the gradients multiplied?"
    return Asked(text, limit / norm, f"{limit} / {norm}, and the logged norm is the one before")


@question("intermediate", STEPS)
def cosine(draw: Random) -> Asked:
    warmup, total = draw.choice((100, 200)), draw.choice((1100, 2200))
    step = warmup + (total - warmup) * draw.choice((1, 2, 3)) // 4
    text = (
        f"lr 1e-3, min-lr 1e-4, {warmup} steps of warm-up, cosine to step {total}. What is the learning rate at step "
        f"{step}?"
    )
    part = (step - warmup) / (total - warmup)
    return Asked(
        text, 1e-4 + 9e-4 * (1 + math.cos(math.pi * part)) / 2, f"min + (max - min) (1 + cos(π · {part:g})) / 2"
    )


@question("intermediate", STEPS)
def first_step_of_adam(draw: Random) -> Asked:
    lr, gradient = draw.choice((1e-3, 3e-4)), draw.choice((0.002, 0.5, 80.0))
    text = (
        f"Adam with bias correction, eps and weight decay 0, lr {lr:g}. A gradient is {gradient:g}. How far does its "
        "weight move in the first step?"
    )
    return Asked(text, lr, "m / √v = g / √g² = ±1 in the first step, however large the gradient")


# ---------------------------------------------------------------------------------------------------------- advanced
EXPERTS = "size experts, their messages and their capacity"
KERNELS = "find from a roofline what bounds a kernel"
SERVING = "predict what a server holds, and how fast it can be"
AFTER = "compute what post-training reports"
PLANS = "plan a run: days, GPUs, failures"


@question("advanced", EXPERTS)
def capacity(draw: Random) -> Asked:
    experts, k, tokens = draw.choice((8, 16, 64)), draw.choice((1, 2, 4)), draw.choice((4096, 8192, 10_000))
    factor = draw.choice((1, 1.25, 1.5))
    text = (
        f"{tokens} tokens, {experts} experts, top-{k}, capacity factor {factor}. How many tokens does an expert take "
        "at most?"
    )
    return Asked(text, math.ceil(tokens * k * factor / experts), f"⌈{tokens} · {k} · {factor} / {experts}⌉")


@question("advanced", EXPERTS)
def active(draw: Random) -> Asked:
    h, ffn, k = draw.choice((2048, 4096)), draw.choice((768, 1408, 14_336)), draw.choice((2, 6, 8))
    shared = draw.choice((0, 1, 2))
    text = (
        f"An MoE layer has 64 experts (SwiGLU, h {h}, ffn {ffn}), top-{k}, and {shared} shared experts of that size. "
        "How many million weights of experts does a token use?"
    )
    return Asked(text, (k + shared) * 3 * h * ffn / 1e6, f"({k} + {shared}) · 3 · {h} · {ffn}")


@question("advanced", EXPERTS)
def dispatched(draw: Random) -> Asked:
    ep, k, tokens, h = *_powers(draw, 32), draw.choice((1, 2, 8)), draw.choice((4096, 8192)), draw.choice((4096, 7168))
    text = (
        f"A rank has {tokens} tokens of {h} numbers in bf16, top-{k}, ep {ep}, an even router. How many MiB does it "
        "send to other ranks in one dispatch?"
    )
    return Asked(
        text, tokens * k * h * 2 * (ep - 1) / ep / 2**20, f"{tokens} · {k} · {h} · 2 bytes, (ep - 1) / ep of them leave"
    )


@question("advanced", KERNELS)
def product_seconds(draw: Random) -> Asked:
    m, n, k = draw.choice((1, 16, 4096)), draw.choice((4096, 14_336)), draw.choice((4096, 8192))
    text = (
        f"A product in bf16: [{m}, {k}] by [{k}, {n}], read and written once. The GPU has 989 TFLOP/s and 3.35 TB/s. "
        "How many µs does it take at least?"
    )
    arithmetic, moved = 2 * m * n * k / 989e12 * 1e6, 2 * (m * k + k * n + m * n) / 3.35e12 * 1e6
    return Asked(
        text, max(arithmetic, moved), f"the larger of {arithmetic:.3g} µs of arithmetic and {moved:.3g} µs of memory"
    )


@question("advanced", KERNELS)
def norm_seconds(draw: Random) -> Asked:
    tokens, h = draw.choice((4096, 16_384)), draw.choice((4096, 8192))
    text = f"RMSNorm of {tokens} x {h} numbers in bf16 on a GPU with 3.35 TB/s. How many µs does it take at least?"
    return Asked(
        text, 4 * tokens * h / 3.35e12 * 1e6, "it reads 2 and writes 2 bytes a number; its arithmetic costs nothing"
    )


@question("advanced", KERNELS)
def scale_of_fp8(draw: Random) -> Asked:
    amax = draw.choice((0.035, 3.5, 56.0, 1792.0))
    text = (
        f"The largest magnitude of a tensor is {amax:g}. By which scale is it multiplied before the cast to e4m3, if "
        "that may be any number?"
    )
    return Asked(text, 448 / amax, f"448 is the largest number of e4m3: 448 / {amax:g}")


@question("advanced", SERVING)
def cache_of_a_token(draw: Random) -> Asked:
    layers, groups = draw.choice((16, 32, 80)), draw.choice((1, 4, 8))
    text = f"{layers} layers, {groups} groups of keys and values of 128, bf16. How many KiB of cache does a token take?"
    return Asked(
        text, 2 * layers * groups * 128 * 2 / 1024, f"keys and values: 2 · {layers} · {groups} · 128 · 2 bytes"
    )


@question("advanced", SERVING)
def blocks(draw: Random) -> Asked:
    size, prompt, new = draw.choice((16, 32)), draw.randint(20, 900), draw.randint(20, 300)
    text = (
        f"A prompt of {prompt} tokens, {new} further ones, all of them kept, blocks of {size}. How many blocks of "
        "cache does the request hold at its end?"
    )
    return Asked(text, -(-(prompt + new) // size), f"⌈({prompt} + {new}) / {size}⌉")


@question("advanced", SERVING)
def decode_rate(draw: Random) -> Asked:
    billions, rate = draw.choice((1, 8, 32)), draw.choice((0.9, 2, 3.35))
    text = (
        f"A model of {billions} billion bf16 weights answers one request on a GPU with {rate} TB/s. How many tokens a "
        "second at most?"
    )
    return Asked(
        text,
        rate * 1e12 / (2 * billions * 1e9),
        f"every weight is read for each token: {rate}·10¹² / (2 · {billions}·10⁹)",
    )


@question("advanced", SERVING)
def speculated(draw: Random) -> Asked:
    k, rate = draw.choice((2, 3, 5)), draw.choice((0.6, 0.7, 0.8))
    text = (
        f"A draft proposes {k} tokens; each is accepted with probability {rate}, independently. How many tokens does "
        "a step of the large model yield on average?"
    )
    return Asked(text, (1 - rate ** (k + 1)) / (1 - rate), f"1 + a + … + a^{k}: the last one is the large model's own")


@question("advanced", AFTER)
def adapter(draw: Random) -> Asked:
    rank, layers, h = draw.choice((8, 16, 64)), draw.choice((16, 32)), draw.choice((2048, 4096))
    text = (
        f"LoRA of rank {rank} on the query and output projections ({h} x {h}) of {layers} layers. How many million "
        "weights are trained?"
    )
    return Asked(text, 2 * layers * rank * 2 * h / 1e6, f"2 · {layers} pairs of {rank} · ({h} + {h})")


@question("advanced", AFTER)
def first_loss_of_dpo(draw: Random) -> Asked:
    beta = draw.choice((0.05, 0.1, 0.5))
    text = f"DPO with β {beta}; the policy is still its reference. What is the loss?"
    return Asked(text, math.log(2), "both ratios are 1, so -ln σ(0) = ln 2, whatever β is")


@question("advanced", AFTER)
def advantage(draw: Random) -> Asked:
    group = draw.choice((4, 8, 16))
    right = draw.randint(1, group - 1)
    text = (
        f"GRPO: {right} of a group of {group} answers get reward 1, the others 0. What is the advantage of a right "
        "one, with the standard deviation over the group (divided by n), and eps 0?"
    )
    return Asked(text, math.sqrt((group - right) / right), f"(1 - p) / √(p (1 - p)) with p = {right}/{group}")


@question("advanced", PLANS)
def days(draw: Random) -> Asked:
    billions, trillions, gpus, mfu = (
        draw.choice((8, 70, 405)),
        draw.choice((2, 15)),
        draw.choice((1024, 16_384)),
        draw.choice((38, 41, 45)),
    )
    text = (
        f"{billions} billion parameters, {trillions} trillion tokens, {gpus} H100 (989 TFLOP/s) at an MFU of {mfu} %. "
        "How many days? (Attention's square left out.)"
    )
    return Asked(
        text,
        6 * billions * trillions * 1e21 / (gpus * 989e12 * mfu / 100) / 86_400,
        "6 P T over the GPUs' model FLOPs a second",
    )


@question("advanced", PLANS)
def smallest(draw: Random) -> Asked:
    billions = draw.choice((70, 175, 405))
    text = (
        "ZeRO-3 with 18 bytes a parameter, GPUs with 80·10⁹ bytes for the state. How many GPUs at least for "
        f"{billions} billion parameters?"
    )
    return Asked(text, -(-18 * billions // 80), f"⌈18 · {billions} / 80⌉")


@question("advanced", PLANS)
def failures(draw: Random) -> Asked:
    gpus, years = draw.choice((1024, 8192, 16_384)), draw.choice((4, 6))
    text = (
        f"A GPU fails once in {years} years (of 365 days) on average. How many hours pass between two failures in a "
        f"run on {gpus} GPUs?"
    )
    return Asked(text, years * 365 * 24 / gpus, f"{years} · 365 · 24 h / {gpus}")
