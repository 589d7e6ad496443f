from labkit.answers import Edit, Same

_RUNS = 'min(one["tokens"] - one["computed"], budget)'
_PAGES = "A sequence is admitted if pages for all its tokens and the next one are free, however small its chunk is."
_SEATS = "There are only so many seats; those that were admitted in this step have some of them."
_HAS = "It has pages already: only those beyond them are taken."
_LIMIT = "The budget limits those that run, too."
_OWN = "If the sequence itself is the newest, it gives back its own pages."
_BEGUN = "A page that is begun is taken whole: round up."
_TAKEN = "Pages that are taken are no longer free for the next one."
_FIRST = "The oldest loses its pages here: then nobody's answer is sure to end."
_MOST = "The newest is preempted, not the one with the most pages."
_OLDEST = "Those that run are served in the order of the list, the oldest first."
_WHILE = "while free < more and one in left:"
_ONCE = "One preempted sequence may not give back pages enough: it goes on until there are enough."

WRONG = [
    Edit(
        "while free < more and one in left:", "while False:", ("if one in left:", "if free >= more:"),
        mistake="A sequence that runs and finds no page waits here: the newest one has to give up its pages.",
    ),
    Edit("newest = left.pop()", "newest = left.pop(0)", mistake=_FIRST),
    Edit("preempted or budget == 0", "budget == 0", mistake="Nobody is admitted in a step that preempts a sequence."),
    Edit(_RUNS, "min(1, budget)", mistake="A sequence that runs may lack more than one token: the rest of its prompt."),
    Edit(' - one["pages"]', "", ('(one["computed"] + count) // size)', "count // size)"), mistake=_HAS),
    Edit(
        'count = min(one["tokens"], budget)\n        free',
        'count = one["tokens"]\n        if count > budget:\n            break\n        free',
        mistake="A prompt that is longer than the room left is computed in part: its chunk fills the step.",
    ),
    Edit('-(-(one["tokens"] + 1) // size)', '-(-min(one["tokens"], budget) // size)', mistake=_PAGES),
    Edit('(one["tokens"] + 1)', '(one["tokens"])', mistake=_PAGES),
    Edit("free - -(-count // size)", "free - pages", mistake="A chunk takes pages for itself; the others are asked for, not taken."),
    Edit("            break\n", "            continue\n", mistake="One that does not fit makes those behind it wait: else it may wait for ever."),
    Edit("len(left) == seats or ", "", mistake=_SEATS),
    Edit("        left.append(one)\n", "", mistake=_SEATS),
    Edit('            free += newest["pages"]\n', "", mistake="The pages of a preempted sequence are free at once."),
    Edit(_RUNS, 'one["tokens"] - one["computed"]', mistake=_LIMIT),
    Edit("budget - count\n            chunks", "budget\n            chunks", mistake="The tokens of those that run are taken from the budget."),
    Edit("preempted.append(", "preempted.insert(0, ", mistake="The names stand in the order in which pages are lost: the newest first."),
    Edit('(one["computed"] + count) // size)', '(one["computed"] + count + 1) // size)', mistake="A sequence that runs takes pages for the tokens that it computes now; room for the next one is asked only of those that wait."),
    Edit('-(-(one["computed"] + count) // size)', '-(-one["tokens"] // size)', mistake="A sequence that runs takes pages for its chunk, not for all of its tokens."),
    Edit(_WHILE, "while free < more and left:", ("if one in left:", "if free >= more:"), mistake="A sequence that has lost its pages is not computed in this step."),
    Edit(_WHILE, "while free < more and left[-1] is not one:", ("if one in left:", "if one in left and free >= more:"), ("while free < more and left[-1]", "while one in left and free < more and left[-1]"), mistake=_OWN),
    Edit("        if count == 0:\n            continue\n", "", mistake="Those that get no tokens do not stand in the plan."),
    Edit('-(-(one["computed"] + count) // size)', '(one["computed"] + count) // size', mistake=_BEGUN),
    Edit("free, budget = free - more, budget - count", "budget = budget - count", mistake=_TAKEN),
    Edit(_WHILE, "if free < more and one in left:", mistake=_ONCE),
    Edit(_WHILE, "if free < more and one in left:", ("if one in left:\n", "if one in left and free >= more:\n"), mistake=_ONCE),
    Edit('one["tokens"] - one["computed"]', 'len(one["tokens"]) - one["computed"]', told="numbers, not lists"),
    Edit("newest = left.pop()", 'newest = max(left[left.index(one) :], key=lambda row: row["pages"])\n            left.remove(newest)', mistake=_MOST),
    Edit("newest = left.pop()", 'newest = max(left, key=lambda row: row["pages"])\n            left.remove(newest)', mistake=_MOST),
    Edit(
        "newest = left.pop()", 'newest = max(left[left.index(one) :], key=lambda row: row["pages"])\n            left.remove(newest)',
        ("        if one in left:\n", "        if one not in left:\n            break\n        if one in left:\n"), mistake=_MOST,
    ),
    Edit("newest = left.pop()", "newest = left.pop(next((n for n, other in enumerate(left) if other is not one), 0))", mistake=_FIRST),
    Edit("newest = left.pop()", "newest = left.pop(left.index(one))", mistake="The sequence that needs a page does not give up its own while a newer one still has some."),
    Edit("newest = left.pop()", "newest = left.pop(-1 if left[-1] is not one or len(left) == 1 else 0)", mistake=_OWN),
    Edit(' - one["pages"]', "", mistake=_HAS),
    Edit("free - more", 'free - -(-(one["computed"] + count) // size)', mistake=_HAS),
    Edit(_RUNS, 'one["tokens"] - one["computed"]', ("budget == 0", "budget <= 0"), mistake=_LIMIT),
    Edit("free, budget = free - -(-count // size), budget - count", "free = free - -(-count // size)", mistake="Those that are admitted use up the budget, too."),
    Edit("free, budget = free - -(-count // size), budget - count", "budget = budget - count", mistake=_TAKEN),
    Edit("for one in waiting:", 'for one in sorted(waiting, key=lambda row: row["tokens"]):', mistake="Those that wait come in the order of arrival, not the shortest first."),
    Edit("list(running)", 'list(running := sorted(running, key=lambda row: row["tokens"] - row["computed"]))', mistake=_OLDEST),
    Edit("list(running)", "list(running := running[::-1])", mistake=_OLDEST),
    Edit(
        "        if count == 0:\n            continue\n", "", ('(one["computed"] + count) // size)', '(one["computed"] + max(count, 1)) // size)'), ("        if one in left:", "        if one in left and count:"),
        mistake="Without budget a sequence computes nothing and needs no page: nobody is preempted for it.",
    ),
    Edit("free < pages", "free <= pages", mistake="If just as many pages are free as are asked for, they are enough."),
    Edit('-(-(one["tokens"] + 1) // size)', '(one["tokens"] + 1) // size', mistake=_BEGUN),
    Edit("free - -(-count // size)", "free - count // size", mistake=_BEGUN),
]

