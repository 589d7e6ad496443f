from labkit.answers import Edit

_STATE = '4 * sizes["heads"] * sizes["p"] * sizes["n"]'
_TOKEN = '2 * sizes["groups"] * sizes["d"] * size'

WRONG = [
    Edit(_TOKEN, 'sizes["groups"] * sizes["d"] * size',
         mistake="A token leaves a key and a value: twice groups · d numbers."),
    Edit(_STATE, f"{_STATE} * size // 4",
         mistake="The state is in fp32, 4 bytes a number, whatever the element size of the rest is."),
    Edit(_STATE, f"{_STATE} * s",
         mistake="There is one state, however many tokens came: nothing in it grows with s."),
    Edit('(sizes["taps"] - 1)', 'sizes["taps"]',
         mistake="The newest token brings its own input: the taps - 1 before it are kept."),
    Edit('+ 2 * sizes["state_groups"] * sizes["n"]', "",
         mistake="B and C pass the convolution, too: 2 · state_groups · n further channels."),
    Edit('2 * sizes["state_groups"] * sizes["n"]', '2 * sizes["heads"] * sizes["n"]',
         mistake="B and C are shared: there are state_groups of them, not one for each head."),
    Edit('2 * sizes["state_groups"]', 'sizes["state_groups"]',
         mistake="B and C have state_groups · n channels each: count both."),
    Edit('2 * sizes["state_groups"] * sizes["n"]', '2 * sizes["n"]',
         mistake="B and C have n channels for every state group, not n in all."),
    Edit("channels * size", "channels * 4",
         mistake="The state alone is in fp32: the convolution's inputs have element_size bytes a number."),
    Edit(" + (sizes[\"taps\"] - 1) * channels * size", "",
         mistake="A Mamba-2 layer keeps the convolution's last inputs beside the state."),
    Edit("state // token + 1", "-(-state // token)",
         mistake="Where both keep the same, the cache is not larger yet: one token more."),
    Edit("state // token + 1", "state / token", told="expected 12"),
    Edit('pattern.count("M") * state', '(len(pattern) - pattern.count("*")) * state',
         mistake="MLPs and experts keep nothing: count the M, not all that is no attention."),
]


# %% right: the first number of tokens by a loop
def kept_bytes(pattern, s, sizes):
    g, d, heads, p, n, sg, taps, size = (
        sizes[k] for k in ("groups", "d", "heads", "p", "n", "state_groups", "taps", "element_size")
    )
    cache = lambda tokens: tokens * g * d * 2 * size
    state = heads * p * n * 4 + (taps - 1) * (heads * p + sg * n + sg * n) * size
    first = 0
    while cache(first) <= state:
        first += 1
    return {"*": cache(s), "M": state, "model": sum({"*": cache(s), "M": state}.get(c, 0) for c in pattern), "from": first}


# %% right: by the size of tensors
import torch

def kept_bytes(pattern, s, sizes):
    z = sizes
    of = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[z["element_size"]]
    token = torch.empty(2, z["groups"], z["d"], dtype=of, device="meta")
    held = [torch.empty(z["heads"], z["p"], z["n"], device="meta")]
    for channels in (z["heads"] * z["p"], z["state_groups"] * z["n"], z["state_groups"] * z["n"]):
        held.append(torch.empty(z["taps"] - 1, channels, dtype=of, device="meta"))
    layer = {"*": s * token.nbytes, "M": sum(t.nbytes for t in held)}
    return {**layer, "model": sum(layer.get(c, 0) for c in pattern), "from": layer["M"] // token.nbytes + 1}


# %% right: by floor and a comparison
import math

def kept_bytes(pattern, s, sizes):
    size = sizes["element_size"]
    a = 2 * size * sizes["groups"] * sizes["d"]
    m = sizes["heads"] * sizes["p"] * (4 * sizes["n"] + size * (sizes["taps"] - 1))
    m += 2 * size * (sizes["taps"] - 1) * sizes["state_groups"] * sizes["n"]
    at = math.ceil(m / a)
    at += at * a == m
    return {"*": a * s, "M": m, "model": a * s * pattern.count("*") + m * pattern.count("M"), "from": at}


# %% right: layer by layer, the total counted last
def kept_bytes(pattern, s, sizes):
    numbers = 2 * sizes["groups"] * sizes["d"]
    conv = (sizes["taps"] - 1) * (sizes["heads"] * sizes["p"] + 2 * sizes["state_groups"] * sizes["n"])
    state = 4 * sizes["heads"] * sizes["p"] * sizes["n"] + conv * sizes["element_size"]
    model = 0
    for letter in pattern:
        if letter == "M":
            model += state
        elif letter == "*":
            model += s * numbers * sizes["element_size"]
    fewest = (state + numbers * sizes["element_size"]) // (numbers * sizes["element_size"])
    return {"model": model, "*": s * numbers * sizes["element_size"], "M": state, "from": fewest}
