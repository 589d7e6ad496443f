# math.ceil and int
import math


def decode_step(model, sequences, length, page, gpu):
    token = model["bytes"] * model["d"] * model["groups"] * model["layers"] * 2
    weights = model["bytes"] * model["parameters"]
    read = weights + length * sequences * token
    seconds = max(read / gpu["bandwidth"], model["parameters"] * sequences / gpu["flops"] * 2)
    most = int(int((gpu["memory"] - weights) / (token * page)) / math.ceil(length / page))
    return dict(token=token, read=read, seconds=seconds, rate=sequences / seconds, most=most)
