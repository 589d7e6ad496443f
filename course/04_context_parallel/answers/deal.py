from labkit.answers import Edit, Same

_SEEN = "[i + 1 for n in lengths for i in range(n)]"
_TURN = "one[-1 - r if i % 2 else r]"
_ONE_TOKEN = (
    "You weigh a chunk by one of its tokens. A new document may begin in the chunk: add up the keys that each of its "
    "tokens sees."
)
_RETURN = "    return [["

WRONG = [
    Edit(
        _RETURN,
        "    n = len(work) // cp\n    return [list(range(r * n, r * n + n)) for r in range(cp)]\n" + _RETURN,
        mistake="These are contiguous pieces. Who holds the end of a long document has most pairs.",
    ),
    Edit(
        _RETURN,
        "    n = len(work) // cp // 2\n    return [[c for k in (r, 2 * cp - 1 - r) for c in range(k * n, k * n "
        "+ n)] for r in range(cp)]\n" + _RETURN,
        mistake="This is zigzag over the whole sequence, which balances a single document.",
    ),
    Edit(
        _RETURN,
        "    return [list(range(r, len(work), cp)) for r in range(cp)]\n" + _RETURN,
        mistake="You deal chunks in the order of the sequence, one to each rank in turn. Deal by their work.",
    ),
    Edit(
        _RETURN,
        "    return [[c for c in range(len(work)) if c % (2 * cp) in (r, 2 * cp - 1 - r)] for r in "
        "range(cp)]\n" + _RETURN,
        mistake="You deal chunks there and back in the order of the sequence. Deal by their work.",
    ),
    Edit(
        _TURN,
        "one[r]",
        mistake="You sort by work, and in every round rank 0 gets the heaviest chunk and the last rank the lightest.",
    ),
    Edit(
        _TURN,
        "one[r]",
        (", reverse=True", ""),
        mistake="You sort by work, and in every round rank 0 gets the lightest chunk and the last rank the heaviest.",
    ),
    Edit(
        _SEEN,
        "[i + 1 for i in range(sum(lengths))]",
        mistake="You weigh the chunks as if all tokens were one document. A token sees none of other documents.",
    ),
    Edit("lambda c: work[c]", "lambda c: lengths[0]", told="times the mean"),
    Edit("sum(seen[i : i + chunk])", "seen[i]", mistake=_ONE_TOKEN),
    Edit("sum(seen[i : i + chunk])", "seen[i + chunk - 1]", mistake=_ONE_TOKEN),
    Edit(
        "[one[-1 - r if i % 2 else r] for i, one in enumerate(rounds)]",
        "[one[r] for one in rounds[1:]]",
        told="is on no rank",
    ),
    Edit("for r in range(cp)]", "for r in range(cp - 1)]", told="lists for"),
    Edit(_TURN, "one[-1 - r if i % 2 else r] + 1", told="there is no chunk"),
    Edit(_TURN, "one[0]", told="is on no rank"),
    Edit(_RETURN, "    return [r for c in range(len(work)) for r in range(cp)]\n" + _RETURN, told="it is no list"),
]

RIGHT = [
    # rounds of two: the heaviest with the lightest of the next turn
    Edit("key=lambda c: work[c], reverse=True", "key=lambda c: -work[c]"),
]

_SORTED = "as many pairs more or less for each token: the order of the chunks stays nearly the same"

EQUIVALENT = [
    Same("line 3: 0 for 1", _SORTED),
    Same("line 3: 2 for 1", _SORTED),
    Same("line 3: `-` for `+`", _SORTED),
    Same("line 5: `reverse` dropped", "there and back from the lightest to the heaviest"),
    Same("line 6: range's `len(order)` - 1", "cp divides the number of chunks"),
    Same("line 7: 3 for 2", "ten rounds of 16 back and six forth: within 3 %"),
]


# %% right: each chunk to the rank with least so far that has room
def deal(lengths, chunk, cp):
    document = [d for d, n in enumerate(lengths) for _ in range(n)]
    begin = [sum(lengths[:d]) for d in range(len(lengths))]
    cost = [0] * (len(document) // chunk)
    for i, d in enumerate(document):
        cost[i // chunk] += i - begin[d] + 1
    ranks, room = [[] for _ in range(cp)], len(cost) // cp
    for c in sorted(range(len(cost)), key=cost.__getitem__)[::-1]:
        free = [r for r in ranks if len(r) < room]
        min(free, key=lambda r: sum(cost[x] for x in r)).append(c)
    return ranks


# %% right: numpy: rounds as rows, every other one turned
import numpy as np


def deal(lengths, chunk, cp):
    seen = np.concatenate([np.arange(1, n + 1) for n in lengths])
    order = np.argsort(-seen.reshape(-1, chunk).sum(1), kind="stable").reshape(-1, cp)
    order[1::2] = order[1::2, ::-1]
    return order.T


# %% right: torch, and chunks exchanged between the slowest and the fastest rank until it fits
import torch


def deal(lengths, chunk, cp):
    work = torch.cat([torch.arange(1, n + 1) for n in lengths]).view(-1, chunk).sum(1).tolist()
    held = [list(range(r, len(work), cp)) for r in range(cp)]
    pairs = lambda r: sum(work[c] for c in held[r])
    for _ in range(1000):
        ranks = sorted(range(cp), key=pairs)
        low, high = ranks[0], ranks[-1]
        gap = pairs(high) - pairs(low)
        best = min(
            (
                (abs(gap - 2 * (work[a] - work[b])), i, j)
                for i, a in enumerate(held[high])
                for j, b in enumerate(held[low])
            )
        )
        if best[0] >= gap:
            break
        held[high][best[1]], held[low][best[2]] = held[low][best[2]], held[high][best[1]]
    return [torch.tensor(of) for of in held]


# %% wrong: to the rank with least so far, whether it has room or not
# told: chunks; each of
def deal(lengths, chunk, cp):
    seen = [i + 1 for n in lengths for i in range(n)]
    work = [sum(seen[i : i + chunk]) for i in range(0, len(seen), chunk)]
    ranks = [[] for _ in range(cp)]
    for c in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        min(ranks, key=lambda r: sum(work[x] for x in r)).append(c)
    return ranks


# %% wrong: zigzag in each document, by tokens
# told: there is no chunk | is on no rank | is on 2 ranks | chunks; each of
def deal(lengths, chunk, cp):
    held, at = [[] for _ in range(cp)], 0
    for n in lengths:
        size = -(-n // (2 * cp))
        for i in range(n):
            k = i // size
            held[min(k, 2 * cp - 1 - k)].append(at + i)
        at += n
    return held
