# by places in the list, the victims cut off at its end
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
