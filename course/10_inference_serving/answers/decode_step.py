from labkit.answers import Edit, Same

_MANY = '2 * model["parameters"] * sequences'
_PAGES = '(gpu["memory"] - weights) // (page * token)'
_MAX = 'max(read / gpu["bandwidth"], flops / gpu["flops"])'
_TOKEN = "Each token leaves a key and a value, two vectors, in each group of every layer."
_BUSY = "The products are done for each sequence's token: with many of them they take longer than the reads."
_WHOLE = "A sequence takes whole pages: its last page is taken, however full it is."
_TWO = "A number takes `bytes` bytes: 2 is right in bf16 alone."
_BYTES = "The numbers of the cache and of the weights are counted here; each of them takes `bytes` bytes."

WRONG = [
    Edit("token = 2 *", "token =", mistake=_TOKEN),
    Edit('model["layers"] * ', "", mistake=_TOKEN),
    Edit("read = weights +", "read = weights * sequences +", mistake="The weights are read once a step, for all sequences together."),
    Edit(" + sequences * length * token", "", mistake="The keys and values of all earlier tokens are read as well."),
    Edit("sequences * length * token", "length * token", mistake="Each sequence has a cache of its own, and all of them are read."),
    Edit("* length * token", "* -(-length // page) * page * token", mistake="Only rows that hold a token are read, not the rest of the last page."),
    Edit(_MANY, 'model["parameters"] * sequences', mistake="A parameter costs two operations a token, a product and a sum."),
    Edit(_MANY, '2 * model["parameters"]', mistake=_BUSY),
    Edit(_MAX, 'read / gpu["bandwidth"]', mistake=_BUSY),
    Edit(_MAX, _MAX.replace(", ", " + ")[3:], mistake="Reading and computing go on at the same time: the longer of the two counts."),
    Edit('"rate": sequences / seconds', '"rate": 1 / seconds', mistake="A step makes one token for each sequence."),
    Edit(_PAGES, 'gpu["memory"] // (page * token)', mistake="The weights lie in the same memory."),
    Edit("pages // -(-length // page)", '(gpu["memory"] - weights) // (length * token)', mistake=_WHOLE),
    Edit("pages // -(-length // page)", "pages // max(1, length // page)", mistake="The last page, which is not full, is taken as well."),
    Edit('"rate": sequences / seconds', '"rate": sequences * length / seconds', mistake="A step makes one token for each sequence."),
    Edit(_MAX, _MAX.replace("max", "min"), mistake="Reading and computing go on at the same time: the longer of the two counts."),
    Edit('model["d"] * model["bytes"]', 'model["d"]', mistake=_BYTES),
    Edit('weights = model["parameters"] * model["bytes"]', 'weights = model["parameters"]', mistake=_BYTES),
    Edit("sequences * length * token", "sequences * (length + 1) * token", mistake="A sequence has `length` tokens: the keys and values of just these are read."),
    Edit(_MANY, f"{_MANY} * length", mistake="The products are done for the newest token of each sequence alone: what the earlier ones left lies in the cache."),
    Edit(_MAX, 'flops / gpu["flops"]', mistake="The reads are left out: with few sequences they take longer than the products."),
    Edit('"most": most', '"most": pages', mistake="`most` counts sequences, not pages."),
    Edit("pages // -(-length // page)", '(gpu["memory"] - weights) / (-(-length // page) * page * token)', mistake="Only whole sequences fit: round down."),
    Edit("pages // -(-length // page)", "pages // (length // page + 1)", mistake="Where the last page is just full, no further page is taken."),
    Edit('model["layers"] * model["groups"] *', 'model["layers"] *', mistake=_TOKEN),
    Edit(' * model["d"]', "", mistake="A key has d numbers, and so has a value: they are vectors."),
    Edit('model["d"] * model["bytes"]', 'model["d"] * 2', mistake=_TWO),
    Edit('model["parameters"] * model["bytes"]', 'model["parameters"] * 2', mistake=_TWO),
    Edit('model["d"] * model["bytes"]', 'model["d"] * 2', ('model["parameters"] * model["bytes"]', 'model["parameters"] * 2'), mistake=_TWO),
    Edit(_MANY, 'model["bytes"] * model["parameters"] * sequences', mistake="A parameter's two FLOPs are a product and a sum: they do not depend on how many bytes it has."),
    Edit("read = weights +", "read =", mistake="A step reads the weights, too, not the cache alone."),
    Edit("(page * token)", "page", mistake="A page holds `page` tokens, each of which has its bytes: the memory is counted in bytes."),
    Edit('"seconds": seconds', '"seconds": seconds / sequences', mistake="`seconds` is the time of the step, not a share of it for each sequence."),
    Edit("pages // -(-length // page)", "pages * page // length", mistake=_WHOLE),
    Edit("pages // -(-length // page)", "-(-pages // -(-length // page))", mistake="Only whole sequences fit: round down."),
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
