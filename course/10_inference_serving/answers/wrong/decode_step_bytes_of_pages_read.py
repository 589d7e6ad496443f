# told:
def decode_step(model, sequences, length, page, gpu):
    token = 2 * model["layers"] * model["groups"] * model["d"] * model["bytes"]
    weights = model["parameters"] * model["bytes"]
    pages = -(-length // page)
    read = weights + sequences * pages * page * token
    seconds = max(read / gpu["bandwidth"], 2 * model["parameters"] * sequences / gpu["flops"])
    most = (gpu["memory"] - weights) // (page * token) // pages
    return {"token": token, "read": read, "seconds": seconds, "rate": sequences / seconds, "most": most}
