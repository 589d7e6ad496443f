from labkit.answers import Edit, Same

_RUNS = 'min(one["tokens"] - one["computed"], budget)'
_PAGES = "Admitted is who finds pages for all its tokens and for the next one, whatever its chunk is."
_SEATS = "There are only so many seats; those that were admitted in this step have some of them."
_WHILE = "while free < more and one in left:"
_ONCE = "One preempted sequence may not give back pages enough: it goes on until there are enough."

WRONG = [
    Edit(
        "while free < more and one in left:", "while False:", ("if one in left:", "if free >= more:"),
        mistake="A sequence that runs and finds no page waits here; the newest must give its up.",
    ),
    Edit("newest = left.pop()", "newest = left.pop(0)", mistake="The oldest loses its pages here: then nobody's answer is sure to end."),
    Edit("preempted or budget == 0", "budget == 0", mistake="In a step that takes pages away from somebody nobody is admitted."),
    Edit(_RUNS, "min(1, budget)", mistake="One that runs may have more than one token to compute: the rest of its prompt."),
    Edit(' - one["pages"]', "", ('(one["computed"] + count) // size)', "count // size)"), mistake="It has pages already: only those beyond them are taken."),
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
    Edit(_RUNS, 'one["tokens"] - one["computed"]', mistake="The budget limits those that run, too."),
    Edit("budget - count\n            chunks", "budget\n            chunks", mistake="The tokens of those that run are taken from the budget."),
    Edit("preempted.append(", "preempted.insert(0, ", mistake="The names stand in the order in which pages are lost: the newest first."),
    Edit('(one["computed"] + count) // size)', '(one["computed"] + count + 1) // size)', mistake="One that runs takes pages for the tokens that it computes now; only of those that wait room for the next one is asked."),
    Edit('-(-(one["computed"] + count) // size)', '-(-one["tokens"] // size)', mistake="One that runs takes pages for its chunk, not for all of its tokens."),
    Edit(_WHILE, "while free < more and left:", ("if one in left:", "if free >= more:"), mistake="A sequence that has lost its pages is not computed in this step."),
    Edit(_WHILE, "while free < more and left[-1] is not one:", ("if one in left:", "if one in left and free >= more:"), ("while free < more and left[-1]", "while one in left and free < more and left[-1]"), mistake="If the sequence itself is the newest, it gives back its own pages."),
    Edit("        if count == 0:\n            continue\n", "", mistake="Those that get no tokens do not stand in the plan."),
    Edit('-(-(one["computed"] + count) // size)', '(one["computed"] + count) // size', mistake="A page that is begun is taken whole: round up."),
    Edit("free, budget = free - more, budget - count", "budget = budget - count", mistake="Pages that are taken are no longer free for the next one."),
    Edit(_WHILE, "if free < more and one in left:", mistake=_ONCE),
    Edit(_WHILE, "if free < more and one in left:", ("if one in left:\n", "if one in left and free >= more:\n"), mistake=_ONCE),
    Edit('one["tokens"] - one["computed"]', 'len(one["tokens"]) - one["computed"]', told="numbers, not lists"),
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