EQUIVALENT = [
    Same("pages = -(((-(one['tokens'] + 1)) / size))", "free pages, whole ones, are compared with it"),
]


# %% right: by places in the list, the victims cut off at its end
def schedule(running, waiting, budget, seats, free, size):
    def pages(tokens):
        return (tokens + size - 1) // size

    chunks, preempted = [], []
    last = len(running)
    i = 0
    while i < last:
        one = running[i]
        count = min(one["tokens"] - one["computed"], budget)
        if count > 0:
            more = pages(one["computed"] + count) - one["pages"]
            while more > free and last > i:
                last -= 1
                free += running[last]["pages"]
                preempted.append(running[last]["name"])
            if last > i:
                free -= more
                budget -= count
                chunks.append((one["name"], count))
        i += 1
    seated = last
    if not preempted:
        for one in waiting:
            if not (budget > 0 and seated < seats and pages(one["tokens"] + 1) <= free):
                break
            count = min(one["tokens"], budget)
            free -= pages(count)
            budget -= count
            seated += 1
            chunks.append((one["name"], count))
    return {"preempted": preempted, "chunks": chunks}


# %% right: two functions and a class for what is left
import math


class Left:
    def __init__(self, budget, seats, free):
        self.budget, self.seats, self.free = budget, seats, free


