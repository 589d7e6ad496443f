from labkit.answers import Edit, Same

WRONG = [
    Edit("bubble / (1 + bubble)", "bubble", told="work and idle time together"),
    Edit("chunks * (layers // (p * v))", "m * (layers // p)", told="GPipe's memory"),
    Edit("chunks * (layers // (p * v))", "chunks * layers", told="what all layers together keep"),
    Edit("2 * (p * v - 1)", "(p * v - 1)", told="This is half of the bytes"),
    Edit("2 * (p * v - 1)", "2 * (p - 1)", told="p*v - 1 borders"),
    Edit("2 * (p * v - 1)", "2 * p * v", told="one border fewer"),
    Edit("2 * (p * v - 1)", "2 * v * (p - 1)", told="back to the first: that is a border, too"),
    Edit("2 * (p * v - 1) * m", "2 * (p * v - 1)", told="bytes of one microbatch"),
    Edit("warmup + 1", "warmup", told="the warm-up alone"),
    Edit("bubble / (1 + bubble)", "100 * bubble / (1 + bubble)", told="in percent here"),
    Edit("bubble / (1 + bubble)", "round(bubble / (1 + bubble), 2)", told="rounded"),
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
# told: not 5 percent of all
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


# %% wrong: a multiple of p without chunks
# told: one chunk
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
# told: 2 bytes
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
# told: warms up otherwise than in plain 1F1B
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
# told: layers/(pv)
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
# told: no more than m*v
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


# %% wrong: no minimum
# told: no more than m*v
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = warmup + 1
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
# told: multiple of p
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
# told: p - 1 for one chunk
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


# %% wrong: rounded down
# told: fewest
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = 20 * (p - 1) // v
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


# %% wrong: rounded to the nearest
# told: fewest
import math
def answers(p, m, v, layers, tokens, hidden, kept_bytes_per_token_and_layer):
    bubble = (p - 1) / (v * m)
    warmup = p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p
    chunks = min(m * v, warmup + 1)
    fewest = round(20 * (p - 1) / v)
    if v > 1:
        fewest = math.ceil(fewest / p) * p
    return {
        "idle_share": bubble / (1 + bubble),
        "microbatches_for_5_percent": fewest,
        "kept_bytes_on_rank_0": chunks * (layers // (p * v)) * tokens * kept_bytes_per_token_and_layer,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
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
