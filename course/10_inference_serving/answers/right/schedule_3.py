# the victims found first, by trying how many must go
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
