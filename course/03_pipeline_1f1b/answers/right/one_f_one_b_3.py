# sorted by the time slots of the schedule
def one_f_one_b(rank, p, m):
    slots = {('F', i): 2 * i + rank for i in range(m)}
    slots |= {('B', i): 2 * i + 2 * p - 1 - rank for i in range(m)}
    return [k + str(i) for k, i in sorted(slots, key=slots.get)]
