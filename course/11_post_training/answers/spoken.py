from labkit.answers import Edit

_WALK = """        counts.append(inside)
        if inside:
            inside = token != end
        else:
            inside = ids[: at + 1][-len(opening) :] == opening
"""
_ONE_FEWER = "There is one label fewer than ids: the labels are ids[1:]."

WRONG = [
    Edit("return counts[1:]", "return counts[:-1]", mistake="The mask is that of ids, one place off: a label is the id behind its input."),
    Edit("counts.append(inside)", "counts.append(inside and token != end)", mistake="The token that ends an answer is the model's, too: without it, it never learns to stop."),
    Edit("inside = token != end", "inside = counts[-2] is False or token != end", mistake="An answer may be empty: then its first token is the one that stops it."),
    Edit("counts.append(inside)", "counts.append(inside and (at == 0 or counts[-1] or ids[at - 1] != opening[-1] or len(opening) == 1))",
         mistake="The first token of an answer counts: the model has to begin by itself."),
    Edit("inside = token != end", "inside = True", mistake="Behind the end of an answer somebody else writes: the user, and the template."),
    Edit("ids[: at + 1][-len(opening) :] == opening", "token == opening[-1]",
         mistake="The last id of the opening stands elsewhere, too: all of its ids must be there, in their order."),
    Edit("ids[: at + 1][-len(opening) :] == opening", "token == opening[0]",
         mistake="The first id of the opening opens every turn; which turn it is, the next ids say."),
    Edit("ids[: at + 1][-len(opening) :] == opening", "ids[at : at + len(opening)] == opening",
         mistake="The opening itself is written by the template; the answer begins behind it."),
    Edit("    return counts[1:]", "    if inside:\n        while counts and counts[-1]:\n            counts.pop()\n        counts += [False] * (len(ids) - len(counts))\n    return counts[1:]",
         mistake="An answer that is cut counts as far as it goes."),
    Edit(_WALK, _WALK + "        if token == 5 and not inside and len(counts) > 1 and counts[-1] is False and ids[at - 1] == end:\n            counts[-1] = any(counts)\n",
         mistake="The newline behind the end is the template's: the server has stopped by then."),
    Edit("return counts[1:]", "return counts", mistake=_ONE_FEWER),
    Edit("return counts[1:]", "return counts[1:] + [False]", mistake=_ONE_FEWER),
    Edit("counts.append(inside)", "counts.append(not inside)", mistake="Here everything counts except for the answers; it is the other way round."),
    Edit("inside = ids[", "inside = True not in counts and ids[", mistake="A conversation may have several answers, and all of them count."),
]


# %% right: search for openings, then for the end
def spoken(ids, opening, end):
    counts, n, at = [False] * len(ids), len(opening), 0
    while at <= len(ids) - n:
        if ids[at : at + n] != opening:
            at += 1
            continue
        at += n
        while at < len(ids):
            counts[at] = True
            at += 1
            if ids[at - 1] == end:
                break
    return counts[1:]


# %% right: for each label by itself
def spoken(ids, opening, end):
    def counts(place):
        n = len(opening)
        begun = [at + n for at in range(place - n + 1) if ids[at : at + n] == opening]
        return bool(begun) and end not in ids[begun[-1] : place]

    return [counts(place) for place in range(1, len(ids))]


# %% right: a machine with the number of ids of the opening that have been seen
def spoken(ids, opening, end):
    seen, answers, found = [], False, []
    for place, token in enumerate(ids):
        if place:
            found.append(answers)
        if answers:
            answers = token != end
            seen = []
        else:
            seen = [*seen, token][-len(opening) :]
            answers = seen == opening
    return found
