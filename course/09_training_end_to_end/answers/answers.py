from labkit.answers import Edit, Same

_STATE = '{"weights", "Adam\'s moments", "consumed samples", "dropout\'s random streams", "loss scale"}'

WRONG = [
    Edit("flops / 120", "flops / 20", mistake="With D = 20 N the budget is 6 · N · 20 N = 120 N²."),
    Edit("math.sqrt(flops / 120)", "parameters", mistake="The budget stays, and the model changes: N and D follow from C = 6 N D and D = 20 N."),
    Edit("20 * best", "flops / 6 / parameters", mistake="`best_tokens` belong to the best model: 20 for each of its parameters."),
    Edit("nats / math.log(2) / token_bytes", "nats / token_bytes", mistake="A nat is 1 / ln 2 bits."),
    Edit("nats / math.log(2) / token_bytes", "nats * math.log(2) / token_bytes", mistake="A nat is more than a bit: divide by ln 2."),
    Edit("nats / math.log(2) / token_bytes", "nats / math.log(2) * token_bytes", mistake="A token's bits are shared by its bytes."),
    Edit("nats / math.log(2) / token_bytes", "math.exp(nats) / token_bytes", mistake="That is the perplexity. Bits are nats / ln 2."),
    Edit("86_400", "3600", mistake="A day has 86,400 seconds."),
    Edit("* mfu)", ")", mistake="A run reaches its MFU of the peak, not the peak."),
    Edit("* 1e12 * mfu", "* 1e9 * mfu", mistake="A TFLOP is 10¹² FLOPs."),
    Edit("max(counts) / min(counts)", "min(counts) / max(counts)", mistake="A token of the *smallest* microbatch weighs most: the question is how many times as much."),
    Edit("max(counts) / min(counts)", "max(counts) * len(counts) / sum(counts)", mistake="Compare the token that weighs most with the one that weighs least, not with the mean."),
    Edit(', "consumed samples"', "", mistake="Without the consumed samples nobody knows where the run was in its data."),
    Edit(', "loss scale"', "", mistake="fp16's loss scale is the result of all earlier overflows: no configuration knows it."),
    Edit(', "dropout\'s random streams"', "", mistake="With dropout the next draws depend on how many there have been: the streams are state."),
    Edit(_STATE, _STATE[:-1] + ', "learning rate"}', mistake="The rate is a function of the plan and of the consumed samples."),
    Edit(_STATE, _STATE[:-1] + ', "order of the samples"}', mistake="The order is a function of the seed and of the epoch."),
    Edit(_STATE, _STATE[:-1] + ', "gradients"}', mistake="Between two steps gradients have been used: the next step computes its own."),
    Edit(_STATE, _STATE[:-1] + ', "batch size of the ramp-up"}', mistake="The batch size is a function of the consumed samples."),
    Edit(_STATE, _STATE[:-1] + ', "epoch"}', mistake="The epoch is a function of the consumed samples."),
]

EQUIVALENT = [
    Same("line 10: `//` for `/`", "less than one of 10¹⁵ FLOPs is lost"),
]


# %% right: what is not saved
import math


def answers(parameters, tokens, gpus, peak, mfu, nats, token_bytes, counts, parts):
    follows = ["gradients", "learning rate", "order of the samples", "batch size of the ramp-up", "gradient norm", "epoch"]
    n = (parameters * tokens / 20) ** 0.5
    second = gpus * peak * 10**12 * mfu
    return dict(
        days=6 * parameters * tokens / second / 24 / 3600, best_parameters=n, best_tokens=n * 20,
        bits_per_byte=nats * math.log2(math.e) / token_bytes, times=sorted(counts)[-1] / sorted(counts)[0],
        saved=[p for p in parts if p not in follows],
    )


# %% right: numpy
import numpy as np


def answers(parameters, tokens, gpus, peak, mfu, nats, token_bytes, counts, parts):
    budget = 6.0 * parameters * tokens
    best = np.sqrt(budget / 6 / 20)
    weights = 1 / np.array(counts, dtype=float)
    kept = [p for p in parts if p.startswith(("weights", "Adam", "consumed", "dropout", "loss"))]
    return {
        "days": budget / gpus / (peak * 1e12) / mfu / 86400,
        "best_parameters": float(best),
        "best_tokens": float(20 * best),
        "bits_per_byte": float(nats / np.log(2.0) / token_bytes),
        "times": float(weights.max() / weights.min()),
        "saved": kept,
    }


# %% right: functions
import math


def answers(parameters, tokens, gpus, peak, mfu, nats, token_bytes, counts, parts):
    def seconds(work):
        return work / (gpus * peak * mfu) * 1e-12

    def is_state(part):
        return part in ("weights", "loss scale", "consumed samples") or "moments" in part or "streams" in part

    model = math.sqrt(parameters * tokens) / math.sqrt(20)
    return {
        "saved": list(filter(is_state, parts)), "times": max(counts) / min(counts),
        "bits_per_byte": math.log2(math.exp(nats)) / token_bytes, "best_tokens": parameters * tokens / model,
        "best_parameters": model, "days": seconds(6 * parameters * tokens) / 86400,
    }
