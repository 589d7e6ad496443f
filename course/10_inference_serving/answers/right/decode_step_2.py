# most by trying, the rate from the slower of two rates
def decode_step(model, sequences, length, page, gpu):
    token = 2 * model["layers"] * model["groups"] * model["d"] * model["bytes"]
    read = model["parameters"] * model["bytes"] + sequences * length * token
    rate = min(sequences * gpu["bandwidth"] / read, gpu["flops"] / (2 * model["parameters"]))
    left, most = (gpu["memory"] - model["parameters"] * model["bytes"]) // (page * token), 0
    needed = (length + page - 1) // page
    while left >= needed:
        left, most = left - needed, most + 1
    return {"most": most, "rate": rate, "seconds": sequences / rate, "read": read, "token": token}
