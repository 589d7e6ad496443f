from labkit.answers import Edit

_HIDDEN = "torch.arange(kept + n) > torch.arange(kept, kept + n)[:, None]"
_BEHIND = "Rows behind the last token are read: they hold nothing of this sequence."
_ITSELF = "A new token sees itself, too, and the new ones before it."
_UP_TO = "New token i stands at place kept + i, and sees all places up to there."
_KEYS_ALONE = "The new keys are written into the pages, and the new values are not."
_COUNTED = "Places are counted from 0: behind `kept` tokens the first new one has the place `kept`."
_SIDE = "A sequence's pages need not stand side by side in the memory: ask the table for each of them."

WRONG = [
    Edit(
        "table[(kept + i) // size]", "(kept + i) // size", ("[table]", "[: len(table)]"),
        mistake="Page i of the sequence is not page i of the memory: the table says which one.",
    ),
    Edit(
        "[: kept + n]", "[kept : kept + n]", ("torch.arange(kept + n)", "torch.arange(kept, kept + n)"),
        mistake="The tokens that were kept before are not looked at.",
    ),
    Edit(
        "[: kept + n]", "", ("torch.arange(kept + n)", "torch.arange(len(seen_k))"),
        mistake=_BEHIND,
    ),
    Edit("        keys[page, row], values[page, row] = k[i], v[i]\n", "", mistake="The new keys and values are not written into their rows."),
    Edit("(kept + i) // size], (kept + i) % size", "i // size], i % size", mistake="The new tokens come behind the kept ones; here they are written over the first."),
    Edit(_HIDDEN, "torch.zeros(n, kept + n).bool()", mistake="A new token sees new ones that come after it."),
    Edit("> torch.arange", ">= torch.arange", mistake=_ITSELF),
    Edit(" / math.sqrt(d)", "", mistake="The scores are not divided by the square root of d."),
    Edit("math.sqrt(d)", "d", mistake="The scores are divided by d, not by its square root."),
    Edit("math.sqrt(d)", "math.sqrt(size)", mistake="The scores are not divided by the square root of d."),
    Edit("size = keys.shape[1]", "size = keys.shape[1]\n    keys, values = keys.clone(), values.clone()", mistake="The pages themselves must be changed, in place: here a copy gets the new keys and values."),
    Edit("torch.arange(kept, kept + n)", "torch.arange(n)", mistake=_UP_TO),
    Edit("table[(kept + i) // size]", "table[kept // size]", mistake="The new tokens may go on in the next page: each one's own place says which page it is."),
    Edit("scores.softmax(-1)", "scores.softmax(0)", mistake="The softmax is over the keys: the weights of each new token add up to 1."),
    Edit("values[table].flatten", "keys[table].flatten", mistake="The output is a mean of values, not of keys."),
    Edit("masked_fill(hidden, -math.inf)", "masked_fill(hidden, 0.0)", mistake="A score of 0 has a weight all the same: what is hidden gets minus infinity."),
    Edit("= k[i], v[i]", "= v[i], k[i]", mistake="Keys are written where values belong, and values where keys belong."),
    Edit("keys[table]", "keys[sorted(table)]", mistake="The pages stand in the table in the order of the tokens: it must not be sorted."),
    Edit("size = keys.shape[1]", "size = keys.nan_to_num_(0.0).shape[1]\n    values.nan_to_num_(0.0)", mistake="Other rows belong to somebody else: nothing may be written there."),
    Edit("(kept + i) % size\n", "kept % size + i\n", told="modulo the page size"),
    Edit("keys[table]", "keys[sorted(table)]", ("values[table]", "values[sorted(table)]"), ("table[(kept", "sorted(table)[(kept"), mistake="The pages stand in the table in the order of the tokens: it must not be sorted."),
    Edit("[: kept + n]", "", (f"hidden = {_HIDDEN}", "hidden = torch.tensor(False)"), mistake=_BEHIND),
    Edit("keys[page, row], values[page, row] = k[i], v[i]", "keys[page, row] = k[i]", mistake=_KEYS_ALONE),
    Edit(
        "keys[page, row], values[page, row] = k[i], v[i]", "keys[page, row] = k[i]",
        ("seen_v = values[table].flatten(0, 1)[: kept + n]", "seen_v = torch.cat([values[table].flatten(0, 1)[:kept], v])"), mistake=_KEYS_ALONE,
    ),
    Edit("= k[i], v[i]", "= k[i], k[i]", mistake="The pages of values get the new values; here they get the keys."),
    Edit("[: kept + n]", "[:kept]", (_HIDDEN, "torch.zeros(n, kept).bool()"), mistake=_ITSELF),
    Edit("torch.arange(kept, kept + n)[:, None]", "torch.full((n, 1), kept)", mistake=_UP_TO),
    Edit("masked_fill(hidden, -math.inf)", "masked_fill(hidden, 0.0)", ("scores.softmax(-1)", "scores"), mistake="Scores become weights by a softmax; here they are the weights."),
    Edit("math.sqrt(d)", "math.sqrt(kept + n)", mistake="The scores are not divided by the square root of d."),
    Edit("math.sqrt(d)", "math.sqrt(n)", mistake="The scores are not divided by the square root of d."),
    Edit("(kept + i) // size], (kept + i) % size", "(kept + 1 + i) // size], (kept + 1 + i) % size", mistake=_COUNTED),
    Edit("(kept + i) // size], (kept + i) % size", "(kept - 1 + i) // size], (kept - 1 + i) % size", mistake=_COUNTED),
    Edit(
        "(kept + i) // size], (kept + i) % size", "(kept + i) % len(table)], (kept + i) // len(table)",
        ("keys[table].flatten", "keys[table].transpose(0, 1).flatten"), ("values[table].flatten", "values[table].transpose(0, 1).flatten"),
        mistake="Tokens fill one page after the other; here neighbours lie in different pages.",
    ),
    Edit(
        "table[(kept + i) // size]", "table[0] + (kept + i) // size",
        ("keys[table].flatten(0, 1)[: kept + n]", "keys.flatten(0, 1)[table[0] * size :][: kept + n]"), ("values[table].flatten(0, 1)[: kept + n]", "values.flatten(0, 1)[table[0] * size :][: kept + n]"),
        mistake=_SIDE,
    ),
]


