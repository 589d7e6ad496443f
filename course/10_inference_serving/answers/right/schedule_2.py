# two functions and a class for what is left
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
