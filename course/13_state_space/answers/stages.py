from labkit.answers import Edit, Same

_ENDS = 'costs["first"] * (stage == 0) + costs["last"] * (stage == p - 1)'
_BACK = "    return best[len(pattern)][1]\n"

WRONG = [
    Edit(_ENDS, "0", told="is possible"),
    Edit(_ENDS, 'costs["first"] * (stage == 0)', told="is possible"),
    Edit(_ENDS, 'costs["last"] * (stage == p - 1)', told="is possible"),
    Edit("max(slowest, sums[i] - sums[j] + end)", "slowest + sums[i] - sums[j] + end", told="is possible"),
    Edit("max(slowest, sums[i] - sums[j] + end)", "slowest + (sums[i] - sums[j] + end) ** 2", told="is possible"),
    Edit("max(slowest, sums[i] - sums[j] + end)", "max(slowest, i - j)", told="is possible"),
    Edit("if j < i", "if j <= i", ("range(stage + 1,", "range("), told="empty"),
    Edit(_BACK, "    return best[len(pattern)][1][::-1]\n", told="the order of layers stays"),
]

EQUIVALENT = [
    Same("line 3: -1 for 0", "a stage's cost is a difference of sums"),
    Same("line 3: 1 for 0", "a stage's cost is a difference of sums"),
    Same("line 6: -1 for 0 (2)", "every stage costs more"),
    Same("line 6: 1 for 0", "every layer costs 1 or more"),
]


# %% right: the smallest limit by bisection, filled from the front
def stages(pattern, costs, p):
    def filled(limit):
        cut, at = [], 0
        for stage in range(p):
            room = limit - (costs["first"] if stage == 0 else 0)
            last = stage == p - 1
            room -= costs["last"] if last else 0
            start = at
            while at < len(pattern) - (p - 1 - stage) and costs[pattern[at]] <= room:
                room -= costs[pattern[at]]
                at += 1
            if at == start:
                return None
            cut.append(pattern[start:at])
        return cut if at == len(pattern) else None

    low, high = 0, sum(costs[c] for c in pattern) + costs["first"] + costs["last"]
    while low < high:
        middle = (low + high) // 2
        if filled(middle) is None:
            low = middle + 1
        else:
            high = middle
    return filled(low)


# %% right: from the last stage backwards, with a memory
from functools import cache

def stages(pattern, costs, p):
    @cache
    def best(end, k):
        more = (costs["last"] if k == p else 0) + (costs["first"] if k == 1 else 0)
        if k == 1:
            return sum(costs[c] for c in pattern[:end]) + more, (pattern[:end],)
        found, load = None, more
        for start in range(end - 1, k - 2, -1):
            load += costs[pattern[start]]
            slowest, cut = best(start, k - 1)
            if found is None or max(slowest, load) < found[0]:
                found = max(slowest, load), (*cut, pattern[start:end])
        return found

    return list(best(len(pattern), p)[1])


# %% right: limits tried upwards from the mean
def stages(pattern, costs, p):
    each = [costs[c] for c in pattern]
    limit = -(-(sum(each) + costs["first"] + costs["last"]) // p)
    while True:
        cut, i = [], len(pattern)
        for stage in reversed(range(p)):
            load, j = costs["last"] * (stage == p - 1) + costs["first"] * (stage == 0), i
            while j > stage and load + each[j - 1] <= limit:
                j -= 1
                load += each[j]
            if j == i:
                break
            cut.insert(0, pattern[j:i])
            i = j
        if len(cut) == p and i == 0:
            return cut
        limit += 1


# %% right: a table of places, the cut read from behind
def stages(pattern, costs, p):
    n, inf = len(pattern), float("inf")
    prefix = [0] * (n + 1)
    for i, c in enumerate(pattern):
        prefix[i + 1] = prefix[i] + costs[c]
    table = [[inf] * (n + 1) for _ in range(p + 1)]
    begins = [[0] * (n + 1) for _ in range(p + 1)]
    table[0][0] = 0
    for k in range(1, p + 1):
        for i in range(k, n + 1):
            for j in range(k - 1, i):
                load = prefix[i] - prefix[j] + (k == 1) * costs["first"] + (k == p) * costs["last"]
                if max(load, table[k - 1][j]) < table[k][i]:
                    table[k][i], begins[k][i] = max(load, table[k - 1][j]), j
    cut, i = [], n
    for k in range(p, 0, -1):
        cut.append(pattern[begins[k][i] : i])
        i = begins[k][i]
    return cut[::-1]


# %% wrong: equal numbers of layers
# told: is possible
def stages(pattern, costs, p):
    n = len(pattern)
    borders = [n * k // p for k in range(p + 1)]
    return [pattern[a:b] for a, b in zip(borders, borders[1:])]


# %% wrong: each stage filled up to the mean
# told: is possible | empty | layers
def stages(pattern, costs, p):
    mean = (sum(costs[c] for c in pattern) + costs["first"] + costs["last"]) / p
    cut, load, stage = [], costs["first"], ""
    for i, letter in enumerate(pattern):
        left = p - len(cut) - 1
        if stage and len(cut) < p - 1 and (load + costs[letter] > mean or len(pattern) - i <= left):
            cut.append(stage)
            stage, load = "", 0
        stage += letter
        load += costs[letter]
    return [*cut, stage]


# %% wrong: all cuts tried
# told: no answer within
import itertools

def stages(pattern, costs, p):
    best = None
    for borders in itertools.combinations(range(1, len(pattern)), p - 1):
        cut = [pattern[a:b] for a, b in zip((0, *borders), (*borders, len(pattern)))]
        loads = [sum(costs[c] for c in stage) for stage in cut]
        loads[0] += costs["first"]
        loads[-1] += costs["last"]
        if best is None or max(loads) < best[0]:
            best = max(loads), cut
    return best[1]


# %% wrong: layers of one kind together
# told: the order of layers stays
def stages(pattern, costs, p):
    rest = sorted(pattern)
    return ["".join(rest[k::p]) for k in range(p)]
