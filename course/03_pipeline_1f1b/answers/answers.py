from labkit.answers import Edit, Same

WRONG = [
    Edit("bubble / (1 + bubble)", "bubble", mistake="That is idle time over work, the bubble. Asked is the part of *all* time, work and idle time " "together."),
    Edit("chunks * (layers // (p * v))", "m * (layers // p)", mistake="That is GPipe's memory: all m microbatches. 1F1B goes back earlier."),
    Edit("chunks * (layers // (p * v))", "chunks * layers", mistake="That is what all layers together keep. A chunk of rank 0 has layers/p of them, and with v > 1 " "less still."),
    Edit("2 * (p * v - 1)", "(p * v - 1)", mistake="This is half of the bytes: activations go forward *and* gradients come back, and a number in " "bf16 has 2 bytes."),
    Edit("2 * (p * v - 1)", "2 * (p - 1)", mistake="With v chunks a microbatch crosses p*v - 1 borders, not p - 1."),
    Edit("2 * (p * v - 1)", "2 * p * v", mistake="There are p*v stages here, and one border fewer."),
    Edit("2 * (p * v - 1)", "2 * v * (p - 1)", mistake="Between two chunks a microbatch goes from the last rank back to the first: that is a border, " "too."),
    Edit("2 * (p * v - 1) * m", "2 * (p * v - 1)", mistake="These are the bytes of one microbatch; a batch has m of them."),
    Edit("warmup + 1", "warmup", mistake="That is the warm-up alone. Before the first backward comes one more forward."),
    Edit("bubble / (1 + bubble)", "100 * bubble / (1 + bubble)", mistake="The idle share is in percent here; asked is the fraction itself."),
    Edit("bubble / (1 + bubble)", "round(bubble / (1 + bubble), 2)", mistake="The idle share is rounded here. Return the number as it is."),
]

RIGHT = [
    Edit("bubble / (1 + bubble)", "1 - 1 / (1 + bubble)"),
    Edit(
        "-(-20 * (p - 1) // v)",
        "next(n for n in range(10**4) if n * v >= 20 * (p - 1))",
        ("-(-fewest // p) * p", "fewest + (p - fewest) % p"),
    ),
]

EQUIVALENT = [
    Same("line 8: `/` for `//`", "20(p-1) is whole for one chunk; with chunks the next line rounds up"),
    Same("line 14: `/` for `//`", "p*v divides the layers"),
    Same("line 14: rounded up for down", "p*v divides the layers"),
]


# %% right: other formulas for every number
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    keep = p if v == 1 else 2 * p - 1 + (v - 1) * p
    fewest = math.ceil(20 * (p - 1) / v)
    fewest += -fewest % p if v > 1 else 0
    chunk = kept_bytes_per_token_and_layer * tokens * layers / (p * v)
    return dict(idle_share=(p - 1) / (p - 1 + v * m), microbatches_for_5_percent=fewest,
                kept_bytes_on_rank_0=min(keep, m * v) * chunk, bytes_between_ranks=4 * hidden * tokens * m * (p * v - 1))


# %% right: a search for the fewest; everything else by its definition
from fractions import Fraction
from itertools import count
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    step = p if v > 1 else 1
    ahead = 2 * (p - 1) + (v - 1) * p if v > 1 else p - 1
    chunk = Fraction(layers, p * v) * tokens * kept_bytes_per_token_and_layer
    return {
        "idle_share": Fraction(p - 1, v * m + p - 1),
        "microbatches_for_5_percent": next(n for n in count(step, step) if Fraction(p - 1, v * n) <= Fraction(1, 20)),
        "kept_bytes_on_rank_0": min(ahead + 1, v * m) * chunk,
        "bytes_between_ranks": sum(2 * 2 * tokens * hidden * (p * v - 1) for _ in range(m)),
    }


# %% right: NumPy numbers
import numpy as np
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    few = np.ceil(np.int64(20 * (p - 1)) / v)
    if v != 1:
        few = np.ceil(few / p) * p
    keep = np.minimum(p if v == 1 else 2 * p - 1 + (v - 1) * p, m * v)
    return dict(idle_share=np.float64(p - 1) / (p - 1 + v * m), microbatches_for_5_percent=few,
                kept_bytes_on_rank_0=keep * np.int64(layers // p // v) * tokens * kept_bytes_per_token_and_layer,
                bytes_between_ranks=np.int64(4) * hidden * tokens * m * (p * v - 1))


# %% right: the memory is counted in the learner's own lists
from exercises.interleaved import interleaved
from exercises.one_f_one_b import one_f_one_b


def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    live = most = 0
    for word in one_f_one_b(0, p, m) if v == 1 else interleaved(0, p, m, v):
        live += 1 if word[0] == "F" else -1
        most = max(most, live)
    few = 1
    while 20 * (p - 1) > few * v or (v > 1 and few % p):
        few += 1
    return {
        "idle_share": 1 - m * v / (m * v + p - 1),
        "microbatches_for_5_percent": few,
        "kept_bytes_on_rank_0": most * layers // (p * v) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": m * sum(tokens * hidden * 2 * 2 for _ in range(p * v - 1)),
    }


# %% wrong: 5 percent of all time
# mistake: The *bubble* is to be at most 0.05, idle time over work; that is not 5 percent of all the time.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(19 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: a multiple of p without chunks
# mistake: That is the idle share with one chunk a rank.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    if True:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: fp32 activations
# mistake: These are twice the bytes: a number has 2 bytes, and a message counts once, where it is sent.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 4,
    }


# %% wrong: interleaved keeps as 1f1b
# mistake: With chunks rank 0 warms up otherwise than in plain 1F1B: look at your `interleaved`.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: layers of a rank
# mistake: A chunk is layers/(pv) layers, not all layers of the rank.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // p) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: minimum of microbatches
# mistake: A batch has no more than m*v chunks of activations, also where the warm-up would keep more.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: not a multiple of p
# mistake: With chunks the microbatches go in groups of p (cell `interleaved`): the fewest is a multiple of p.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: one way for every v
# mistake: Plain 1F1B warms up with p - 1 for one chunk; the factor 2 belongs to interleaving.
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = math.ceil(20 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: a key is missing
# told: microbatches_for_5_percent
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    idle = (p - 1) / (v * m)
    ahead = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    return {
        "idle_share": idle / (1 + idle),
        "kept_bytes_on_rank_0": min(m * v, ahead + 1) * layers // (p * v) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 4 * (p * v - 1) * m * tokens * hidden,
    }


# %% wrong: the share forgets chunks
# told: idle_share
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    ahead = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    few = next(n for n in range(1, 10**5) if 20 * (p - 1) <= v * n and (v == 1 or n % p == 0))
    return {
        "idle_share": (p - 1) / (m + p - 1),
        "microbatches_for_5_percent": few,
        "kept_bytes_on_rank_0": min(m * v, ahead + 1) * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 4 * (p * v - 1) * m * tokens * hidden,
    }
