from labkit.answers import Edit, Same

_IDLE, _FEWEST = "bubble / (1 + bubble)", "-(-20 * (p - 1) // v)"
_WARM, _LAYERS, _BORDERS = "p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p", "chunks * (layers // (p * v))", "2 * (p * v - 1)"

WRONG = [
    Edit(_IDLE, "bubble", mistake="That is idle time over work, the bubble. Asked is the part of *all* time, work and idle time together."),
    Edit(_FEWEST, "-(-19 * (p - 1) // v)", mistake="The *bubble* is to be at most 0.05, idle time over work; that is not 5 percent of all the time."),
    Edit(_FEWEST, "20 * (p - 1) // v", mistake="That is rounded down: with so few the bubble is a little above 0.05."),
    Edit("if v > 1:", "if False:", mistake="With chunks the microbatches go in groups of p (cell `interleaved`): the fewest is a multiple of p."),
    Edit(_LAYERS, "m * (layers // p)", mistake="That is GPipe's memory: all m microbatches. 1F1B goes back earlier."),
    Edit("min(m * v, warmup + 1)", "m if v == 1 else min(m * v, warmup + 1)", mistake="Where v = 1 this counts all m microbatches, the memory of GPipe. 1F1B keeps at most p."),
    Edit(") * tokens * kept", ") * tokens * hidden * kept", mistake="The bytes of a token and layer have the hidden size in them already; here it counts twice."),
    Edit("warmup + 1", "warmup", mistake="That is the warm-up alone. Before the first backward comes one more forward."),
    Edit(_WARM, "p - 1", mistake="With chunks rank 0 warms up otherwise than in plain 1F1B: look at your `interleaved`."),
    Edit(_LAYERS, "chunks * (layers // p)", mistake="A chunk is layers/(pv) layers, not all layers of the rank."),
    Edit(_BORDERS, "(p * v - 1)", mistake="This is half of the bytes: activations go forward *and* gradients come back, and a number in bf16 has 2 bytes."),
    Edit(_BORDERS, "2 * (p - 1)", mistake="With v chunks a microbatch crosses p*v - 1 borders, not p - 1."),
    Edit(_BORDERS, "4 * (p * v - 1)", mistake="This is twice the bytes: a number in bf16 has 2."),
    Edit("if v > 1:", "if True:"),
    Edit(_IDLE, f"100 * {_IDLE}", mistake="That is a percentage. Asked is the fraction itself."),
    Edit(_IDLE, f"round({_IDLE}, 2)"),
    Edit(_IDLE, "(p - 1) / (m + p - 1)", mistake="With chunks the pipeline fills and drains in steps of a v-th: the idle time is shorter."),
    Edit(_FEWEST, f"{_FEWEST} + 1"),
    Edit(_WARM, "2 * (p - 1) + (v - 1) * p"),
    Edit("min(m * v, ", "min(m, ", mistake="A rank has m passes of each of its v chunks: with few microbatches so many can be kept, and no more."),
    Edit("min(m * v, ", "max(0, ", mistake="No more passes can be kept than there are: with few microbatches the warm-up is shorter."),
    Edit(_BORDERS, "2 * p * v", mistake="Between n stages there are n - 1 borders."),
    Edit(_BORDERS, "2 * v * (p - 1)"),
    Edit('        "microbatches_for_5_percent": fewest,\n', "", told="microbatches_for_5_percent"),
]

RIGHT = [
    Edit(_IDLE, "1 - 1 / (1 + bubble)"),
]

EQUIVALENT = [
    Same("line 8: `/` for `//`", "20(p-1) is whole for one chunk; with chunks the next line rounds up"),
    Same("line 14: `/` for `//`", "p*v divides the layers"),
    Same("line 14: rounded up for down", "p*v divides the layers"),
]


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
