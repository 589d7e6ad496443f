"""Questions with numbers, for `minimegatron quiz`: each is asked with other numbers every time, and computed here.

    @question(MESSAGES, "{ranks} ranks sum {megabytes} MB ...", "2 n (N - 1) / N = ...")
    def ring_bytes(draw):                                   # draws the numbers
        ranks, megabytes = ..., ...
        return 2 * megabytes * (ranks - 1) / ranks, locals()     # the answer, and what stands in the braces

A question belongs to a line of a check-list ("You can ..."); several may share one. In other languages questions and
lines are in `quiz.zh.md`. The questions that end the labs are taken from the labs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

LEVELS = ("basic", "intermediate", "advanced")
# Lab -> level of the questions at its end.
LABS = {
    "01": "basic", "02": "basic", "09": "basic", "03": "intermediate", "04": "intermediate", "06": "intermediate",
    "08": "intermediate", "05": "advanced", "07": "advanced", "10": "advanced", "11": "advanced", "12": "advanced",
    "13": "advanced",
}  # fmt: skip

Drawn = tuple[float, Mapping[str, Any]]  # an answer, and the numbers of its question


class Can(NamedTuple):
    """A line of a check-list."""

    level: str
    name: str
    text: str


class Asked(NamedTuple):
    """A question with its numbers.

    Attributes:
        text: the question; it says in which unit the answer is wanted.
        answer: a whole number where things are counted, and then the answer must be that; else 2 % off will do.
        how: how one computes it, with these numbers.
    """

    text: str
    answer: float
    how: str


class Numeric(NamedTuple):
    """A question for which numbers are drawn."""

    name: str
    can: Can
    text: str
    how: str
    drawn: Callable[[Random], Drawn]

    def ask(self, draw: Random, text: str = "", how: str = "") -> Asked:
        """The question with numbers, in its own words or, in another language, in these."""
        answer, numbers = self.drawn(draw)
        return Asked((text or self.text).format(**numbers), answer, (how or self.how).format(**numbers))


QUESTIONS: dict[str, Numeric] = {}


def question(can: Can, text: str, how: str) -> Callable[[Callable[[Random], Drawn]], Callable[[Random], Drawn]]:
    """Put a function among the questions."""
    assert can.level in LEVELS, f"{can.level} is none of {LEVELS}"

    def keep(drawn: Callable[[Random], Drawn]) -> Callable[[Random], Drawn]:
        QUESTIONS[drawn.__name__] = Numeric(drawn.__name__, can, text, how, drawn)
        return drawn

    return keep


def _powers(draw: Random, *highest: int) -> Iterator[int]:
    """For each: a power of two from 2 to it."""
    for high in highest:
        yield 2 ** draw.randint(1, high.bit_length() - 1)


# ------------------------------------------------------------------------------------------------------------- basic
GROUPS = Can("basic", "groups", "say which ranks form each group of a layout")
MESSAGES = Can("basic", "messages", "say how many bytes a collective sends, and how long it takes")
SIZES = Can("basic", "sizes", "count the parameters of a transformer, and the bytes of its state")
LOG = Can("basic", "log", "read the log of a training")


@question(
    GROUPS,
    "A run on {world} GPUs has tp {tp}, cp {cp}, pp {pp}, ep {ep}. How large is dp?",
    "{world} / ({tp} · {cp} · {pp}): experts take ranks of dp, and need none of their own",
)
def replicas(draw: Random) -> Drawn:
    tp, cp, pp, dp = _powers(draw, 8, 4, 8, 16)
    ep = 2 ** draw.randint(1, (dp * cp).bit_length() - 1)
    world = tp * cp * pp * dp
    return dp, locals()


@question(
    GROUPS,
    "tp {tp}, cp {cp}, dp {dp}, pp {pp}, in this order, the fastest first. Which stage does rank {rank} run?",
    "a stage has {tp} · {cp} · {dp} = {inside} neighbouring ranks; {rank} // {inside}",
)
def stage_of_a_rank(draw: Random) -> Drawn:
    tp, cp, dp, pp = _powers(draw, 8, 2, 8, 8)
    rank = draw.randrange(tp * cp * dp * pp)
    inside = tp * cp * dp
    return rank // inside, locals()


@question(
    GROUPS,
    "tp {tp}, cp {cp}, dp {dp}, pp {pp}, in this order, the fastest first. Which is the second rank in the dp "
    "group of rank {rank}?",
    "neighbours in dp are tp · cp = {inside} ranks apart",
)
def next_in_the_group(draw: Random) -> Drawn:
    tp, cp, dp, pp = _powers(draw, 8, 2, 8, 4)
    inside = tp * cp
    rank = draw.randrange(inside)
    return rank + inside, locals()


@question(
    GROUPS,
    "{world} GPUs, pp {pp}, ep {ep}, etp 1. How many ranks hold the same experts?",
    "edp = {world} / (etp · ep · pp) = {world} / (1 · {ep} · {pp})",
)
def same_experts(draw: Random) -> Drawn:
    ep, pp, edp = _powers(draw, 16, 8, 8)
    world = ep * pp * edp
    return edp, locals()


@question(
    MESSAGES,
    "{ranks} ranks sum gradients of {megabytes} MB by a ring all-reduce. How many MB does each rank send?",
    "2 n (N - 1) / N = 2 · {megabytes} · {others} / {ranks}: a reduce-scatter, then an all-gather",
)
def ring_bytes(draw: Random) -> Drawn:
    (ranks,) = _powers(draw, 64)
    megabytes = draw.choice((64, 96, 320, 640, 1280))
    others = ranks - 1
    return 2 * megabytes * (ranks - 1) / ranks, locals()


@question(
    MESSAGES,
    "A ring of {ranks} ranks sums {kilobytes} kB. A step of the ring costs {latency} µs of latency, and a link "
    "carries {rate} GB/s. How many µs does it take?",
    "2 (N - 1) = {steps} steps of {latency} µs, and {moving:.4g} µs for the bytes",
)
def ring_seconds(draw: Random) -> Drawn:
    (ranks,) = _powers(draw, 64)
    kilobytes, latency, rate = draw.choice((64, 256, 1024)), draw.choice((5, 10, 20)), draw.choice((25, 50, 100))
    steps, moving = 2 * (ranks - 1), 2 * kilobytes * (ranks - 1) / ranks / rate
    return steps * latency + moving, locals()


@question(
    MESSAGES,
    "Each of {ranks} ranks holds a shard of {megabytes} MB. How many MB does a rank receive in an all-gather?",
    "the shards of the {others} others",
)
def gathered(draw: Random) -> Drawn:
    (ranks,) = _powers(draw, 64)
    megabytes = draw.choice((3, 5, 12))
    others = ranks - 1
    return megabytes * (ranks - 1), locals()


@question(
    MESSAGES,
    "A model of {layers} layers runs with tensor parallelism, without sequence parallelism or recomputation. "
    "How many all-reduces does a microbatch cause in its layers, forward and backward?",
    "attention and MLP have one each forward (after the row-parallel product) and one each backward",
)
def tensor_parallel_messages(draw: Random) -> Drawn:
    layers = draw.choice((12, 24, 32, 80))
    return 4 * layers, locals()


@question(
    SIZES,
    "A Llama has {layers} layers, hidden size {h}, {heads} heads of 128, {groups} groups of keys and values, "
    "an MLP (SwiGLU) of {ffn}, {words:,} words, and a head of its own. How many billions of parameters has it?",
    "a layer: q and o 2 h², k and v 2 · h · {groups} · 128, MLP 3 · h · {ffn}: {layer:.4g} M; embedding and "
    "head 2 · {words:,} · h = {tables:.0f} M; norms are lost in the rounding",
)
def parameters(draw: Random) -> Drawn:
    layers, heads = draw.choice((16, 24, 32)), draw.choice((16, 32))
    groups, words = draw.choice((4, 8)), draw.choice((32_000, 128_256))
    h = 128 * heads
    ffn = draw.choice((5632, 11_008, 14_336))
    a_layer = 2 * h * h + 2 * h * groups * 128 + 3 * h * ffn
    total = layers * a_layer + 2 * words * h
    layer = a_layer / 1e6
    tables = 2 * words * h / 1e6
    return total / 1e9, locals()


@question(
    SIZES,
    "bf16 weights, fp32 gradients, Adam with fp32 main parameters: how many GB of state has a model of "
    "{billions} billion parameters, without any sharding?",
    "2 + 4 + 4 + 4 + 4 = 18 bytes a parameter: weight, gradient, main parameter, two moments",
)
def state(draw: Random) -> Drawn:
    billions = draw.choice((1.3, 7, 8, 13, 70))
    return 18 * billions, locals()


@question(
    SIZES,
    "A column-parallel layer takes {h} numbers to {ffn}, on tp {tp}. How many weights does a rank hold (no bias)?",
    "the output is cut: {ffn} / {tp} rows of {h} numbers",
)
def shard_of_a_column(draw: Random) -> Drawn:
    (tp,) = _powers(draw, 8)
    h, ffn = draw.choice((1024, 2048, 4096)), draw.choice((8192, 14_336, 28_672))
    return h * ffn // tp, locals()


@question(
    LOG,
    "Sequences of {s} tokens, micro batch {b}, dp {dp}, {m} microbatches a step, cp 1. How many tokens has a step?",
    "{s} · {b} · {dp} · {m}; tp and pp ranks read the same samples",
)
def tokens_of_a_step(draw: Random) -> Drawn:
    dp, m, b = *_powers(draw, 16, 16), draw.choice((1, 2, 4))
    s = draw.choice((2048, 4096, 8192))
    return s * b * dp * m, locals()


@question(
    LOG,
    "Global batch {whole}, micro batch {b}, dp {dp}. How many microbatches has a step?",
    "{whole} / ({b} · {dp})",
)
def microbatches(draw: Random) -> Drawn:
    dp, m, b = *_powers(draw, 16, 32), draw.choice((1, 2, 4))
    whole = b * dp * m
    return m, locals()


@question(
    LOG,
    "{steps} steps of {batch} samples of {s} tokens; the data has {millions} million tokens. How many epochs?",
    "{steps} · {batch} · {s} / {millions}·10⁶",
)
def epochs(draw: Random) -> Drawn:
    steps, batch, s = draw.choice((500, 2000, 5000)), draw.choice((64, 256)), draw.choice((1024, 2048))
    millions = draw.choice((40, 250, 900))
    return steps * batch * s / (millions * 1e6), locals()


@question(
    LOG,
    "{words:,} words; the weights are fresh and small. Near which loss does a training begin?",
    "all words are equally likely: ln {words:,}",
)
def first_loss(draw: Random) -> Drawn:
    words = draw.choice((1024, 4096, 32_000, 50_257, 128_256))
    return math.log(words), locals()


@question(
    LOG,
    "The loss is {loss} a token (natural logarithm), and a token has {length} bytes on average. How many bits "
    "per byte?",
    "{loss} / ln 2 bits a token, over {length} bytes",
)
def bits_per_byte(draw: Random) -> Drawn:
    loss, length = draw.choice((2.1, 2.6, 3.2)), draw.choice((3.2, 3.9, 4.4))
    return loss / math.log(2) / length, locals()


@question(
    LOG,
    "A dense model of {billions} billion parameters trains at {rate:,.0f} tokens a second on {gpus} H100 (peak "
    "989 TFLOP/s in bf16). How many percent is the MFU? (Leave out attention's square.)",
    "6 · P · tokens/s over {gpus} · 989·10¹²; forward 2 P, backward 4 P",
)
def model_flops_utilization(draw: Random) -> Drawn:
    billions, gpus = draw.choice((7, 13, 70)), draw.choice((64, 256, 1024))
    share = draw.uniform(0.25, 0.55)
    rate = round(share * gpus * 989e12 / (6 * billions * 1e9), -3)
    return 100 * 6 * billions * 1e9 * rate / (gpus * 989e12), locals()


# ------------------------------------------------------------------------------------------------------ intermediate
BUBBLES = Can("intermediate", "bubbles", "predict the bubble and the memory of a pipeline")
SHARDING = Can("intermediate", "sharding", "say what ZeRO saves, and what it sends")
ACTIVATIONS = Can("intermediate", "activations", "say what is kept for the backward pass, and what recomputation costs")
CONTEXT = Can("intermediate", "context", "say who holds which tokens, and what context parallelism sends")
RESUME = Can("intermediate", "resume", "plan checkpoints and data so that a run can go on")
STEPS = Can("intermediate", "steps", "follow an optimizer's step by hand")


@question(
    BUBBLES,
    "1F1B, interleaved: {p} ranks, {v} chunks each, {m} microbatches. Its bubble is how many percent of the work?",
    "(p - 1) / (v m) = {others} / ({v} · {m})",
)
def bubble(draw: Random) -> Drawn:
    p, v, m = *_powers(draw, 16, 4), draw.choice((16, 32, 64))
    others = p - 1
    return 100 * (p - 1) / (v * m), locals()


@question(
    BUBBLES,
    "{p} ranks, {v} chunks each. With how many microbatches at least is the bubble at most {percent} % of the work?",
    "(p - 1) / (v m) ≤ {percent} / 100, rounded up",
)
def microbatches_for_a_bubble(draw: Random) -> Drawn:
    p, v, percent = *_powers(draw, 16, 4), draw.choice((3, 5, 8))
    return -(-100 * (p - 1) // (v * percent)), locals()


@question(
    BUBBLES,
    "1F1B, {p} stages, {m} microbatches. Of how many microbatches does stage {rank} (from 0) hold activations at most?",
    "min(m, p - r) = min({m}, {behind}); GPipe holds all {m}",
)
def microbatches_in_flight(draw: Random) -> Drawn:
    p, m = *_powers(draw, 16), draw.randint(3, 40)
    rank = draw.randrange(p)
    behind = p - rank
    return min(m, p - rank), locals()


@question(
    SHARDING,
    "ZeRO-{stage} on dp {dp}; bf16 weights, fp32 gradients, Adam with fp32 main parameters. How many GB of "
    "state has a rank for {billions} billion parameters?",
    "{whole} bytes a parameter are whole, {cut} are cut by {dp}",
)
def zero_bytes(draw: Random) -> Drawn:
    stage, billions = draw.choice((1, 2, 3)), draw.choice((7, 13, 70))
    (dp,) = _powers(draw, 64)
    whole = {1: 6, 2: 2, 3: 0}[stage]
    cut = 18 - whole
    return billions * (whole + (18 - whole) / dp), locals()


@question(
    SHARDING,
    "ZeRO-3 with bf16 weights on dp {dp}, {billions} billion parameters, {m} microbatches; a layer's weights "
    "are freed after each use. How many GB of weights does a rank receive in a step?",
    "{m} times, forward and backward, 2 · P bytes, of which (N - 1) / N come from others",
)
def zero3_gathers(draw: Random) -> Drawn:
    dp, m, billions = *_powers(draw, 64, 8), draw.choice((1, 7, 8))
    return 2 * m * 2 * billions * (dp - 1) / dp, locals()


@question(
    ACTIVATIONS,
    "A GPT layer in 16 bits (ffn 4 h, dropout, no flash attention) under tp {t} with sequence parallelism, and "
    "attention's scores are recomputed. It keeps how many MiB for a sequence of {s} tokens, h {h}?",
    "34 s b h / t bytes (Korthikanti et al. 2022): 34 · {s} · {h} / {t}",
)
def kept_by_a_layer(draw: Random) -> Drawn:
    (t,) = _powers(draw, 8)
    s, h = draw.choice((2048, 4096)), draw.choice((4096, 8192))
    return 34 * s * h / t / 2**20, locals()


@question(
    ACTIVATIONS,
    "A run with full recomputation has an MFU of {mfu} %. How many percent is its HFU (attention's square left out)?",
    "a further forward pass: 8 P instead of 6 P FLOPs a token",
)
def price_of_full_recompute(draw: Random) -> Drawn:
    mfu = draw.choice((36, 39, 42, 45))
    return mfu * 4 / 3, locals()


@question(
    CONTEXT,
    "cp {cp}, zigzag: the sequence is cut into {chunks} chunks, numbered from 0. Rank {rank} holds chunk "
    "{rank}, and which other one?",
    "2 cp - 1 - r = {chunks} - 1 - {rank}: an early and a late one, so all compute as much",
)
def second_chunk(draw: Random) -> Drawn:
    (cp,) = _powers(draw, 16)
    rank = draw.randrange(cp)
    chunks = 2 * cp
    return 2 * cp - 1 - rank, locals()


@question(
    CONTEXT,
    "Ring attention, cp {cp}, a sequence of {s} tokens, {groups} groups of 128 in bf16. How many MiB of keys "
    "and values does a rank send in the forward pass of a layer?",
    "{others} times a block of 2 · {s}/{cp} · {groups} · 128 · 2 bytes",
)
def ring_of_keys(draw: Random) -> Drawn:
    (cp,) = _powers(draw, 16)
    s, groups = draw.choice((32_768, 131_072)), draw.choice((4, 8))
    block = 2 * s // cp * groups * 128 * 2
    others = cp - 1
    return (cp - 1) * block / 2**20, locals()


@question(
    RESUME,
    "{billions} billion parameters, trained in bf16 with Adam. How many GB has a checkpoint from which the run "
    "goes on?",
    "2 + 4 + 4 + 4 bytes: weight, main parameter, two moments; gradients are not kept",
)
def bytes_to_go_on(draw: Random) -> Drawn:
    billions = draw.choice((1.3, 8, 70, 405))
    return 14 * billions, locals()


@question(
    RESUME,
    "A save stops the run for {seconds} s, and a failure comes every {hours} h. After how many minutes of work "
    "is the next save best?",
    "Young 1974: √(2 · {seconds} s · {hours} · 3600 s)",
)
def youngs_interval(draw: Random) -> Drawn:
    seconds, hours = draw.choice((15, 40, 90)), draw.choice((3, 8, 24))
    return math.sqrt(2 * seconds * hours * 3600) / 60, locals()


@question(
    RESUME,
    "A text of {tokens:,} tokens is cut into samples of {s} tokens; the last token of a sample is only a "
    "label. How many whole samples in one epoch?",
    "({tokens:,} - 1) // {s}: neighbours share a token, since each sample needs s + 1",
)
def samples_of_a_text(draw: Random) -> Drawn:
    s, tokens = draw.choice((128, 512, 2048)), draw.randint(5000, 900_000)
    return (tokens - 1) // s, locals()


@question(
    STEPS,
    "The gradient norm is {norm}, `--clip-grad {limit}`. By which factor are the gradients multiplied?",
    "{limit} / {norm}, and the logged norm is the one before",
)
def clipped(draw: Random) -> Drawn:
    norm, limit = draw.choice((2.5, 4, 12.5)), draw.choice((0.5, 1))
    return limit / norm, locals()


@question(
    STEPS,
    "lr 1e-3, min-lr 1e-4, {warmup} steps of warm-up, cosine to step {total}. What is the learning rate at "
    "step {step}?",
    "min + (max - min) (1 + cos(π · {part:g})) / 2",
)
def cosine(draw: Random) -> Drawn:
    warmup, total = draw.choice((100, 200)), draw.choice((1100, 2200))
    step = warmup + (total - warmup) * draw.choice((1, 2, 3)) // 4
    part = (step - warmup) / (total - warmup)
    return 1e-4 + 9e-4 * (1 + math.cos(math.pi * part)) / 2, locals()


@question(
    STEPS,
    "Adam with bias correction, eps and weight decay 0, lr {lr:g}. A gradient is {gradient:g}. How far does "
    "its weight move in the first step?",
    "m / √v = g / √g² = ±1 in the first step, however large the gradient",
)
def first_step_of_adam(draw: Random) -> Drawn:
    lr, gradient = draw.choice((1e-3, 3e-4)), draw.choice((0.002, 0.5, 80.0))
    return lr, locals()


# ---------------------------------------------------------------------------------------------------------- advanced
EXPERTS = Can("advanced", "experts", "size experts, their messages and their capacity")
KERNELS = Can("advanced", "kernels", "find from a roofline what bounds a kernel")
SERVING = Can("advanced", "serving", "predict what a server holds, and how fast it can be")
AFTER = Can("advanced", "after", "compute what post-training reports")
PLANS = Can("advanced", "plans", "plan a run: days, GPUs, failures")


@question(
    EXPERTS,
    "{tokens} tokens, {experts} experts, top-{k}, capacity factor {factor}. How many tokens does an expert "
    "take at most?",
    "⌈{tokens} · {k} · {factor} / {experts}⌉",
)
def capacity(draw: Random) -> Drawn:
    experts, k, tokens = draw.choice((8, 16, 64)), draw.choice((1, 2, 4)), draw.choice((4096, 8192, 10_000))
    factor = draw.choice((1, 1.25, 1.5))
    return math.ceil(tokens * k * factor / experts), locals()


@question(
    EXPERTS,
    "An MoE layer has 64 experts (SwiGLU, h {h}, ffn {ffn}), top-{k}, and {shared} shared experts of that "
    "size. How many million weights of experts does a token use?",
    "({k} + {shared}) · 3 · {h} · {ffn}",
)
def active(draw: Random) -> Drawn:
    h, ffn, k = draw.choice((2048, 4096)), draw.choice((768, 1408, 14_336)), draw.choice((2, 6, 8))
    shared = draw.choice((0, 1, 2))
    return (k + shared) * 3 * h * ffn / 1e6, locals()


@question(
    EXPERTS,
    "A rank has {tokens} tokens of {h} numbers in bf16, top-{k}, ep {ep}, an even router. How many MiB does it "
    "send to other ranks in one dispatch?",
    "{tokens} · {k} · {h} · 2 bytes, (ep - 1) / ep of them leave",
)
def dispatched(draw: Random) -> Drawn:
    ep, k, tokens, h = *_powers(draw, 32), draw.choice((1, 2, 8)), draw.choice((4096, 8192)), draw.choice((4096, 7168))
    return tokens * k * h * 2 * (ep - 1) / ep / 2**20, locals()


@question(
    KERNELS,
    "A product in bf16: [{m}, {k}] by [{k}, {n}], read and written once. The GPU has 989 TFLOP/s and 3.35 "
    "TB/s. How many µs does it take at least?",
    "the larger of {arithmetic:.3g} µs of arithmetic and {moved:.3g} µs of memory",
)
def product_seconds(draw: Random) -> Drawn:
    m, n, k = draw.choice((1, 16, 4096)), draw.choice((4096, 14_336)), draw.choice((4096, 8192))
    arithmetic, moved = 2 * m * n * k / 989e12 * 1e6, 2 * (m * k + k * n + m * n) / 3.35e12 * 1e6
    return max(arithmetic, moved), locals()


@question(
    KERNELS,
    "RMSNorm of {tokens} x {h} numbers in bf16 on a GPU with 3.35 TB/s. How many µs does it take at least?",
    "it reads 2 and writes 2 bytes a number; its arithmetic costs nothing",
)
def norm_seconds(draw: Random) -> Drawn:
    tokens, h = draw.choice((4096, 16_384)), draw.choice((4096, 8192))
    return 4 * tokens * h / 3.35e12 * 1e6, locals()


@question(
    KERNELS,
    "The largest magnitude of a tensor is {amax:g}. By which scale is it multiplied before the cast to e4m3, "
    "if that may be any number?",
    "448 is the largest number of e4m3: 448 / {amax:g}",
)
def scale_of_fp8(draw: Random) -> Drawn:
    amax = draw.choice((0.035, 3.5, 56.0, 1792.0))
    return 448 / amax, locals()


@question(
    SERVING,
    "{layers} layers, {groups} groups of keys and values of 128, bf16. How many KiB of cache does a token take?",
    "keys and values: 2 · {layers} · {groups} · 128 · 2 bytes",
)
def cache_of_a_token(draw: Random) -> Drawn:
    layers, groups = draw.choice((16, 32, 80)), draw.choice((1, 4, 8))
    return 2 * layers * groups * 128 * 2 / 1024, locals()


@question(
    SERVING,
    "A prompt of {prompt} tokens, {new} further ones, all of them kept, blocks of {size}. How many blocks of "
    "cache does the request hold at its end?",
    "⌈({prompt} + {new}) / {size}⌉",
)
def blocks(draw: Random) -> Drawn:
    size, prompt, new = draw.choice((16, 32)), draw.randint(20, 900), draw.randint(20, 300)
    return -(-(prompt + new) // size), locals()


@question(
    SERVING,
    "A model of {billions} billion bf16 weights answers one request on a GPU with {rate} TB/s. How many tokens "
    "a second at most?",
    "every weight is read for each token: {rate}·10¹² / (2 · {billions}·10⁹)",
)
def decode_rate(draw: Random) -> Drawn:
    billions, rate = draw.choice((1, 8, 32)), draw.choice((0.9, 2, 3.35))
    return rate * 1e12 / (2 * billions * 1e9), locals()


@question(
    SERVING,
    "A draft proposes {k} tokens; each is accepted with probability {rate}, independently. How many tokens "
    "does a step of the large model yield on average?",
    "1 + a + … + a^{k}: the last one is the large model's own",
)
def speculated(draw: Random) -> Drawn:
    k, rate = draw.choice((2, 3, 5)), draw.choice((0.6, 0.7, 0.8))
    return (1 - rate ** (k + 1)) / (1 - rate), locals()


@question(
    AFTER,
    "LoRA of rank {rank} on the query and output projections ({h} x {h}) of {layers} layers. How many million "
    "weights are trained?",
    "2 · {layers} pairs of {rank} · ({h} + {h})",
)
def adapter(draw: Random) -> Drawn:
    rank, layers, h = draw.choice((8, 16, 64)), draw.choice((16, 32)), draw.choice((2048, 4096))
    return 2 * layers * rank * 2 * h / 1e6, locals()


@question(
    AFTER,
    "DPO with β {beta}; the policy is still its reference. What is the loss?",
    "both ratios are 1, so -ln σ(0) = ln 2, whatever β is",
)
def first_loss_of_dpo(draw: Random) -> Drawn:
    beta = draw.choice((0.05, 0.1, 0.5))
    return math.log(2), locals()


@question(
    AFTER,
    "GRPO: {right} of a group of {group} answers get reward 1, the others 0. What is the advantage of a right "
    "one, with the standard deviation over the group (divided by n), and eps 0?",
    "(1 - p) / √(p (1 - p)) with p = {right}/{group}",
)
def advantage(draw: Random) -> Drawn:
    group = draw.choice((4, 8, 16))
    right = draw.randint(1, group - 1)
    return math.sqrt((group - right) / right), locals()


@question(
    PLANS,
    "{billions} billion parameters, {trillions} trillion tokens, {gpus} H100 (989 TFLOP/s) at an MFU of {mfu} "
    "%. How many days? (Attention's square left out.)",
    "6 P T over the GPUs' model FLOPs a second",
)
def days(draw: Random) -> Drawn:
    billions, trillions, gpus, mfu = (
        draw.choice((8, 70, 405)),
        draw.choice((2, 15)),
        draw.choice((1024, 16_384)),
        draw.choice((38, 41, 45)),
    )
    return 6 * billions * trillions * 1e21 / (gpus * 989e12 * mfu / 100) / 86_400, locals()


@question(
    PLANS,
    "ZeRO-3 with 18 bytes a parameter, GPUs with 80·10⁹ bytes for the state. How many GPUs at least for "
    "{billions} billion parameters?",
    "⌈18 · {billions} / 80⌉",
)
def smallest(draw: Random) -> Drawn:
    billions = draw.choice((70, 175, 405))
    return -(-18 * billions // 80), locals()


@question(
    PLANS,
    "A GPU fails once in {years} years (of 365 days) on average. How many hours pass between two failures in a "
    "run on {gpus} GPUs?",
    "{years} · 365 · 24 h / {gpus}",
)
def failures(draw: Random) -> Drawn:
    gpus, years = draw.choice((1024, 8192, 16_384)), draw.choice((4, 6))
    return years * 365 * 24 / gpus, locals()