# %% right: row by row, one query after the other
import math
import torch


def attend(q, k, v, keys, values, table, kept):
    size, out = keys.shape[1], []
    for i in range(len(q)):
        j = kept + i
        keys[table[j // size]][j % size] = k[i]
        values[table[j // size]][j % size] = v[i]
        seen = [(table[t // size], t % size) for t in range(j + 1)]
        scores = torch.stack([q[i] @ keys[page, row] for page, row in seen]) / math.sqrt(q.shape[1])
        weights = torch.exp(scores - scores.max())
        total = sum(w * values[page, row] for w, (page, row) in zip(weights, seen))
        out.append(total / weights.sum())
    return torch.stack(out)


# %% right: rows of the pages seen as one long list, torch's own attention
import torch
import torch.nn.functional as F


def attend(q, k, v, keys, values, table, kept):
    n, size, total = len(q), keys.shape[1], kept + len(q)
    j = torch.arange(total)
    rows = torch.tensor(table)[j // size] * size + j % size
    flat_k, flat_v = keys.view(-1, keys.shape[-1]), values.view(-1, values.shape[-1])
    flat_k.index_copy_(0, rows[kept:], k)
    flat_v.index_copy_(0, rows[kept:], v)
    seen = torch.ones(n, total, dtype=torch.bool).tril(kept)
    return F.scaled_dot_product_attention(q[None], flat_k[rows][None], flat_v[rows][None], attn_mask=seen)[0]


# %% right: page by page with the running softmax: no list of all keys
import math
import torch


def attend(q, k, v, keys, values, table, kept):
    n, d = q.shape
    size = keys.shape[1]
    for i in range(n):
        keys[table[(kept + i) // size], (kept + i) % size] = k[i]
        values[table[(kept + i) // size], (kept + i) % size] = v[i]
    most, mass, out = torch.full((n, 1), -math.inf), torch.zeros(n, 1), torch.zeros(n, d)
    for at, page in enumerate(table):
        first = at * size
        rows = min(size, kept + n - first)
        if rows <= 0:
            break
        scores = q @ keys[page, :rows].T / d**0.5
        places = torch.arange(first, first + rows)
        scores = scores.masked_fill(places > torch.arange(kept, kept + n)[:, None], -math.inf)
        new = torch.maximum(most, scores.amax(1, keepdim=True))
        weights = (scores - new).exp()
        scale = (most - new).exp()
        mass = mass * scale + weights.sum(1, keepdim=True)
        out = out * scale + weights @ values[page, :rows]
        most = new
    return out / mass
