# told: nothing that comes after
def work(s, cp, zigzag):
    return [s // cp * s] * cp
