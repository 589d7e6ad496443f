from labkit.answers import Edit

_LEAVES = "free = max(free, moment) + latency + held / per_second"
_FULL = "held >= bucket_size or number == len(ready)"
_WHOLE = "A bucket takes whole gradients: what is above bucket_size is not the beginning of the next bucket."

WRONG = [
    Edit(_LEAVES, "free = max(free, moment + latency + held / per_second)",
         mistake="Two sums travel at a time. The network carries one: a bucket may have to wait for the one before."),
    Edit(_LEAVES, "free += latency + held / per_second + (moment if free == 0 else 0)",
         mistake="From the first bucket on the network never rests. A bucket cannot travel before its last gradient is ready."),
    Edit(_LEAVES, _LEAVES.replace("moment", "ready[-1]"),
         mistake="No sum begins before the backward pass has ended: nothing is hidden."),
    Edit(f"{_LEAVES}\n            held = 0", f"first = ready[number - 1 - taken]\n            {_LEAVES.replace('moment', 'first')}\n            held = taken = 0",
         ("held, free = 0, 0.0", "held, taken, free = 0, -1, 0.0"), ("held += n\n", "held += n\n        taken += 1\n"), told="expected"),
    Edit(_FULL, "held >= bucket_size", mistake="The last bucket is missing: it is not full, and leaves at the end of the backward pass."),
    Edit(_FULL, "held > bucket_size or number == len(ready)", mistake="A bucket is full when it holds bucket_size elements or more; yours waits for more."),
    Edit("            held = 0\n", "            held = max(0, held - bucket_size)\n", mistake=_WHOLE),
    Edit("            held = 0\n", "", mistake="Each bucket has all gradients before it, too: a bucket that has left is empty."),
    Edit(_LEAVES, _LEAVES.replace("latency", "latency * (free == 0)"), mistake="The latency is paid once. Each all-reduce has its own."),
    Edit("held += n", "held += n\n        free += latency", (" + latency", ""), told="expected"),
    Edit(_LEAVES, _LEAVES.replace("held /", "n /"), mistake="A bucket has more than its last gradient: all of its elements travel."),
    Edit("return free", "return free - ready[-1]", mistake="This is the time after the backward pass. Asked is the time from its beginning."),
]


# %% right: buckets first, then the network
def last_arrival(ready, elements, bucket_size, latency, per_second):
    buckets = [[0, 0.0]]
    for moment, n in zip(ready, elements):
        if buckets[-1][0] >= bucket_size:
            buckets.append([0, 0.0])
        buckets[-1][0] += n
        buckets[-1][1] = moment
    end = 0
    for n, moment in buckets:
        end = (end if end > moment else moment) + latency + n / per_second
    return end


# %% right: from the end, by recursion
def last_arrival(ready, elements, bucket_size, latency, per_second, free=0.0):
    if not ready:
        return free
    take = next((k for k in range(1, len(ready)) if sum(elements[:k]) >= bucket_size), len(ready))
    free = max(free, ready[take - 1]) + latency + sum(elements[:take]) / per_second
    return last_arrival(ready[take:], elements[take:], bucket_size, latency, per_second, free)


# %% right: the network's idle time is counted
def last_arrival(ready, elements, bucket_size, latency, per_second):
    busy = idle = 0.0
    waiting = []
    for i, n in enumerate(elements):
        waiting.append(n)
        if sum(waiting) >= bucket_size or i + 1 == len(elements):
            idle += max(0.0, ready[i] - (idle + busy))
            busy += latency + sum(waiting) / per_second
            waiting = []
    return idle + busy
