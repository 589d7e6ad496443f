from labkit.answers import Edit

_HIDDEN = "torch.arange(kept + n) > torch.arange(kept, kept + n)[:, None]"

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
        mistake="Rows behind the last token are read: they hold nothing of this sequence.",
    ),
    Edit("        keys[page, row], values[page, row] = k[i], v[i]\n", "", mistake="The new keys and values are not written into their rows."),
    Edit("(kept + i) // size], (kept + i) % size", "i // size], i % size", mistake="The new tokens come behind the kept ones; here they are written over the first."),
    Edit(_HIDDEN, "torch.zeros(n, kept + n).bool()", mistake="A new token sees new ones that come after it."),
    Edit("> torch.arange", ">= torch.arange", mistake="A new token sees itself, too, and the new ones before it."),
    Edit(" / math.sqrt(d)", "", mistake="The scores are not divided by the square root of d."),
    Edit("math.sqrt(d)", "d", mistake="The scores are divided by d, not by its square root."),
    Edit("math.sqrt(d)", "math.sqrt(size)", mistake="The scores are not divided by the square root of d."),
    Edit("size = keys.shape[1]", "size = keys.shape[1]\n    keys, values = keys.clone(), values.clone()", mistake="The pages themselves must be changed, in place: here a copy gets the new keys and values."),
    Edit("torch.arange(kept, kept + n)", "torch.arange(n)", mistake="New token i stands at place kept + i, and sees all places up to there."),
    Edit("table[(kept + i) // size]", "table[kept // size]", mistake="The new tokens may go on in the next page: each one's own place says which page it is."),
    Edit("scores.softmax(-1)", "scores.softmax(0)", mistake="The softmax is over the keys: the weights of each new token add up to 1."),
    Edit("values[table].flatten", "keys[table].flatten", mistake="The output is a mean of values, not of keys."),
    Edit("masked_fill(hidden, -math.inf)", "masked_fill(hidden, 0.0)", mistake="A score of 0 has a weight all the same: what is hidden gets minus infinity."),
    Edit("= k[i], v[i]", "= v[i], k[i]", mistake="Keys are written where values belong, and values where keys belong."),
    Edit("keys[table]", "keys[sorted(table)]", mistake="The pages are read in the order of the table: it is that of the tokens."),
    Edit("size = keys.shape[1]", "size = keys.nan_to_num_(0.0).shape[1]\n    values.nan_to_num_(0.0)", mistake="Other rows belong to somebody else: nothing may be written there."),
    Edit("(kept + i) % size\n", "kept % size + i\n", told="modulo the page size"),
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
