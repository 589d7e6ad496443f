# token by token
def work(s, cp, zigzag):
    out, n = [0.0] * cp, s // cp
    for i in range(s):
        c = 2 * i // n
        out[min(c, 2 * cp - 1 - c) if zigzag else i // n] += i + 1
    return out
