# fractions, everything counted one by one
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
