# told:
def schedule(running, waiting, budget, seats, free, size):
    if running:
        return {"preempted": [], "chunks": [(one["name"], 1) for one in running]}
    return {"preempted": [], "chunks": [(one["name"], one["tokens"]) for one in waiting[:seats]]}
