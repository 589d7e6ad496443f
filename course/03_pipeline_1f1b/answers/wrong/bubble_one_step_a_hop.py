# told: a backward takes 2
def bubble(p, m, v):
    steps_of_waiting = p - 1
    return steps_of_waiting / (3 * m * v)
