# told: answers stall
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
