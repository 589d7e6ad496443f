from labkit.answers import Edit, Same

_MANY = '2 * model["parameters"] * sequences'
_PAGES = '(gpu["memory"] - weights) // (page * token)'

WRONG = [
    Edit("token = 2 *", "token =", told="a key and a value"),
    Edit('model["layers"] * ', "", told="Every layer"),
    Edit("read = weights +", "read = weights * sequences +", told="once a step"),
    Edit(" + sequences * length * token", "", told="keys and values of all earlier tokens"),
    Edit("sequences * length * token", "length * token", told="a cache of its own"),
    Edit("sequences * length * token", "sequences * token", told="looks at all tokens"),
    Edit(_MANY, 'model["parameters"] * sequences', told="two operations"),
    Edit(_MANY, '2 * model["parameters"]', told="Each sequence's token is computed"),
    Edit(
        'max(read / gpu["bandwidth"], flops / gpu["flops"])',
        'read / gpu["bandwidth"] + flops / gpu["flops"]',
        told="at the same time",
    ),
    Edit('max(read / gpu["bandwidth"], flops / gpu["flops"])', 'read / gpu["bandwidth"]', told="With many"),
    Edit('max(read / gpu["bandwidth"], flops / gpu["flops"])', 'flops / gpu["flops"]', told="With few"),
    Edit("max(", "min(", told="the longer of the two"),
    Edit('"rate": sequences / seconds', '"rate": 1 / seconds', told="one token for each"),
    Edit(_PAGES, 'gpu["memory"] // (page * token)', told="in the same memory"),
    Edit("pages // -(-length // page)", '(gpu["memory"] - weights) // (length * token)', told="whole pages"),
    Edit("pages // -(-length // page)", "pages // max(1, length // page)", told="is taken as well"),
    Edit("pages // -(-length // page)", "pages // (length // page + 1)", told="takes no further one"),
]

EQUIVALENT = [
    Same("pages = ((gpu['memory'] - weights) / (page * token))", "the next line rounds it down"),
]


# %% right: fractions, everything counted one by one
from fractions import Fraction
import math


def decode_step(model, sequences, length, page, gpu):
    token = 0
    for _ in range(model["layers"]):
        for _ in ("key", "value"):
            token += model["groups"] * model["d"] * model["bytes"]
    weights = model["parameters"] * model["bytes"]
    read = weights + sum(length * token for _ in range(sequences))
    times = [Fraction(read) / Fraction(gpu["bandwidth"]), Fraction(2 * model["parameters"] * sequences) / Fraction(gpu["flops"])]
    seconds = sorted(times)[1]
    pages = math.floor((Fraction(gpu["memory"]) - weights) / (page * token))
    return {"token": token, "read": read, "seconds": seconds, "rate": sequences / seconds,
            "most": pages // math.ceil(Fraction(length, page))}


# %% right: most by trying, the rate from the slower of two rates
def decode_step(model, sequences, length, page, gpu):
    token = 2 * model["layers"] * model["groups"] * model["d"] * model["bytes"]
    read = model["parameters"] * model["bytes"] + sequences * length * token
    rate = min(sequences * gpu["bandwidth"] / read, gpu["flops"] / (2 * model["parameters"]))
    left, most = (gpu["memory"] - model["parameters"] * model["bytes"]) // (page * token), 0
    needed = (length + page - 1) // page
    while left >= needed:
        left, most = left - needed, most + 1
    return {"most": most, "rate": rate, "seconds": sequences / rate, "read": read, "token": token}


# %% right: math.ceil and int
import math


def decode_step(model, sequences, length, page, gpu):
    token = model["bytes"] * model["d"] * model["groups"] * model["layers"] * 2
    weights = model["bytes"] * model["parameters"]
    read = weights + length * sequences * token
    seconds = max(read / gpu["bandwidth"], model["parameters"] * sequences / gpu["flops"] * 2)
    most = int(int((gpu["memory"] - weights) / (token * page)) / math.ceil(length / page))
    return dict(token=token, read=read, seconds=seconds, rate=sequences / seconds, most=most)


# %% wrong: bytes of pages read
def decode_step(model, sequences, length, page, gpu):
    token = 2 * model["layers"] * model["groups"] * model["d"] * model["bytes"]
    weights = model["parameters"] * model["bytes"]
    pages = -(-length // page)
    read = weights + sequences * pages * page * token
    seconds = max(read / gpu["bandwidth"], 2 * model["parameters"] * sequences / gpu["flops"])
    most = (gpu["memory"] - weights) // (page * token) // pages
    return {"token": token, "read": read, "seconds": seconds, "rate": sequences / seconds, "most": most}