def of_running(running, left, size):
    names, gone, plan = list(running), [], []
    for number, one in enumerate(running):
        if number >= len(names):
            break
        lacks = one["tokens"] - one["computed"]
        count = lacks if lacks < left.budget else left.budget
        if not count:
            continue
        wanted = max(0, math.ceil((one["computed"] + count) / size) - one["pages"])
        while left.free < wanted and len(names) > number:
            gone.append(names[-1]["name"])
            left.free += names[-1]["pages"]
            del names[-1]
        if len(names) > number:
            left.free -= wanted
            left.budget -= count
            plan.append([one["name"], count])
    left.seats -= len(names)
    return gone, plan


def schedule(running, waiting, budget, seats, free, size):
    left = Left(budget, seats, free)
    gone, plan = of_running(running, left, size)
    queue = [] if gone else list(waiting)
    while queue and left.budget and left.seats > 0 and math.ceil((queue[0]["tokens"] + 1) / size) <= left.free:
        one = queue.pop(0)
        count = min(one["tokens"], left.budget)
        plan.append([one["name"], count])
        left.budget -= count
        left.seats -= 1
        left.free -= math.ceil(count / size)
    return {"preempted": gone, "chunks": plan}


# %% right: the victims found first, by trying how many must go
def schedule(running, waiting, budget, seats, free, size):
    def tried(stay):
        left, room, plan = free, budget, []
        left += sum(one["pages"] for one in running[stay:])
        for one in running[:stay]:
            count = min(one["tokens"] - one["computed"], room)
            if count:
                more = -(-(one["computed"] + count) // size) - one["pages"]
                if more > left:
                    return None
                left, room = left - more, room - count
                plan.append((one["name"], count))
        return left, room, plan

    stay = len(running)
    while tried(stay) is None:
        stay -= 1
    left, room, plan = tried(stay)
    preempted = [one["name"] for one in running[stay:]][::-1]
    for one in () if preempted else waiting:
        count = min(one["tokens"], room)
        if not count or stay >= seats or -(-(one["tokens"] + 1) // size) > left:
            break
        left, room, stay = left - -(-count // size), room - count, stay + 1
        plan.append((one["name"], count))
    return {"preempted": preempted, "chunks": plan}


# %% wrong: prompts first
# mistake: Those that wait are served before those that run: answers stall.
def schedule(running, waiting, budget, seats, free, size):
    chunks, preempted, left = [], [], list(running)
    for one in waiting:
        if budget == 0 or len(left) == seats or free < -(-(one["tokens"] + 1) // size):
            break
        count = min(one["tokens"], budget)
        free, budget = free - -(-count // size), budget - count
        left.append(one)
        chunks.append((one["name"], count))
    left = list(running)
    for one in running:
        count = min(one["tokens"] - one["computed"], budget)
        if one not in left or count == 0:
            continue
        more = -(-(one["computed"] + count) // size) - one["pages"]
        while free < more and one in left:
            newest = left.pop()
            free += newest["pages"]
            preempted.append(newest["name"])
        if one in left:
            free, budget = free - more, budget - count
            chunks.append((one["name"], count))
    return {"preempted": preempted, "chunks": chunks}


# %% wrong: one static batch
def schedule(running, waiting, budget, seats, free, size):
    if running:
        return {"preempted": [], "chunks": [(one["name"], 1) for one in running]}
    return {"preempted": [], "chunks": [(one["name"], one["tokens"]) for one in waiting[:seats]]}
