from labkit.answers import Edit

WRONG = [
    Edit("seen[pair] += n", "seen[pair] += 1", mistake="A word that is seen n times counts n times."),
    Edit("for pair in zip(word, word[1:]):", "for pair in set(zip(word, word[1:])):", mistake="A word may have a pair twice; then it counts twice."),
    Edit("key=lambda pair: (-seen[pair], pair)", "key=lambda pair: -seen[pair]", mistake="Of equally frequent pairs the first by the alphabet is taken, not the first that was seen."),
    Edit("best = min(seen, key=lambda pair: (-seen[pair], pair))", "best = max(seen, key=lambda pair: (seen[pair], pair))", mistake="Of equally frequent pairs the *first* by the alphabet is taken."),
    Edit("key=lambda pair: (-seen[pair], pair)", "key=lambda pair: (-seen[pair], ''.join(pair))", mistake="Pairs are compared piece by piece: (a, bc) comes before (ab, c)."),
    Edit("        return [], words\n", "        return None, words\n", mistake="Where there is no pair, it is [], an empty list."),
    Edit("    if not seen:\n        return [], words\n", "", told="min"),
    Edit("at += wide", "at += 1", mistake="The right piece of a joined pair is used up: go on behind it."),
    Edit("if tuple(word[at : at + 2]) == best", "if tuple(word[at : at + 2]) == best and not any(len(p) > 1 for p in pieces)", mistake="A word may have the pair more than once, and every one is joined."),
    Edit("zip(word, word[1:])", "zip(word[::2], word[1::2])", mistake="Every piece and the one behind it are a pair, not every second one."),
    Edit('    joined = []\n    for word in words:\n', '    joined = []\n    for word in words:\n        if ("".join(best) in "".join(word)) and len("".join(best)) > 1 and "".join(word) != "":\n            joined.append([p for p in "".join(word).replace("".join(best), "\\0").replace("\\0", "\\0" + "".join(best) + "\\0").split("\\0") if p])\n            continue\n',
         mistake="The pair is two pieces beside each other, not their letters anywhere in the word."),
]


# %% right: with a regex on markers
def merge_round(words, counts):
    seen = {}
    for word, n in zip(words, counts):
        for i in range(len(word) - 1):
            pair = (word[i], word[i + 1])
            seen[pair] = seen.get(pair, 0) + n
    if not seen:
        return [], words
    most = max(seen.values())
    a, b = sorted(pair for pair, n in seen.items() if n == most)[0]
    out = []
    for word in words:
        text = "\x01" + "\x01".join(word) + "\x01"
        text = text.replace("\x01", "\x01\x01")
        text = text.replace(f"\x01{a}\x01\x01{b}\x01", f"\x01{a}{b}\x01")
        out.append([p for p in text.split("\x01") if p])
    return [a, b], out


# %% right: recursion
from collections import defaultdict


def merge_round(words, counts):
    def join(word):
        if len(word) < 2:
            return list(word)
        if word[0] == left and word[1] == right:
            return [left + right] + join(word[2:])
        return [word[0]] + join(word[1:])

    table = defaultdict(int)
    for n, word in zip(counts, words):
        for i, piece in enumerate(word[:-1]):
            table[piece, word[i + 1]] += n
    if len(table) == 0:
        return [], words
    (left, right), _ = sorted(table.items(), key=lambda item: (-item[1], item[0]))[0]
    return [left, right], [join(word) for word in words]


# %% right: joins in a copy, from the left
import itertools
from collections import Counter


def merge_round(words, counts):
    seen = Counter()
    for word, n in zip(words, counts):
        seen.update({pair: n * k for pair, k in Counter(itertools.pairwise(word)).items()})
    if not seen:
        return [], [list(w) for w in words]
    best = sorted(seen, key=lambda p: (-seen[p], p[0], p[1]))[0]
    new = []
    for word in words:
        word, i = list(word), 0
        while i + 1 < len(word):
            if (word[i], word[i + 1]) == best:
                word[i : i + 2] = [word[i] + word[i + 1]]
            i += 1
        new.append(word)
    return list(best), new
